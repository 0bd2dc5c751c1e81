"""Guards: attributes and variables that a traced program has read (recorder.py).

    def forward(self, x):       # reads act, temperature, scale, OFFSET
        return self.act(self.head(x)) / self.temperature * self.config.scale + OFFSET

Values that are read become part of the program. If a guard fails (`model.temperature = 1.0`,
`model.act = F.gelu`), the program is traced again. Plain values are compared by value, also inside
tuples, lists, tables, sets and NumPy arrays. Tensors, functions and objects are compared by
identity.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...compat.private_apis import FakeTensor, FunctionalTensor
from ...compat.private_apis import _pytree as pytree
from .source import (
    ABSENT,
    DEEP,
    LISTS,
    LONG,
    Marker,
    Source,
    attributes,
    attributes_of,
    is_table,
    items_of,
    length,
)
from .state_inputs import COUNTED, Conditions
from .symbolic_numbers import SymbolicNumber
from .value_keys import value_key

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
_TRACERS = (FakeTensor, FunctionalTensor)
_SEQUENCES = (tuple, *LISTS)
_CONTAINERS = (dict, *_SEQUENCES)
_VERY_LONG = 100 * LONG  # most plain values that are compared in one list
# hooks, tables and `training`, which other guards cover
KEPT_BY_TORCH = frozenset(nn.Module().__dict__)
ANY = Marker("anything")


@dataclass(frozen=True)
class TensorPredicate:
    """The predicate on a tensor that the program takes from its source in every run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: Any  # a DTensor's, else None

    @staticmethod
    def of(tensor: Tensor) -> TensorPredicate:
        return TensorPredicate(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            getattr(tensor, "placements", None),
        )


@dataclass(frozen=True)
class Contents:
    """A snapshot of a list, tuple or table, or of an object's attributes.

    Items are plain values, tensors, further Contents, or Kind or ANY in place of tensors.
    """

    cls: type
    keys: tuple
    items: tuple


@dataclass(frozen=True, eq=False)
class Copied:
    """A copy of a set, a NumPy array or a long list with plain values."""

    value: Any

    def hold(self, now: object) -> bool:
        if type(now) is not type(self.value):
            return False
        if isinstance(now, np.ndarray):
            return (
                now.shape == self.value.shape
                and now.dtype == self.value.dtype
                and now.tobytes() == self.value.tobytes()
            )
        return now == self.value


@dataclass(frozen=True)
class HasAttributes:
    """The names, among these, that an object has as attributes."""

    names: Container[str]
    present: tuple[str, ...]

    @staticmethod
    def of(holder: object, names: Container[str]) -> HasAttributes:
        return HasAttributes(names, tuple(filter(names.__contains__, attributes_of(holder) or {})))

    def hold(self, now: object) -> bool:
        return HasAttributes.of(now, self.names).present == self.present


@dataclass(frozen=True)
class HasKey:
    """A key for a value that is too large to copy."""

    key: Any

    def hold(self, now: object) -> bool:
        return value_key(now) == self.key


_HOLDING = (Conditions, Copied, HasAttributes, HasKey)
_PREDICATES = (TensorPredicate, Contents, *_HOLDING)


@dataclass(frozen=True)
class Guard:
    """A program's dependence on a source: a predicate on its value.

    The predicate is one of _PREDICATES. Any other value stands for equality with it, or identity.
    """

    source: Source
    predicate: Any

    def holds(self) -> bool:
        return matches(self.source.read(), self.predicate)

    def described(self) -> str:
        """Describe the current value by the same text in all processes that have it."""
        value = self.source.read()
        if isinstance(self.predicate, HasAttributes):
            value = HasAttributes.of(value, self.predicate.names).present
        elif isinstance(self.predicate, Contents) and type(value) is self.predicate.cls:
            value = snapshot_components(value)
        return _describe(value)


