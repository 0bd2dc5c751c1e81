"""Guards: attributes and variables that a traced program has read (recorder.py).

    def forward(self, x):       # reads act, temperature, scale, OFFSET
        return self.act(self.head(x)) / self.temperature * self.config.scale + OFFSET

What was read is part of the program. A program whose guards fail (`model.temperature = 1.0`,
`model.act = F.gelu`) is traced again. Plain values are compared by value, also inside of tuples,
lists, tables, sets and NumPy arrays. Tensors, functions and objects are compared by identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...compat.private_apis import _pytree as pytree
from .number_guards import Conditions
from .places import COUNTED, DEEP, LISTS, LONG, is_table
from .symbolic_numbers import SymbolicNumber
from .variable_tables import Variables

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
)
_CONTAINERS = (tuple, dict, *LISTS)
_VERY_LONG = 100 * LONG  # limit of plain values that are compared in one list
# hooks, tables and `training`, which other guards cover
KEPT_BY_TORCH = frozenset(nn.Module().__dict__)


class _Marker:
    """A marker in the place of a value."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return self.why


ABSENT, ANY = _Marker("absent"), _Marker("anything")
A_TABLE = "a table"  # name of a table in a closure, or of an argument of a partial


@dataclass(frozen=True)
class Kind:
    """The guard on a tensor that the program takes from its place in every run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: Any  # those of a DTensor, else None

    @staticmethod
    def of(tensor: Tensor) -> Kind:
        return Kind(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            getattr(tensor, "placements", None),
        )


@dataclass(frozen=True)
class Contents:
    """A snapshot of a list, tuple or table.

    Items are plain values, tensors, further Contents, or Kind or ANY in place of tensors.
    """

    cls: type
    keys: tuple
    items: tuple

    def leaves(self) -> Iterator[Any]:
        """Yield the items, and those of nested Contents."""
        for item in self.items:
            yield from item.leaves() if isinstance(item, Contents) else (item,)


@dataclass(frozen=True, eq=False)
class Copied:
    """A copy of a set, a NumPy array or a long list of plain values."""

    value: Any

    def hold(self, now: Any) -> bool:
        """Return whether the value equals the copy."""
        if type(now) is not type(self.value):
            return False
        if isinstance(now, np.ndarray):
            return (
                now.shape == self.value.shape
                and now.dtype == self.value.dtype
                and now.tobytes() == self.value.tobytes()
            )
        return now == self.value


class Guards:
    """Guards on entries of tables; ABSENT where the instance had no entry."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []
        self.names: list[str] = []
        # plain values, tensors and objects first, then Kind, Contents, Conditions and Copied
        self.values: list[Any] = []
        self.simple = 0  # how many of the values come first
        # (table, name, value) of tables that are no dicts
        self.others: list[tuple[Any, str, Any]] = []

    def add(self, table: Any, name: str, value: Any) -> None:
        """Add a guard. table: a dict, Variables, or another object with `get`."""
        if not isinstance(table, dict):
            self.others.append((table, name, value))
            return
        is_simple = not isinstance(value, (Kind, Contents, Conditions, Copied))
        place = self.simple if is_simple else len(self.values)
        for column, entry in ((self.tables, table), (self.names, name), (self.values, value)):
            column.insert(place, entry)
        self.simple += is_simple

    def now(self) -> list[Any]:
        """Return the current entries of the dicts."""
        return [*map(dict.get, self.tables, self.names, repeat(ABSENT))]

    def changed(self) -> Iterator[tuple[Any, tuple, Any]]:
        """Yield (root, path, value) of numbers and tensors that differ from their guards.

        This includes those in lists and tables that attributes and variables hold.
        """
        others = (
            (table, name, table.get(name, ABSENT), value)
            for table, name, value in self.others
            if isinstance(table, Variables)
        )
        for table, name, now, value in (
            *zip(self.tables, self.names, self.now(), self.values),
            *others,
        ):
            root, path = (now, ()) if name == A_TABLE else (table, (name,))
            yield from ((root, *leaf) for leaf in _changed_leaves(now, value, path))

    def differing(self) -> list[str]:
        """Return the names of the entries whose guards fail."""
        return [
            *(
                name
                for name, now, value in zip(self.names, self.now(), self.values)
                if not matches(now, value)
            ),
            *(
                name
                for table, name, value in self.others
                if not matches(table.get(name, ABSENT), value)
            ),
        ]

    def described(self, owners: Mapping[int, str]) -> list[tuple[str, str]]:
        """Return names and descriptions of the current entries, the same text in every process.

        owners: the prefix of the names of a module, by the id of its table.
        """
        now = [
            *zip(self._qualified_names(owners), self.now()),
            *((name, table.get(name, ABSENT)) for table, name, _ in self.others),
        ]
        return [(f"'{name}'", _describe(value)) for name, value in now]

    def tensors(self, owners: Mapping[int, str]) -> dict[int, str]:
        """Return the names of the tensors in the guards, by their ids."""
        entries = [
            *zip(self._qualified_names(owners), self.values),
            *((name, value) for _, name, value in self.others),
        ]
        return {
            id(leaf): name
            for name, value in entries
            for leaf in (value.leaves() if isinstance(value, Contents) else (value,))
            if isinstance(leaf, Tensor)
        }

    def _qualified_names(self, owners: Mapping[int, str]) -> list[str]:
        return [owners.get(id(table), "") + name for table, name in zip(self.tables, self.names)]

    def hold(self) -> bool:
        """Return whether all guards hold."""
        now = self.now()
        if not all(map(is_, now[: self.simple], self.values)) and not all(
            map(matches, now[: self.simple], self.values)
        ):
            return False
        return all(map(matches, now[self.simple :], self.values[self.simple :])) and all(
            matches(table.get(name, ABSENT), value) for table, name, value in self.others
        )


