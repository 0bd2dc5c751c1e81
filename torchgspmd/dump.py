"""Print the passes on standard error, as TORCHGSPMD_DUMP says.

1: the final graph. 2: what every pass changed, too. 3: why each value has its layout, too.
"""

from __future__ import annotations

import difflib
import os
import sys

from .fx_passes.printer import program_text
from .fx_passes.program import Program
from .plan import Plan


def _level() -> int:
    return int(os.environ.get("TORCHGSPMD_DUMP") or 0)


def dump_pass(program: Program, name: str) -> None:
    """Print what a pass changed, or the whole program at its first stage and on one device."""
    if _level() < 2:
        return
    before, text = program.printed.splitlines(), str(program).splitlines()
    changes = [*difflib.unified_diff(before, text, "before", name, lineterm="", n=0)]
    is_first = before[:1] != text[:1]
    _print("\n".join(text if is_first else changes or ["no change"]), f"after {name}")
    program.printed = "\n".join(text)


def dump_plan(plan: Plan) -> None:
    """Print the plan."""
    level = _level()
    if level:
        _print(str(plan), "the plan")
    if level > 1:
        _print(
            program_text(plan.program_graph),
            "what each device runs, where communication begins and is waited for",
        )
    if level > 2:
        lines = [line for value in plan.layouts.spec for line in plan.layouts.explain(value)]
        _print("\n".join(lines), "who sharded what, and why")


def _print(text: str, title: str) -> None:
    print(f"---- torchgspmd: {title}\n{text}", file=sys.stderr)
