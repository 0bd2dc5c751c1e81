"""How functions' bytecode uses lists and tables: whether it reads or only adds to them.

A list that a program only appends to decides nothing, whatever its length. A value that is read
has a guard.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import CodeType, FunctionType

from .instructions import (
    ATTRIBUTE,
    CALL,
    CELL,
    COPY,
    GLOBAL,
    ITEM,
    JUMP,
    MOVE,
    POP,
    STORE_ITEM,
    Step,
    bodies,
)

_BY_STRING = {"getattr", "__getattribute__", "__dict__", "vars", "attrgetter"}
READ = "read"


def uses_of_names(functions: Iterable[FunctionType]) -> dict[str, set[str]]:
    """Return how functions use the values behind each attribute, global and closure name.

        self.seen.append(y)                 .append
        LAST["loss"] = y                    []=
        LAST.update(loss=y)                 []=
        self.log["loss"].append(y)          [].append
        self.log.setdefault(k, []).append   [].append
        len(self.seen)                      read, as everything else

    A name in a string may be read: `getattr(self, "seen")`.
    """
    uses: dict[str, set[str]] = {}
    for function in functions:
        for name, use in _uses_in_code(function.__code__):
            uses.setdefault(name, set()).add(use)
    return uses


@functools.lru_cache(maxsize=4096)
def _uses_in_code(code: CodeType) -> tuple[tuple[str, str], ...]:
    found: dict[tuple[str, str], None] = {}
    for body in bodies(code):
        for at, step in enumerate(body.steps):
            if step.action in (ATTRIBUTE, GLOBAL, CELL):
                found[step.name, _use(body.steps[at + 1 :])] = None
        if not _BY_STRING.isdisjoint(body.names):
            found |= dict.fromkeys((name, READ) for name in body.strings)
    return tuple(found)


def _use(steps: tuple[Step, ...]) -> str:
    """Return the use of the value on top of the stack, by the steps that take it."""
    depth, use, calls = 1, "", False  # depth: the stack's, from the value on
    for action, name, growth in steps:
        # Behind a jump, or with copies, the stack's depth no longer tells where the value is.
        if action in (JUMP, COPY, MOVE):
            return READ
        before, depth = depth, depth + growth
        takes_attribute = before == 1 and action == ATTRIBUTE
        if takes_attribute and name in ("append", "extend"):
            return f"{use}.append"
        if takes_attribute and name == "update":
            return f"{use}[]="
        if takes_attribute and name == "setdefault" and not use:
            calls = True
        elif takes_attribute or depth < 1 and action != STORE_ITEM:
            return READ
        elif depth < 1:
            return f"{use}[]=" if before == 2 else READ
        elif depth == 1 and calls and action == CALL:
            use, calls = f"{use}[]", False
        elif depth == 1 and before == 2 and action == ITEM:
            use += "[]"
        elif depth == 1 and action != POP and not action.startswith("store"):
            return READ
    return READ
