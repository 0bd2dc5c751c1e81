"""Prints the losses of two runs of train.py side by side; fails if they differ.

python compare.py one.json four.json --tolerance 1e-4
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs=2)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="largest relative difference (default: %(default)s)",
    )
    parser.add_argument(
        "--rows", type=int, default=20, help="steps to print (default: %(default)s)"
    )
    args = parser.parse_args()
    one, other = (json.loads(path.read_text()) for path in args.runs)
    pairs = list(zip(one["losses"], other["losses"], strict=True))
    differences = [abs(b - a) / abs(a) for a, b in pairs]

    table = Table(
        "step",
        one["name"],
        other["name"],
        "relative difference",
        title="losses",
        title_justify="left",
    )
    for column in table.columns:
        column.justify = "right"
    every = max(1, -(-len(pairs) // args.rows))
    for i, ((a, b), difference) in enumerate(zip(pairs, differences)):
        if (i + 1) % every == 0 or i in (0, len(pairs) - 1):
            table.add_row(
                str(one["first_step"] + i + 1), f"{a:.6f}", f"{b:.6f}", f"{difference:.1e}"
            )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(table)
    worst = max(differences)
    console.print(
        f"largest relative difference of {len(pairs)} steps: {worst:.1e}, allowed "
        f"{args.tolerance:.0e}: " + ("equal" if worst <= args.tolerance else "DIFFERENT")
    )
    raise SystemExit(worst > args.tolerance or worst != worst)


if __name__ == "__main__":
    main()
