"""What a traced program has read of attributes and variables, which became part of it
(recorder.py).

    def forward(self, x):
        return self.act(self.head(x)) / self.temperature * self.config.scale + OFFSET       # read: act, temperature, scale, OFFSET

A program whose reads do not hold any more (`model.temperature = 1.0`, `model.act = F.gelu`) is made
anew: plain values, and those in tuples, lists, tables, sets and arrays of NumPy, are compared by
value, a tensor, function or object, if it is the same one.
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
from .places import COUNTED, DEEP, LISTS, LONG, is_table
from .symbolic_numbers import Conditions, SymbolicNumber
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
_VERY_LONG = 100 * LONG  # plain values of a list that are compared
KEPT_BY_TORCH = frozenset(nn.Module().__dict__)  # hooks, tables, `training`: others look after them


class _Nothing:
    """In the place of a value."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return self.why


ABSENT, ANY = _Nothing("absent"), _Nothing("anything")
A_TABLE = "a table"  # in the place of a name: one that is around a function, or given to it


@dataclass(frozen=True)
class Kind:
    """What a program depends on of a tensor that it takes from its place at every run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: Any  # of a DTensor

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
    """A list, tuple or table as it was: plain values, tensors, Kind or ANY in the place of tensors,
    and more of these.
    """

    cls: type
    keys: tuple
    items: tuple

    def leaves(self) -> Iterator[Any]:
        for item in self.items:
            yield from item.leaves() if isinstance(item, Contents) else (item,)


@dataclass(frozen=True, eq=False)
class Copied:
    """A set, an array of NumPy or a long list of plain values, as it was."""

    value: Any

    def hold(self, now: Any) -> bool:
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
    """What tables of attributes held under names; `absent`: nothing, a class did."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.values: list[
            Any
        ] = []  # plain ones, tensors and objects; behind them Kind and Contents
        self.simple = 0  # how many are not such
        self.others: list[tuple[Any, str, Any]] = []  # of what is no dict: table, name and value

    def add(self, table: Any, name: str, value: Any) -> None:
        """table: a dict, Variables or whatever else has `get`."""
        if not isinstance(table, dict):
            self.others.append((table, name, value))
            return
        is_simple = not isinstance(value, (Kind, Contents, Conditions, Copied))
        place = self.simple if is_simple else len(self.values)
        for column, entry in ((self.tables, table), (self.names, name), (self.values, value)):
            column.insert(place, entry)
        self.simple += is_simple

    def now(self) -> list[Any]:
        """What they hold at present."""
        return [*map(dict.get, self.tables, self.names, repeat(ABSENT))]

    def changed(self) -> Iterator[tuple[Any, tuple, Any]]:
        """Where attributes and variables, and lists and tables in them, hold other numbers and
        tensors now, by keys from there on: and which.
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
        """Names of those that are not as they were."""
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
        """What is under the names now, as every process writes it. owners: what the names of a
        module begin with, by its table's id.
        """
        now = [
            *zip(self._qualified(owners), self.now()),
            *((name, table.get(name, ABSENT)) for table, name, _ in self.others),
        ]
        return [(f"'{name}'", _describe(value)) for name, value in now]

    def tensors(self, owners: Mapping[int, str]) -> dict[int, str]:
        """The names under which tensors were found, by the ids of these."""
        entries = [
            *zip(self._qualified(owners), self.values),
            *((name, value) for _, name, value in self.others),
        ]
        return {
            id(leaf): name
            for name, value in entries
            for leaf in (value.leaves() if isinstance(value, Contents) else (value,))
            if isinstance(leaf, Tensor)
        }

    def _qualified(self, owners: Mapping[int, str]) -> list[str]:
        return [owners.get(id(table), "") + name for table, name in zip(self.tables, self.names)]

    def hold(self) -> bool:
        """Whether all is as it was."""
        now = self.now()
        if not all(map(is_, now[: self.simple], self.values)) and not all(
            map(matches, now[: self.simple], self.values)
        ):
            return False
        return all(map(matches, now[self.simple :], self.values[self.simple :])) and all(
            matches(table.get(name, ABSENT), value) for table, name, value in self.others
        )


def is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return len(value) <= LONG and all(
            isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value)
        )
    return isinstance(value, _PLAIN)


def is_watched(value: Any) -> bool:
    """Whether it is a tensor or plain, or a table of such."""
    if isinstance(value, _CONTAINERS):
        return len(value) <= LONG and all(
            isinstance(leaf, (Tensor, *_PLAIN)) for leaf in pytree.tree_leaves(value)
        )
    return isinstance(value, (Tensor, *_PLAIN))


def snapshot(value: Any, depth: int = 0) -> Any:
    """The value as it is now; of an object, a table that is deep in others, and what is very long
    only that it is this one.
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
    """Whether it is a tuple of plain values, which stays what it is."""
    return type(value) is tuple and all(
        type(item) is not SymbolicNumber and isinstance(item, _PLAIN) for item in value
    )


def _changed_leaves(now: Any, value: Any, path: tuple) -> Iterator[tuple[tuple, Any]]:
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
    """As all processes write it that have the same: names in the order of a set, which is another
    in each, count in any order.
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
        return f"{value.cls.__name__}({', '.join(sorted(f'{key}={item}' for key, item in zip(value.keys, items)))})"
    return f"{value.cls.__name__}({', '.join(f'{type(key).__name__}: {item}' for key, item in zip(value.keys, items))})"
