"""Steps: how a function's bytecode uses names, alike on Python 3.10 to 3.14.

    kept = self.seen; out.append(kept)

    3.11     LOAD_FAST self, LOAD_ATTR seen, STORE_FAST kept, LOAD_FAST out, LOAD_METHOD append, ...
    3.13     LOAD_FAST self, LOAD_ATTR seen, STORE_FAST_LOAD_FAST (kept, out), LOAD_ATTR append, ...
    steps    local self, attribute seen, store local kept, local out, attribute append, ...

Nothing else in the package reads instructions. The tests have those of each Python, recorded.
"""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

GLOBAL, ATTRIBUTE, LOCAL, CELL, IMPORT = "global", "attribute", "local", "cell", "import"
STORE_GLOBAL, STORE_ATTRIBUTE, STORE_CELL = "store global", "store attribute", "store cell"
STORE_LOCAL, STORE_ITEM, POP = "store local", "store item", "pop"
ITEM, CALL, COPY, MOVE, JUMP, OTHER = "item", "call", "copy", "move", "jump", "other"

# Each instruction that has a name, except those for several local variables.
ACTIONS = {
    "LOAD_GLOBAL": GLOBAL,
    "LOAD_NAME": GLOBAL,  # in a class's body
    "LOAD_FROM_DICT_OR_GLOBALS": GLOBAL,
    "LOAD_ATTR": ATTRIBUTE,
    "LOAD_METHOD": ATTRIBUTE,
    "LOAD_SUPER_ATTR": ATTRIBUTE,
    "LOAD_DEREF": CELL,
    "LOAD_CLASSDEREF": CELL,
    "LOAD_FROM_DICT_OR_DEREF": CELL,
    "STORE_GLOBAL": STORE_GLOBAL,
    "STORE_ATTR": STORE_ATTRIBUTE,
    "STORE_DEREF": STORE_CELL,
    "IMPORT_NAME": IMPORT,
    "BINARY_SUBSCR": ITEM,
    "STORE_SUBSCR": STORE_ITEM,
    "POP_TOP": POP,
    "COPY": COPY,
    "DUP_TOP": COPY,
}
# Families with members in several releases, such as LOAD_FAST_CHECK and LOAD_FAST_BORROW.
_FAMILIES = {
    "LOAD_FAST": LOCAL,
    "STORE_FAST": STORE_LOCAL,
    "CALL": CALL,
    "DUP": MOVE,
    "SWAP": MOVE,
    "ROT": MOVE,
    "RETURN": MOVE,
    "YIELD": MOVE,
}
_NOTHING = {"EXTENDED_ARG", "NOP", "CACHE", "NOT_TAKEN"}  # leave the stack as it is
_LOCALS = re.compile("LOAD_FAST|STORE_FAST")


class Step(NamedTuple):
    """A part of an instruction. growth: by how many values the stack grows."""

    action: str
    name: str = ""
    growth: int = 0


class Body(NamedTuple):
    """The steps of a function, of a comprehension in it, or of a function in it.

    first: the first argument's name, in the outermost function too.
    """

    steps: tuple[Step, ...]
    first: frozenset[str]
    names: tuple[str, ...]
    strings: tuple[str, ...]


class Instruction(NamedTuple):
    """The parts of a `dis.Instruction` that steps depend on."""

    opname: str
    argval: object
    argrepr: str
    growth: int
    is_jump: bool


@functools.lru_cache(maxsize=4096)
def bodies(code: CodeType) -> tuple[Body, ...]:
    """Return the code's steps, and those of comprehensions and functions in it."""
    return tuple(
        Body(
            tuple(steps(instructions(nested))),
            frozenset((*code.co_varnames[:1], *nested.co_varnames[:1])),
            nested.co_names,
            tuple(x for x in nested.co_consts if isinstance(x, str)),
        )
        for nested in nested_code(code)
    )


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code, and the code for comprehensions and functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def instructions(code: CodeType) -> Iterator[Instruction]:
    jumps = {*dis.hasjrel, *dis.hasjabs}
    for i in dis.get_instructions(code):
        growth = dis.stack_effect(i.opcode, i.arg)
        yield Instruction(i.opname, i.argval, i.argrepr, growth, i.opcode in jumps)


def steps(instructions: Iterable[Instruction]) -> Iterator[Step]:
    """Yield the steps of any Python's instructions."""
    for i in instructions:
        parts = _LOCALS.findall(i.opname)
        if i.opname in _NOTHING:
            continue
        if len(parts) > 1 and isinstance(i.argval, (tuple, list)):
            for part, name in zip(parts, i.argval):
                yield Step(_FAMILIES[part], name, 1 if part == "LOAD_FAST" else -1)
        elif i.opname in ("BINARY_SLICE", "STORE_SLICE"):
            # Before 3.12 the slice was an object of its own.
            yield Step(OTHER, "", -1)
            yield Step(ITEM if i.opname == "BINARY_SLICE" else STORE_ITEM, "", i.growth + 1)
        else:
            families = (action for name, action in _FAMILIES.items() if i.opname.startswith(name))
            action = ACTIONS.get(i.opname) or next(families, OTHER)
            if i.is_jump:
                action = JUMP
            elif i.opname == "LOAD_NAME" and str(i.argval).startswith("__"):
                action = OTHER  # each class's body reads __name__
            elif i.opname == "BINARY_OP" and i.argrepr == "[]":
                action = ITEM
            yield Step(action, i.argval if isinstance(i.argval, str) else "", i.growth)


_BY_STRING = {"getattr", "__getattribute__", "__dict__", "vars", "attrgetter"}
READ = "read"


# A list that a program only appends to decides nothing, whatever its length. A value that is read
# has a guard.
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
