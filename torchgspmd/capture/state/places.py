"""State that is neither parameter nor buffer: tensors in attributes and tables.

    def forward(self, x):
        self.hidden = self.cell(x, self.hidden)       # a place: attribute `hidden` of this module
        return self.head(self.hidden)

Such tensors are arguments of the program, behind those of the call. Every run takes them from their
places, and writes what it computes for them (mutations.py).
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
COUNTED = (int, float)  # types that a SymbolicNumber may stand for (symbolic_numbers.py)
LARGE = 2**62  # integers of this size and more are no inputs
LONG = 1000  # tables with more entries are not searched
DEEP = 8  # limit of nesting; a table may contain itself


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a tensor: a root table and a path of keys."""

    root: Table
    path: tuple  # keys and positions from there
    kind: ClassVar[str] = "tensor"

    @property
    def name(self) -> str:
        """Return a name that is the same on all ranks; a key may be the id of an object."""
        return ".".join(
            str(key)
            if isinstance(key, str) or type(key) is int and key < LONG
            else type(key).__name__
            for key in self.path
        )

    def is_there(self) -> bool:
        """Return whether the path exists."""
        try:
            self.value()
        except (KeyError, IndexError, TypeError):
            return False
        return True

    def holds(self) -> bool:
        """Return whether a tensor is in the place."""
        return self.is_there() and isinstance(self.value(), Tensor)

    def value(self) -> Any:
        """Return what is in the place."""
        return reduce(getitem, self.path, self.root)

    def tensor(self) -> Tensor:
        """Return the tensor that a program takes from the place."""
        return self.value()

    def put(self, value: Any) -> None:
        """Put a value into the place; tuples on the path are replaced by new ones."""
        _put(self.root, self.path, value)


class NumberPlace(Place):
    """The place of a number that a program takes as a tensor."""

    kind = "number"

    def holds(self) -> bool:
        """Return whether a number that fits into a tensor is in the place."""
        return (
            self.is_there()
            and type(value := self.value()) in COUNTED
            and (type(value) is float or abs(value) < LARGE)
        )

    def tensor(self) -> Tensor:
        """Return the number as a tensor of float64 or int64."""
        value = self.value()
        return torch.tensor(value, dtype=torch.float64 if type(value) is float else torch.int64)


class Varying:
    """The floats among the arguments that differ between otherwise equal calls."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}  # value in the first call, by leaf index
        self.now: dict[str, float] = {}  # current value of those that vary

    def take(self, leaves: Sequence[Any]) -> list[int]:
        """Record the floats of a call; return the positions of those that vary."""
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
        """Return the name of a varying argument."""
        return f"argument {i}"


class State:
    """The entries that programs of a module write, or whose tensors they mutate.

    Each entry stands for all tensors below it.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[int, Any], Table] = {}
        # numbers that a program writes, or that have changed
        self.counted: dict[tuple[int, tuple], Place] = {}
        self.varying: dict[Any, Varying] = {}  # by the key that otherwise equal calls share
        self.is_looking = False  # whether traces read values of buffers (value_guards.py)
        self.shapes: set[Any] = set()  # values of buffers that decided on a shape
        self.is_counting = True  # whether a trace may use symbolic numbers

    def __contains__(self, entry: tuple[Table, tuple]) -> bool:
        return (id(entry[0]), entry[1][0]) in self.entries

    def add(self, root: Table, path: tuple, value: Any = None) -> None:
        """Add an entry. value: what the program writes there."""
        self.entries[id(root), path[0]] = root
        if isinstance(value, COUNTED) and not isinstance(value, bool):  # or a SymbolicNumber
            self.count(root, path)

    def vary(self, root: Table, path: tuple, value: Any) -> None:
        """Record that a number or tensor differs from its guard. value: the current one."""
        if isinstance(value, Tensor):
            self.add(root, path)
        else:
            self.count(root, path)

    def count(self, root: Table, path: tuple) -> None:
        """Record that a number changes from call to call."""
        self.counted[id(root), path] = NumberPlace(root, path)

    def places(self, besides: frozenset[int]) -> list[Place]:
        """Return the places of tensors in the entries, other than parameters and buffers.

        besides: ids of parameters and buffers.
        """
        entries = [Place(root, (name,)) for (_, name), root in self.entries.items()]
        return [
            Place(entry.root, path)
            for entry in entries
            if entry.is_there()
            for path, leaf in _leaves(entry.value(), entry.path, 0)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and id(leaf) not in besides
        ]

    def numbers(self, varying: dict[str, float]) -> list[Place]:
        """Return the places of numbers that change from call to call.

        varying: those among the arguments.
        """
        places = [*self.counted.values(), *(NumberPlace(varying, (name,)) for name in varying)]
        return [place for place in places if self.is_counting and place.holds()]


def is_table(value: Any) -> bool:
    """Return whether the value is a list, or a dict that returns what it stores.

    False for a dict that computes values in __getitem__.
    """
    return (
        isinstance(value, LISTS)
        or isinstance(value, dict)
        and type(value).__getitem__ is dict.__getitem__
    )


def _put(container: Any, path: tuple, value: Any) -> Any:
    """Return the container with the value at the path."""
    if not path:
        return value
    value = _put(container[path[0]], path[1:], value)
    if not isinstance(container, tuple):
        container[path[0]] = value
        return container
    items = [value if i == path[0] else item for i, item in enumerate(container)]
    return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)


def _leaves(value: Any, path: tuple, depth: int) -> Iterator[tuple[tuple, Any]]:
    """Yield path and value of the leaves of a nested container."""
    if not (isinstance(value, tuple) or is_table(value)):
        yield path, value
    elif len(value) <= LONG and depth < DEEP:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key), depth + 1)
