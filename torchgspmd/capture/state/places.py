"""State that is neither parameter nor buffer: tensors that a program finds in attributes and tables
and leaves there for the next call.

    def forward(self, x):
        self.hidden = self.cell(x, self.hidden)             # a place: attribute `hidden` of this module
        return self.head(self.hidden)

They are arguments of the program, behind those that it is called with. Every run takes them from
their places; what it leaves there is written by its effects (rebinding.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import Tensor

from .variable_tables import Table

LISTS = (list, deque)
COUNTED = (int, float)  # what may be a Count (counts.py)
LARGE = 2**62  # integers from here on are no inputs
LONG = 1000  # entries of a table that is not looked into
DEEP = 8  # tables in tables; one may be in itself


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor is: below a table of attributes, or a table or list that a function names."""

    root: Table
    path: tuple  # keys and positions from there
    kind: ClassVar[str] = "tensor"

    @property
    def name(self) -> str:
        """The same on all ranks: a key may be the id of an object."""
        return ".".join(
            str(key)
            if isinstance(key, str) or type(key) is int and key < LONG
            else type(key).__name__
            for key in self.path
        )

    def is_there(self) -> bool:
        try:
            self.value()
        except (KeyError, IndexError, TypeError):
            return False
        return True

    def holds(self) -> bool:
        """Whether there is one of its kind."""
        return self.is_there() and isinstance(self.value(), Tensor)

    def value(self) -> Any:
        return reduce(getitem, self.path, self.root)

    def tensor(self) -> Tensor:
        """What a program takes from there."""
        return self.value()

    def put(self, value: Any) -> None:
        """Puts another one there; tuples on the way are made anew."""
        _put(self.root, self.path, value)


class NumberPlace(Place):
    """Where a number is that a program takes as a tensor."""

    kind = "number"

    def holds(self) -> bool:
        return (
            self.is_there()
            and type(value := self.value()) in COUNTED
            and (type(value) is float or abs(value) < LARGE)
        )

    def tensor(self) -> Tensor:
        value = self.value()
        return torch.tensor(value, dtype=torch.float64 if type(value) is float else torch.int64)


class Varying:
    """The floats among the arguments of calls that are alike but for these."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}  # by place among the leaves
        self.now: dict[str, float] = {}  # of those that have been another one

    def take(self, leaves: Sequence[Any]) -> list[int]:
        """What are given now; says which of these vary."""
        positions = []
        for i, leaf in enumerate(leaves):
            if type(leaf) is float and (
                leaf != self.first.setdefault(i, leaf) or self.named(i) in self.now
            ):
                self.now[self.named(i)] = leaf
                positions.append(i)
        return positions

    @staticmethod
    def named(i: int) -> str:
        return f"argument {i}"


class State:
    """The entries that programs of a module write, or whose tensors they change in place; each with
    all tensors that are below it.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[int, Any], Table] = {}
        self.counted: dict[
            tuple[int, tuple], Place
        ] = {}  # numbers that a program writes, or that have changed
        self.varying: dict[Any, Varying] = {}  # by what else calls are alike in
        self.is_looking = False  # whether traces look at the values of buffers (known.py)
        self.shapes: set[Any] = set()  # values of buffers that decided on a shape
        self.is_counting = True  # whether numbers may be Counts (counts.py) in a trace

    def __contains__(self, entry: tuple[Table, tuple]) -> bool:
        return (id(entry[0]), entry[1][0]) in self.entries

    def add(self, root: Table, path: tuple, value: Any = None) -> None:
        """value: what is written there."""
        self.entries[id(root), path[0]] = root
        if isinstance(value, COUNTED) and not isinstance(value, bool):  # a Count is one
            self.count(root, path)

    def vary(self, root: Table, path: tuple, value: Any) -> None:
        """A number or tensor there, this one now, is another than before."""
        if isinstance(value, Tensor):
            self.add(root, path)
        else:
            self.count(root, path)

    def count(self, root: Table, path: tuple) -> None:
        """A number there changes from call to call."""
        self.counted[id(root), path] = NumberPlace(root, path)

    def places(self, besides: frozenset[int]) -> list[Place]:
        """Those where tensors are now, other than these (ids of parameters and buffers)."""
        entries = [Place(root, (name,)) for (_, name), root in self.entries.items()]
        return [
            Place(entry.root, path)
            for entry in entries
            if entry.is_there()
            for path, leaf in _leaves(entry.value(), entry.path, 0)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and id(leaf) not in besides
        ]

    def numbers(self, varying: dict[str, float]) -> list[Place]:
        """Those where numbers are that change from call to call; varying: those among the
        arguments.
        """
        places = [*self.counted.values(), *(NumberPlace(varying, (name,)) for name in varying)]
        return [place for place in places if self.is_counting and place.holds()]


def is_table(value: Any) -> bool:
    """Whether it is a dict or list that gives what is in it: no dict that makes its values when it
    is asked for them.
    """
    return (
        isinstance(value, LISTS)
        or isinstance(value, dict)
        and type(value).__getitem__ is dict.__getitem__
    )


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
    if not (isinstance(value, tuple) or is_table(value)):
        yield path, value
    elif len(value) <= LONG and depth < DEEP:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key), depth + 1)
