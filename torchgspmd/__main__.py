"""`python -m torchgspmd`: `doctor` checks this installation, `plan` shows a plan of a model."""

from __future__ import annotations

import argparse
import sys

from .errors import ShardingError
from .tools import plan_command
from .tools.doctor import doctor


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m torchgspmd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="the version of torch, what it lacks, backends at hand")
    plan = commands.add_parser("plan", help="layouts, time and memory of a model, without devices")
    plan_command.add_arguments(plan)
    args = parser.parse_args()
    try:
        print(plan_command.run(args) if args.command == "plan" else doctor())
    except ShardingError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
