"""The one rewrite table.

    level       target                      apply(the arguments of a call) -> its results
    product     a function of torch         computes it by operations that keep all dimensions
    value       a function of torch         computes it without reading values
    vmap        a function of torch         the same as that, which torch.vmap takes too
    body        a function of torch         computes it by calls that the trace sees
    sparse      a function, or its name     the same for sparse operands
    contract    the operator einsum         computes a product of two operands during a trace
    decompose   an operator                 computes it by others; applied to all calls
    split       an operator with a rule     the same, where shards of a replicated factor, or of one
                                            with a halo, are asked for; `shards` is their number,
                                            `cuts` the SplitRequest
    xla         an operator                 the same for XLA's partitioner, before the two above
    wide        an operator                 the same in 64 bits, where it takes none itself
    simplify    an operator                 node -> another node with the same value
    keep        an operator                 a FlatCall and the arguments -> those of a call that
                                            takes the parts of flattened dimensions as dimensions

A function that does not apply to a call returns DECLINED. Then the next one at its level is asked,
and in the end the call stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from ..compat.operators import AbsentOperator
from ..compat.private_apis import OpOverload, OpOverloadPacket
from ..errors import ShardingError

LEVELS = (
    *("product", "value", "vmap", "body", "sparse", "contract"),
    *("decompose", "split", "xla", "wide", "simplify", "keep"),
)


class Declined(Enum):
    DECLINED = 0


DECLINED = Declined.DECLINED


class SplitRequest(NamedTuple):
    """How an operation is sharded that has to be split.

    shards: the number of shards along a dimension that it needs whole; 1: unknown. operands,
    results: the number of shards along each dimension; None: a result that nobody uses.
    """

    shards: int = 1
    operands: tuple[tuple[int, ...], ...] = ()
    results: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True)
class Rewrite:
    """A function that replaces a target, at one level."""

    level: str
    target: Any
    apply: Callable


REWRITES: dict[tuple[str, Any], list[Rewrite]] = {}  # filled at import, and only read afterwards
_ENDED: list[str] = []  # the module that has added the last rows
SKIPPED: list[str] = []  # names of registered operators that this torch lacks


def end_tables(module: str) -> None:
    """Declare that REWRITES and RULES have all rows, those of features too.

    Functions for one target are asked in the order of their modules' names, then of their files:
    which module was imported first does not count.
    """
    for entries in REWRITES.values():
        entries.sort(key=lambda row: getattr(row.apply, "__module__", ""))
    _ENDED.append(module)


def check_ended() -> None:
    """Raise if a table is read before features have added their rows."""
    if not _ENDED:
        raise ShardingError(
            "the tables of rules and rewrites lack the rows of features",
            why="a file below the features was imported alone, and the features never",
            fix="import torchgspmd.compiler.api, whose `plan` captures a program",
        )


def feature_of(function: Callable) -> str:
    """Return the folder in features/ that defines a row's function; "core" for others."""
    _, _, path = getattr(function, "__module__", "").partition(".features.")
    return path.partition(".")[0] or "core"


@contextmanager
def without_rewrites(feature: str) -> Generator[None, None, None]:
    """Take a feature's rows out of the table while in this context."""
    with restored(REWRITES) as before:
        for key, entries in before.items():
            others = [entry for entry in entries if feature_of(entry.apply) != feature]
            REWRITES[key] = others
            if not others:
                del REWRITES[key]
        yield


@contextmanager
def restored(table: dict[Any, Any]) -> Generator[dict[Any, Any], None, None]:
    """Restore a table behind a context, in place: other modules have imported it."""
    before = dict(table)
    try:
        yield before
    finally:
        table.clear()
        table.update(before)


def rewrite(levels: str, *targets: object) -> Callable:
    """Register a function at a level, or at several, for operators that this torch has."""
    assert {*levels.split()} <= {*LEVELS}

    def register(function: Callable) -> Callable:
        for target in filter(is_present, targets):
            for level in levels.split():
                REWRITES.setdefault((level, target), []).append(Rewrite(level, target, function))
        return function

    return register


def rewrite_of(level: str, target: object) -> Callable | None:
    """Return a level's first function, or None. A target may be registered by its name."""
    check_ended()
    entries = REWRITES.get((level, target))
    if entries is None and isinstance(target, OpOverload):
        # A name stands for an operator whose library may be loaded later.
        entries = REWRITES.get((level, target.name()))
    return entries[0].apply if entries else None


def rewrites_of(level: str, target: object) -> list[Callable]:
    """Return a level's functions, in the order in which they are asked."""
    check_ended()
    if isinstance(target, OpOverloadPacket):
        target = str(target).replace(".", "::")  # its library may be loaded later
    return [entry.apply for entry in REWRITES.get((level, target), ())]


def apply_first(level: str, target: object, *args: object, **kwargs: object) -> Any:
    """Apply a level's first function that does not decline the call; else return DECLINED."""
    for apply in rewrites_of(level, target):
        if (result := apply(*args, **kwargs)) is not DECLINED:
            return result
    return DECLINED


def is_present(op: object) -> bool:
    """Return whether this torch has an operator, or may load it later; else note it in SKIPPED."""
    if isinstance(op, AbsentOperator):
        SKIPPED.append(op.name())
        return False
    return True