def is_plain(value: Any) -> bool:
    """Return whether the value is plain, or a short container of plain values."""
    if isinstance(value, _CONTAINERS):
        return len(value) <= LONG and all(
            isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value)
        )
    return isinstance(value, _PLAIN)


def is_watched(value: Any) -> bool:
    """Return whether the value is a tensor or plain, or a short container of these."""
    if isinstance(value, _CONTAINERS):
        return len(value) <= LONG and all(
            isinstance(leaf, (Tensor, *_PLAIN)) for leaf in pytree.tree_leaves(value)
        )
    return isinstance(value, (Tensor, *_PLAIN))


def snapshot(value: Any, depth: int = 0) -> Any:
    """Return a snapshot of the value that `matches` compares with.

    Objects, deeply nested tables and very long values are compared by identity.
    """
    if (copied := _copy_values(value)) is not None:
        return copied
    if (
        not (isinstance(value, tuple) or is_table(value))
        or len(value) > LONG
        or depth > DEEP
        or _is_constant(value)
    ):
        return value
    keys, items = (tuple(value), value.values()) if isinstance(value, dict) else ((), value)
    return Contents(type(value), keys, tuple(snapshot(item, depth + 1) for item in items))


def _copy_values(value: Any) -> Copied | None:
    """Return a copy of a set, an array or a long list of plain values, else None."""
    if isinstance(value, np.ndarray):
        return Copied(value.copy()) if value.size <= LONG and not value.dtype.hasobject else None
    is_long = type(value) is list and len(value) > LONG
    if is_long or isinstance(value, (set, bytearray)):
        return (
            Copied(value.copy())
            if len(value) <= _VERY_LONG and all(type(item) in _PLAIN for item in value)
            else None
        )
    return None


def _is_constant(value: Any) -> bool:
    """Return whether the value is a tuple of plain values, which is immutable."""
    return type(value) is tuple and all(
        type(item) is not SymbolicNumber and isinstance(item, _PLAIN) for item in value
    )


def _changed_leaves(now: Any, value: Any, path: tuple) -> Iterator[tuple[tuple, Any]]:
    """Yield path and value of the numbers and tensors that differ from the guard."""
    if type(value) is tuple:
        value = Contents(tuple, (), value)
    if isinstance(value, Contents) and type(now) is value.cls and len(now) == len(value.items):
        keys, items = (
            (tuple(now), now.values()) if isinstance(now, dict) else (tuple(range(len(now))), now)
        )
        if keys == (value.keys or keys):
            for key, one, other in zip(keys, items, value.items):
                yield from _changed_leaves(one, other, (*path, key))
    elif (
        type(now) is type(value)
        and type(now) in COUNTED
        and now != value
        or isinstance(value, Tensor)
        and isinstance(now, Tensor)
    ):
        if now is not value:
            yield path, now


def matches(now: Any, value: Any) -> bool:
    """Return whether the current value satisfies the guard."""
    if now is value or value is ANY:
        return True
    if isinstance(value, Kind):
        return isinstance(now, Tensor) and Kind.of(now) == value
    if isinstance(value, (Conditions, Copied)):
        return value.hold(now)
    if isinstance(value, Contents):
        return (
            type(now) is value.cls
            and len(now) == len(value.items)
            and (not isinstance(now, dict) or tuple(now) == value.keys)
            and all(map(matches, now.values() if isinstance(now, dict) else now, value.items))
        )
    return (
        type(now) is type(value)
        and type(now) is not SymbolicNumber
        and (isinstance(now, _PLAIN) or _is_constant(now))
        and now == value
    )


def _describe(value: Any) -> str:
    """Describe a value, the same in all processes that have it.

    The order of strings in a set differs between processes, so they are sorted.
    """
    value = snapshot(value)
    if isinstance(value, (Tensor, Kind)):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, Conditions):
        return f"{value.cls.__name__} {value.results}"
    if isinstance(value, Copied):
        return str(
            sorted(map(repr, value.value))
            if isinstance(value.value, set)
            else np.asarray(value.value).tolist()
        )
    if not isinstance(value, Contents):
        return (
            repr(value)
            if isinstance(value, (tuple, *_PLAIN))
            else getattr(value, "__qualname__", type(value).__name__)
        )
    items = [_describe(item) for item in value.items]
    if not value.keys:
        is_unordered = all(isinstance(item, str) for item in value.items)
        return f"{value.cls.__name__}[{', '.join(sorted(items) if is_unordered else items)}]"
    if all(isinstance(key, str) for key in value.keys):
        entries = sorted(f"{key}={item}" for key, item in zip(value.keys, items))
    else:
        entries = [f"{type(key).__name__}: {item}" for key, item in zip(value.keys, items)]
    return f"{value.cls.__name__}({', '.join(entries)})"
