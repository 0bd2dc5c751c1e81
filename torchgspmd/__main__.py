"""`python -m torchgspmd doctor`: what of this installation of torch can be used."""

from __future__ import annotations

import argparse

from .doctor import doctor


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m torchgspmd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="the version of torch, what it lacks, backends at hand")
    parser.parse_args()
    print(doctor())


if __name__ == "__main__":
    main()
