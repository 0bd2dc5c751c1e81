"""`torchgspmd`, also `python -m torchgspmd`: the command line (tools/command_line.py)."""

from __future__ import annotations

import sys

from .tools.command_line import run


def main() -> None:
    """Run the command line, and exit with its code."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
