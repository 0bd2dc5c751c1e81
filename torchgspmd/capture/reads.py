"""The attributes of modules that a traced program has read: numbers, strings and the like, which became part of it.

    def forward(self, x):
        return self.head(x) / self.temperature * self.config.scale + OFFSET         # read: temperature, scale, OFFSET

A program whose reads do not hold any more (`model.temperature = 1.0`, `model.config.scale = 2`) is made anew; of a tensor or an
object, if it is not the same one. What functions find by name is read as well: global variables and those around a function, and plain
values in attributes of objects, modules and classes among them.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import is_, itemgetter
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .counts import Conditions, Count
from .names import LIBRARIES, called, global_names
from .objects import OF_PYTHON, is_object
from .state import COUNTED, DEEP, LISTS, LONG, is_table

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
_CONTAINERS = (tuple, dict, *LISTS)
_FIXED = 1 << 8                 # a class whose attributes cannot be set: Py_TPFLAGS_IMMUTABLETYPE
KEPT_BY_TORCH = frozenset(nn.Module().__dict__)    # hooks, tables, `training`: others look after them


class _Nothing:
    """In the place of a value."""

    def __init__(self, why: str):
        self.why = why

    def __repr__(self) -> str:
        return self.why


ABSENT, ANY = _Nothing("absent"), _Nothing("anything")


@dataclass(frozen=True)
class Kind:
    """What a program depends on of a tensor that it takes from its place at every run."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: Any                         # of a DTensor

    @staticmethod
    def of(tensor: Tensor) -> Kind:
        return Kind(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, getattr(tensor, "placements", None))


@dataclass(frozen=True)
class Contents:
    """A list, tuple or table as it was: plain values, tensors, Kind or ANY in the place of tensors, and more of these."""
    cls: type
    keys: tuple
    items: tuple

    def leaves(self) -> Iterator[Any]:
        for item in self.items:
            yield from item.leaves() if isinstance(item, Contents) else (item,)


