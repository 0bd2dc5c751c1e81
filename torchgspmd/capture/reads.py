"""The attributes of modules that a traced program has read: numbers, strings and the like, which became part of it.

    def forward(self, x):
        return self.head(x) / self.temperature      # read: temperature = 0.7

A program whose reads do not hold any more (`model.temperature = 1.0`, `model.dropout.p = 0`) is made anew.
"""
from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
_CONTAINERS = (list, tuple, dict)
_KEPT_BY_TORCH = frozenset(nn.Module().__dict__)    # hooks, tables, `training`: others look after them


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


@dataclass(frozen=True)
class Read:
    """What a table of attributes held under a name; _ABSENT: nothing, the class did."""
    table: dict[str, Any]
    name: str
    value: Any

    def now(self) -> Any:
        """What it holds at present."""
        return self.table.get(self.name, _ABSENT)

    def holds(self) -> bool:
        """Whether it still does."""
        now = self.now()
        return now is self.value or type(now) is type(self.value) and now == self.value


@contextmanager
def recorded_reads(module: nn.Module) -> Iterator[list[Read]]:
    """Of the module and those inside of it, in the list at the end; none of what is assigned meanwhile: a counter that forward
    increments would need a program for each number."""
    reads: list[Read] = []
    seen: dict[tuple[int, str], Read] = {}
    own = {id(m) for m in module.modules()}

    def record(self: nn.Module, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in _KEPT_BY_TORCH and id(self) in own and (id(self), name) not in seen and _is_plain(value):
            table = object.__getattribute__(self, "__dict__")
            seen[id(self), name] = Read(table, name, copy.deepcopy(value) if name in table else _ABSENT)
        return value

    nn.Module.__getattribute__ = record                 # type: ignore[method-assign]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__
    reads += [read for read in seen.values() if read.holds()]


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))
    return isinstance(value, _PLAIN)