class Guards:
    """The guards on values that a program has read."""

    def __init__(self, guards: Iterable[Guard] = ()) -> None:
        """Sort the guards by comparison, without those that anything satisfies.

        Dict entries are read in C, first those whose values mostly are the same objects.
        """
        entries = [(g, g.source.dict_entry()) for g in guards if g.predicate is not ANY]
        entries.sort(key=lambda e: 2 if e[1] is None else isinstance(e[0].predicate, _PREDICATES))
        self.guards = [guard for guard, _ in entries]
        in_dicts = [(*entry, guard.predicate) for guard, entry in entries if entry is not None]
        self.tables, self.keys, self.predicates = map(
            list, zip(*in_dicts) if in_dicts else ((),) * 3
        )
        self.simple = sum(not isinstance(p, _PREDICATES) for p in self.predicates)
        self.readers = [
            (guard.source.reader(), guard.predicate) for guard, entry in entries if entry is None
        ]

    def hold(self) -> bool:
        # Most values are the objects from the trace, which C code compares by identity.
        now, simple = [*map(dict.get, self.tables, self.keys, repeat(ABSENT))], self.simple
        # Identity first: it needs no call of Python code.
        if not all(map(is_, now[:simple], self.predicates)) and not all(
            map(matches, now[:simple], self.predicates)
        ):
            return False
        return all(map(matches, now[simple:], self.predicates[simple:])) and all(
            matches(read(), predicate) for read, predicate in self.readers
        )

    def changed(self) -> Iterator[tuple[Source, Any]]:
        """Yield source and value for numbers and tensors that differ from their guards.

        This includes those in lists and tables that attributes and variables hold.
        """
        for guard in self.guards:
            yield from _changed_leaves(guard.source, guard.source.read(), guard.predicate)

    def differing(self) -> list[str]:
        """Return the names of the sources whose guards fail."""
        return [guard.source.name for guard in self.guards if not guard.holds()]

    def changes(self) -> Iterator[tuple[str, str, str]]:
        """Yield the sources whose guards fail, with the value now and the value in the trace."""
        for guard in self.guards:
            if not guard.holds():
                now, then = guard.described(), _describe(guard.predicate)
                yield str(guard.source), now if now != then else f"another {now}", then

    def described(self, owners: Mapping[int, str]) -> list[tuple[str, str]]:
        """Return names and descriptions for the current values, the same text in every process.

        owners: by a module's id, the prefix for its names.
        """
        return [(f"'{_name(guard, owners)}'", guard.described()) for guard in self.guards]

    def tensors(self, owners: Mapping[int, str]) -> dict[int, str]:
        """Return the names for tensors in the guards, by their ids."""
        return {
            id(leaf): _name(guard, owners)
            for guard in self.guards
            for leaf in leaves_of(guard.predicate)
            if isinstance(leaf, Tensor)
        }


def _name(guard: Guard, owners: Mapping[int, str]) -> str:
    return owners.get(id(guard.source.root), "") + guard.source.name


def is_plain(value: object, kinds: tuple[type, ...] = _PLAIN) -> bool:
    """Return whether the value is plain, or a short container with plain values."""
    if isinstance(value, _CONTAINERS):
        return length(value) <= LONG and all(
            isinstance(leaf, kinds) for leaf in pytree.tree_leaves(value)
        )
    return isinstance(value, kinds)


def is_watched(value: object) -> bool:
    """Return whether the value is a tensor or plain, or a short container with these."""
    return is_plain(value, (Tensor, *_PLAIN))


def snapshot(value: Any, depth: int = 0) -> object:
    """Return a snapshot for `matches` to compare with.

    Objects, deeply nested tables and very long values are compared by identity.
    """
    if (copied := _copy_values(value)) is not None:
        return copied
    if (
        not (isinstance(value, tuple) or is_table(value))
        or length(value) > LONG
        or depth > DEEP
        or _is_constant(value)
    ):
        return value
    return snapshot_components(value, depth)


def snapshot_components(value: object, depth: int = 0) -> Contents:
    """Return a snapshot of a list, tuple or table, or of an object's attributes."""
    keys, items = _keys_and_items(value)
    return Contents(type(value), keys, tuple(snapshot(item, depth + 1) for item in items))