class Reads:
    """What tables of attributes held under names; `absent`: nothing, a class did."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.values: list[Any] = []         # plain ones, tensors and objects; behind them Kind and Contents
        self.simple = 0                     # how many are not such
        self.others: list[tuple[str, Callable[[], Any], Any]] = []          # attributes of classes, variables around functions

    def add(self, table: dict[str, Any], name: str, value: Any) -> None:
        is_simple = not isinstance(value, (Kind, Contents, Conditions))
        place = self.simple if is_simple else len(self.values)
        for column, entry in ((self.tables, table), (self.names, name), (self.values, value)):
            column.insert(place, entry)
        self.simple += is_simple

    def now(self) -> list[Any]:
        """What they hold at present."""
        return [*map(dict.get, self.tables, self.names, repeat(ABSENT))]

    def changed_numbers(self) -> Iterator[tuple[dict, tuple]]:
        """Where attributes, and lists and tables in them, hold numbers that are others now: the keys from their tables on."""
        for table, name, now, value in zip(self.tables, self.names, self.now(), self.values):
            if "__builtins__" not in table:
                yield from ((table, path) for path in _changed_numbers(now, value, (name,)))

    def differing(self) -> list[str]:
        """Names of those that are not as they were."""
        return [*(name for name, now, value in zip(self.names, self.now(), self.values) if not same(now, value)),
                *(name for name, get, value in self.others if not same(get(), value))]

    def described(self, now: bool = False) -> list[Any]:
        """What they held, or hold now, as every process writes it."""
        others = [get() if now else value for _, get, value in self.others]
        return [_described(v) for v in (*(self.now() if now else self.values), *others)]

    def hold(self) -> bool:
        """Whether all is as it was."""
        now = self.now()
        if not all(map(is_, now[:self.simple], self.values)) and not all(map(same, now[:self.simple], self.values)):
            return False
        return all(map(same, now[self.simple:], self.values[self.simple:])) and all(same(get(), value) for _, get, value in self.others)


class Recorder:
    """The attributes that forwards read while they are traced, as they are when they are read first."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str], tuple[Any, dict, Any, Any]] = {}
        self.others: dict[tuple[Any, str], tuple[Callable[[], Any], Any]] = {}      # by class, or id of a cell

    def see(self, holder: Any, table: dict, name: str) -> None:
        value = table.get(name, ABSENT)
        self.seen[id(holder), name] = holder, table, value, frozen(value)

    def see_class(self, cls: type, name: str) -> None:
        """What instances find in the class, or one that it inherits from."""
        owner = next((c for c in cls.__mro__ if name in c.__dict__), None)
        if owner is not None and owner.__flags__ & OF_PYTHON and is_plain(owner.__dict__[name]) and (owner, name) not in self.others:
            self.others[owner, name] = lambda: owner.__dict__.get(name, ABSENT), frozen(owner.__dict__[name])

    def see_around(self, function: FunctionType) -> None:
        """Variables of the function that it was made in."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if cell != CellType() and is_plain(cell.cell_contents):
                self.others.setdefault((id(cell), name), (lambda cell=cell: cell.cell_contents, frozen(cell.cell_contents)))

    def see_named(self, value: Any, names: Iterable[str]) -> None:
        """Attributes of these names of something that a function names."""
        if isinstance(value, type):
            for name in names:
                self.see_class(value, name)
        elif is_object(value) or isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in LIBRARIES:
            table = getattr(value, "__dict__", {})
            for name in names:
                if name not in table:
                    self.see_class(type(value), name)
                elif (id(value), name) not in self.seen and is_plain(table[name]):
                    self.see(value, table, name)

    def settled(self, watch: Callable[[dict, str, Any, Any], Any]) -> Reads:
        """watch: what is compared of an entry that was read with this value, which was this then; ANY if nothing."""
        reads = Reads()
        for (holder, name), (get, value) in self.others.items():
            if same(get(), value):
                reads.others.append((name, get, value))
            else:
                where = f"of class {holder.__name__}" if isinstance(holder, type) else "around a function"
                warnings.warn(f"forward assigns '{name}' {where}: runs of the program do not; keep it in an attribute of the module",
                              stacklevel=2)
        for (_, name), (_, table, value, then) in self.seen.items():
            compared = watch(table, name, value, then)
            if compared is not ANY:
                reads.add(table, name, compared)
        return reads


@contextmanager
def recorded_reads(module: nn.Module) -> Iterator[Recorder]:
    """Of the module, those inside of it and the objects that their attributes name, there at the end, and of global variables in their
    forwards."""
    recorder = Recorder()
    seen = recorder.seen
    objects = named_objects(module)
    own = {id(holder) for holder in (*module.modules(), *objects)}
    for function in called((getattr(cls, "forward", None), cls) for cls in dict.fromkeys(map(type, module.modules()))):
        table = function.__globals__
        for name in global_names(function.__code__):
            if is_plain(value := table.get(name, ABSENT)) or isinstance(value, Tensor):
                recorder.see(table, table, name)
            else:
                recorder.see_named(value, function.__code__.co_names)
        recorder.see_around(function)

    def recording(before: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def record(self: Any, name: str) -> Any:
            value = before(self, name)
            if name not in KEPT_BY_TORCH and id(self) in own and (id(self), name) not in seen:
                table = object.__getattribute__(self, "__dict__")
                if name not in table:
                    recorder.see_class(type(self), name)
                if name == "forward" or is_plain(value) or name in table and (id(value) in own or _is_watched(value)):
                    recorder.see(self, table, name)
            return value
        return record

    python: list[Any] = [cls for cls in dict.fromkeys(map(type, objects)) if cls.__flags__ & (OF_PYTHON | _FIXED) == OF_PYTHON]
    for holder in objects:
        if type(holder) not in python:                  # of a SimpleNamespace it is not seen what is read: all that it has
            for name, value in holder.__dict__.items():
                if _is_watched(value):
                    recorder.see(holder, holder.__dict__, name)
    classes: list[Any] = [nn.Module, *python]
    originals = [cls.__dict__.get("__getattribute__") for cls in classes]
    for cls in classes:
        cls.__getattribute__ = recording(cls.__getattribute__)
    try:
        yield recorder
    finally:
        for cls, original in zip(classes, originals):
            if original is None:
                del cls.__getattribute__                # found without a look at it again
            else:
                cls.__getattribute__ = original


def named_objects(module: nn.Module) -> list[Any]:
    """What attributes of modules name, such as a configuration, and objects that those name."""
    found: dict[int, Any] = {}
    holders: list[Any] = list(module.modules())
    for _ in range(2):
        values = [value for holder in holders for value in holder.__dict__.values()]
        holders = [v for v in values if id(v) not in found and is_object(v) and hasattr(v, "__dict__")]
        found.update((id(v), v) for v in holders)
    return list(found.values())


def is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return len(value) <= LONG and all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))
    return isinstance(value, _PLAIN)


def _is_watched(value: Any) -> bool:
    """Whether it is a tensor or plain, or a table of such."""
    if isinstance(value, _CONTAINERS):
        return len(value) <= LONG and all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in pytree.tree_leaves(value))
    return isinstance(value, (Tensor, *_PLAIN))


def frozen(value: Any, depth: int = 0) -> Any:
    """The value as it is now; of a long table, or one that is deep in others, only that it is this one."""
    if not (isinstance(value, tuple) or is_table(value)) or len(value) > LONG or depth > DEEP or _is_constant(value):
        return value
    keys, items = (tuple(value), value.values()) if isinstance(value, dict) else ((), value)
    return Contents(type(value), keys, tuple(frozen(item, depth + 1) for item in items))


def _is_constant(value: Any) -> bool:
    """Whether it is a tuple of plain values, which stays what it is."""
    return type(value) is tuple and all(type(item) is not Count and isinstance(item, _PLAIN) for item in value)


def _changed_numbers(now: Any, value: Any, path: tuple) -> Iterator[tuple]:
    if isinstance(value, Contents) and type(now) is value.cls and is_table(now) and len(now) == len(value.items):
        keys, items = (tuple(now), now.values()) if isinstance(now, dict) else (tuple(range(len(now))), now)
        if keys == (value.keys or keys):
            for key, one, other in zip(keys, items, value.items):
                yield from _changed_numbers(one, other, (*path, key))
    elif type(now) is type(value) and type(now) in COUNTED and now != value:
        yield path


def same(now: Any, value: Any) -> bool:
    if now is value or value is ANY:
        return True
    if isinstance(value, Kind):
        return isinstance(now, Tensor) and Kind.of(now) == value
    if isinstance(value, Conditions):
        return value.hold(now)
    if isinstance(value, Contents):
        return (type(now) is value.cls and len(now) == len(value.items) and (not isinstance(now, dict) or tuple(now) == value.keys)
                and all(map(same, now.values() if isinstance(now, dict) else now, value.items)))
    return type(now) is type(value) and type(now) is not Count and (isinstance(now, _PLAIN) or _is_constant(now)) and now == value


def _described(value: Any) -> Any:
    """As all processes write it that have the same: names in the order of a set, which is another in each, count in any order."""
    if isinstance(value, (Tensor, Kind)):
        return tuple(value.shape), value.dtype
    if isinstance(value, _CONTAINERS):
        value = frozen(value)
    if isinstance(value, Conditions):
        return value.cls.__name__, value.found
    if isinstance(value, Contents):
        items = [_described(item) for item in value.items]
        if value.keys and all(isinstance(key, str) for key in value.keys):
            return value.cls.__name__, sorted(zip(value.keys, items), key=itemgetter(0))
        keys = [type(key).__name__ for key in value.keys]
        return value.cls.__name__, keys, sorted(items) if all(isinstance(item, str) for item in value.items) else items
    return value if isinstance(value, _PLAIN) else type(value).__name__
