"""How functions' bytecode uses lists and tables: whether it reads or only adds to them.

A list that a program only appends to decides nothing, whatever its length. A value that is read
has a guard.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable
from types import CodeType, FunctionType

from .bytecode_names import nested_code

_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_BY_STRING = {"getattr", "__getattribute__", "__dict__", "vars", "attrgetter"}
_NOTHING = ("EXTENDED_ARG", "NOP", "CACHE")  # opcodes that leave the stack as it is
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
    """Return the code's (name, use) pairs, each once."""
    found: dict[tuple[str, str], None] = {}
    for nested in nested_code(code):
        instructions = [i for i in dis.get_instructions(nested) if i.opname not in _NOTHING]
        for at, i in enumerate(instructions):
            if i.opname.startswith(_LOADS):
                found[i.argval, _use(instructions[at + 1 :])] = None
        if not _BY_STRING.isdisjoint(nested.co_names):
            strings = (x for x in nested.co_consts if isinstance(x, str))
            found |= dict.fromkeys((name, READ) for name in strings)
    return tuple(found)


def _use(instructions: list[dis.Instruction]) -> str:
    """Return the use of the value on top of the stack, by the instructions that take it."""
    depth, use, calls = 1, "", False  # depth: the stack's, from the value on
    for i in instructions:
        # Behind a jump, or with copies, the stack's depth no longer tells where the value is.
        is_jump = i.opcode in dis.hasjrel or i.opcode in dis.hasjabs
        if is_jump or i.opname.startswith(("COPY", "DUP", "SWAP", "ROT", "RETURN", "YIELD")):
            return READ
        before, depth = depth, depth + dis.stack_effect(i.opcode, i.arg)
        takes_attribute = before == 1 and i.opname in ("LOAD_METHOD", "LOAD_ATTR")
        if takes_attribute and i.argval in ("append", "extend"):
            return f"{use}.append"
        if takes_attribute and i.argval == "update":
            return f"{use}[]="
        if takes_attribute and i.argval == "setdefault" and not use:
            calls = True
        elif takes_attribute or depth < 1 and i.opname != "STORE_SUBSCR":
            return READ
        elif depth < 1:
            return f"{use}[]=" if before == 2 else READ
        elif depth == 1 and calls and i.opname.startswith("CALL"):
            use, calls = f"{use}[]", False
        elif depth == 1 and before == 2 and (i.opname == "BINARY_SUBSCR" or i.argrepr == "[]"):
            use += "[]"
        elif depth == 1 and not i.opname.startswith(("STORE", "POP_TOP")):
            return READ
    return READ
