"""State that is neither parameter nor buffer: tensors that a program finds in attributes and tables and leaves there for the next call.

    def forward(self, x):
        self.hidden = self.cell(x, self.hidden)             # a place: attribute `hidden` of this module
        return self.head(self.hidden)

They are arguments of the program, behind those that it is called with. Every run takes them from their places; what it leaves there
is written by its effects (rebinding.py).
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import Tensor

LISTS = (list, deque)
COUNTED = (int, float)          # what may be a Count (counts.py)
LONG = 1000                     # entries of a table that is not looked into
DEEP = 8                        # tables in tables; one may be in itself


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor is: below a table of attributes, or a table or list that a function names."""
    root: dict | list
    path: tuple                             # keys and positions from there

    @property
    def name(self) -> str:
        """The same on all ranks: a key may be the id of an object."""
        return ".".join(str(key) if isinstance(key, str) or type(key) is int and key < LONG else type(key).__name__ for key in self.path)

    def is_there(self) -> bool:
        try:
            self.value()
        except (KeyError, IndexError, TypeError):
            return False
        return True

    def value(self) -> Any:
        return reduce(getitem, self.path, self.root)

    def put(self, value: Any) -> None:
        """Puts another one there; tuples on the way are made anew."""
        _put(self.root, self.path, value)


class State:
    """The entries that programs of a module write, or whose tensors they change in place; each with all tensors that are below it."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, Any], dict | list] = {}
        self.counters: dict[tuple[int, tuple], Place] = {}
        self.is_counting = True                                             # whether they may be Counts (counts.py) in a trace

    def __contains__(self, entry: tuple[dict | list, tuple]) -> bool:
        return (id(entry[0]), entry[1][0]) in self.entries

    def add(self, root: dict | list, path: tuple, value: Any = None) -> None:
        """value: what is written there."""
        self.entries[id(root), path[0]] = root
        if type(value) in COUNTED:
            self.counters[id(root), path] = Place(root, path)

    def places(self, besides: frozenset[int]) -> list[Place]:
        """Those where tensors are now, other than these (ids of parameters and buffers)."""
        entries = [Place(root, (name,)) for (_, name), root in self.entries.items()]
        return [Place(entry.root, path) for entry in entries if entry.is_there() for path, leaf in _leaves(entry.value(), entry.path, 0)
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided and id(leaf) not in besides]

    def numbers(self) -> list[Place]:
        """Those where programs write numbers, and where such are now."""
        return [place for place in self.counters.values() if self.is_counting and place.is_there() and type(place.value()) in COUNTED]


def _put(container: Any, path: tuple, value: Any) -> Any:
    if not path:
        return value
    value = _put(container[path[0]], path[1:], value)
    if not isinstance(container, tuple):
        container[path[0]] = value
        return container
    items = [value if i == path[0] else item for i, item in enumerate(container)]
    return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)


def _leaves(value: Any, path: tuple, depth: int) -> Iterator[tuple[tuple, Any]]:
    if not isinstance(value, (dict, tuple, *LISTS)):
        yield path, value
    elif len(value) <= LONG and depth < DEEP:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key), depth + 1)
