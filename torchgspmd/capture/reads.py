"""The attributes of modules that a traced program has read: numbers, strings and the like, which became part of it.

    def forward(self, x):
        return self.head(x) / self.temperature      # read: temperature = 0.7

A program whose reads do not hold any more (`model.temperature = 1.0`, `model.dropout.p = 0`) is made anew; of a tensor, if it is
not the same one.
"""
from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
_CONTAINERS = (list, tuple, dict)
LONG = 1000                     # entries of a list that is not looked at in every step
KEPT_BY_TORCH = frozenset(nn.Module().__dict__)    # hooks, tables, `training`: others look after them


class _Nothing:
    """In the place of a value."""

    def __init__(self, why: str):
        self.why = why

    def __repr__(self) -> str:
        return self.why


ABSENT, GROWS = _Nothing("absent"), _Nothing("a list that runs append to")
overwritten: WeakKeyDictionary[nn.Module, dict[tuple, Any]] = WeakKeyDictionary()   # what runs write: path in attributes -> value before


class Reads:
    """What tables of attributes held under names; `absent`: nothing, a class did."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.values: list[Any] = []

    def add(self, table: dict[str, Any], name: str, value: Any) -> None:
        self.tables.append(table)
        self.names.append(name)
        self.values.append(value)

    def now(self) -> list[Any]:
        """What they hold at present."""
        return [*map(dict.get, self.tables, self.names, repeat(ABSENT))]

    def differing(self) -> list[str]:
        """Names of those that are not as they were."""
        return [name for name, now, value in zip(self.names, self.now(), self.values) if not _same(now, value)]

    def described(self, now: bool = False) -> list[Any]:
        """What they held, or hold now, as every process writes it."""
        return [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in (self.now() if now else self.values)]

    def hold(self) -> bool:
        """Whether all is as it was."""
        now = self.now()
        return all(map(is_, now, self.values)) or all(map(_same, now, self.values))


@contextmanager
def recorded_reads(module: nn.Module) -> Iterator[Reads]:
    """Of the module and those inside of it, there at the end; none of what is assigned meanwhile: a counter that forward
    increments would need a program for each number."""
    reads = Reads()
    seen: dict[tuple[int, str], tuple[nn.Module, dict, Any]] = {}
    own = {id(m) for m in module.modules()}

    def record(self: nn.Module, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in KEPT_BY_TORCH and id(self) in own and (id(self), name) not in seen:
            table = object.__getattribute__(self, "__dict__")
            if name == "forward" or _is_plain(value) or isinstance(value, Tensor) and name in table:
                seen[id(self), name] = self, table, _frozen(table.get(name, ABSENT))
        return value

    before = nn.Module.__getattribute__
    nn.Module.__getattribute__ = record                 # type: ignore[method-assign]
    try:
        yield reads
    finally:
        nn.Module.__getattribute__ = before             # type: ignore[method-assign]
        if before is object.__getattribute__:
            del nn.Module.__getattribute__              # found without a look at nn.Module again
    for (_, name), (owner, table, value) in seen.items():
        if not any(path[0] == name for path in overwritten.get(owner, ())) and _same(table.get(name, ABSENT), value):
            reads.add(table, name, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return len(value) <= LONG and all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))
    return isinstance(value, _PLAIN)


def _frozen(value: Any) -> Any:
    """The value as it is now."""
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value


def _same(now: Any, value: Any) -> bool:
    return now is value or type(now) is type(value) and not isinstance(now, Tensor) and now == value