def _keys_and_items(value: object) -> tuple[tuple, Collection[object]]:
    """Return a table's or an object's keys and items; a list or tuple has no keys."""
    if isinstance(value, _SEQUENCES):
        return (), items_of(value)
    table = _eager_entries(value) if isinstance(value, dict) else attributes(value)
    return tuple(table), table.values()


def _eager_entries(table: Mapping) -> Mapping:
    """Return a table without entries for tracers' classes, which only a trace writes or reads."""
    if any(isinstance(key, type) and issubclass(key, _TRACERS) for key in table):
        keys = (k for k in table if not (isinstance(k, type) and issubclass(k, _TRACERS)))
        return {key: table[key] for key in keys}
    return table


def leaves_of(snapshot: object) -> Iterator[object]:
    """Yield the values in a snapshot."""
    if isinstance(snapshot, Contents):
        for item in snapshot.items:
            yield from leaves_of(item)
    else:
        yield snapshot


def _copy_values(value: Any) -> Copied | HasKey | None:
    """Return a copy if it is a set, an array or a long list with plain values, else None."""
    if isinstance(value, np.ndarray):
        is_small = value.size <= LONG and not value.dtype.hasobject
        return Copied(value.copy()) if is_small else HasKey(value_key(value))
    is_long = type(value) is list and len(value) > LONG
    if is_long or isinstance(value, (set, bytearray)):
        return (
            Copied(value.copy())
            if len(value) <= _VERY_LONG and all(type(item) in _PLAIN for item in value)
            else None
        )
    return None


def _is_constant(value: object) -> bool:
    """Return whether the value is a tuple of plain values, which is immutable."""
    # isinstance() takes a SymbolicNumber for the number that it stands for.
    return type(value) is tuple and all(
        type(item) is not SymbolicNumber and isinstance(item, _PLAIN) for item in value
    )


def _changed_leaves(source: Source, now: object, value: object) -> Iterator[tuple[Source, object]]:
    """Yield source and value for numbers and tensors that differ from the guard."""
    if type(value) is tuple:
        value = Contents(tuple, (), value)
    if isinstance(value, Contents) and type(now) is value.cls:
        keys, items = _keys_and_items(now)
        if keys == value.keys and len(items) == len(value.items):
            for key, one, other in zip(keys or range(len(items)), items, value.items):
                yield from _changed_leaves(source.at(key), one, other)
    elif (
        type(now) is type(value)
        and type(now) in COUNTED
        and now != value
        or isinstance(value, Tensor)
        and isinstance(now, Tensor)
    ):
        if now is not value:
            yield source, now


def matches(now: object, value: object) -> bool:
    if now is value or value is ANY:
        return True
    if isinstance(value, TensorPredicate):
        return isinstance(now, Tensor) and TensorPredicate.of(now) == value
    if isinstance(value, _HOLDING):
        return value.hold(now)
    if isinstance(value, Contents):
        if type(now) is not value.cls:
            return False
        if isinstance(now, _SEQUENCES):
            items = items_of(now)
            return len(items) == len(value.items) and all(map(matches, items, value.items))
        table = now if isinstance(now, dict) else attributes(now)
        table = table if tuple(table) == value.keys else _eager_entries(table)
        return tuple(table) == value.keys and all(map(matches, table.values(), value.items))
    return (
        type(now) is type(value)
        and type(now) is not SymbolicNumber
        and (isinstance(now, _PLAIN) or _is_constant(now))
        and now == value
    )


def _describe(value: object) -> str:
    """Describe a value by the same text in all processes that have it.

    A set's strings have another order in each process, so they are sorted.
    """
    value = value if isinstance(value, TensorPredicate) else snapshot(value)
    if isinstance(value, (Tensor, TensorPredicate)):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, HasKey):
        return f"{value.key[2]}{list(value.key[1])} {value.key[-1][:8]}"
    if isinstance(value, Copied):
        return str(
            sorted(map(repr, value.value))
            if isinstance(value.value, set)
            else np.asarray(value.value).tolist()
        )
    if not isinstance(value, Contents):
        return (
            repr(value)
            if isinstance(value, (tuple, Marker, *_PLAIN))
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
