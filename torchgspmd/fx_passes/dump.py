"""Print the passes on standard error, as TORCHGSPMD_DUMP says.

1: the final graph. 2: the changes of every pass, too. 3: why each value has its layout, too.
"""

from __future__ import annotations

import difflib
import os
import sys

from ..errors import ShardingError
from .program import Program


def dump_level() -> int:
    """Return the level in TORCHGSPMD_DUMP, 0 without one."""
    text = os.environ.get("TORCHGSPMD_DUMP") or "0"
    if not text.isdecimal():
        raise ShardingError.here(
            f"TORCHGSPMD_DUMP is {text!r}",
            fix="set it to 1 (the final graph), 2 (each pass's changes) or 3 (reasons, too)",
        )
    return int(text)


def dump_pass(program: Program, name: str) -> None:
    """Print a pass's changes, or the whole program at its first stage and on one device."""
    if dump_level() < 2:
        return
    before, text = program.printed.splitlines(), str(program).splitlines()
    changes = [*difflib.unified_diff(before, text, "before", name, lineterm="", n=0)]
    # The first line tells global programs and those of a device apart: a diff between them would
    # list every line.
    is_first = before[:1] != text[:1]
    dump_text("\n".join(text if is_first else changes or ["no change"]), f"after {name}")
    program.printed = "\n".join(text)


def dump_text(text: str, title: str) -> None:
    """Print a text below a title on standard error."""
    print(f"---- torchgspmd: {title}\n{text}", file=sys.stderr)
