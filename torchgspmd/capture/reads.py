"""The attributes of modules that a traced program has read: numbers, strings and the like, which became part of it.

    def forward(self, x):
        return self.head(x) / self.temperature * self.config.scale + OFFSET         # read: temperature, scale, OFFSET

A program whose reads do not hold any more (`model.temperature = 1.0`, `model.config.scale = 2`) is made anew; of a tensor or an
object, if it is not the same one.
"""
from __future__ import annotations

import copy
import dis
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .objects import OF_PYTHON, is_object

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
_CONTAINERS = (list, tuple, dict)
_FIXED = 1 << 8                 # a class whose attributes cannot be set: Py_TPFLAGS_IMMUTABLETYPE
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
        return [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v if _is_plain(v) else type(v).__name__
                for v in (self.now() if now else self.values)]

    def hold(self) -> bool:
        """Whether all is as it was."""
        now = self.now()
        return all(map(is_, now, self.values)) or all(map(_same, now, self.values))


@contextmanager
def recorded_reads(module: nn.Module) -> Iterator[Reads]:
    """Of the module, those inside of it and the objects that their attributes name, there at the end, and of global variables in their
    forwards; none of what is assigned meanwhile: a counter that forward increments would need a program for each number."""
    reads = Reads()
    seen: dict[tuple[int, str], tuple[Any, dict, Any]] = {}
    objects = _objects(module)
    own = {id(holder) for holder in (*module.modules(), *objects)}
    for table, name in _globals(module):
        seen[id(table), name] = None, table, _frozen(table[name])

    def recording(before: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def record(self: Any, name: str) -> Any:
            value = before(self, name)
            if name not in KEPT_BY_TORCH and id(self) in own and (id(self), name) not in seen:
                table = object.__getattribute__(self, "__dict__")
                if name == "forward" or _is_plain(value) or name in table and (isinstance(value, Tensor) or id(value) in own):
                    seen[id(self), name] = self, table, _frozen(table.get(name, ABSENT))
            return value
        return record

    python: list[Any] = [cls for cls in dict.fromkeys(map(type, objects)) if cls.__flags__ & (OF_PYTHON | _FIXED) == OF_PYTHON]
    for holder in objects:
        if type(holder) not in python:                  # of a SimpleNamespace it is not seen what is read: all that it has
            seen.update({(id(holder), name): (holder, holder.__dict__, _frozen(value))
                         for name, value in holder.__dict__.items() if _is_plain(value)})
    classes: list[Any] = [nn.Module, *python]
    originals = [cls.__dict__.get("__getattribute__") for cls in classes]
    for cls in classes:
        cls.__getattribute__ = recording(cls.__getattribute__)
    try:
        yield reads
    finally:
        for cls, original in zip(classes, originals):
            if original is None:
                del cls.__getattribute__                # found without a look at it again
            else:
                cls.__getattribute__ = original
    for (_, name), (owner, table, value) in seen.items():
        written = overwritten.get(owner, ()) if isinstance(owner, nn.Module) else ()
        if not any(path[0] == name for path in written) and _same(table.get(name, ABSENT), value):
            reads.add(table, name, value)


def _objects(module: nn.Module) -> list[Any]:
    """What attributes of modules name, such as a configuration, and objects that those name."""
    found: dict[int, Any] = {}
    holders: list[Any] = list(module.modules())
    for _ in range(2):
        values = [value for holder in holders for value in holder.__dict__.values()]
        holders = [v for v in values if id(v) not in found and is_object(v) and hasattr(v, "__dict__")]
        found.update((id(v), v) for v in holders)
    return list(found.values())


def _globals(module: nn.Module) -> Iterator[tuple[dict, str]]:
    """Global variables of plain values that forwards name, and where they are."""
    for forward in {getattr(type(m), "forward", None) for m in module.modules()}:
        code, table = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
        for name in {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"} if code is not None else ():
            if _is_plain(table.get(name, ABSENT)):
                yield table, name


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return len(value) <= LONG and all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))
    return isinstance(value, _PLAIN)


def _frozen(value: Any) -> Any:
    """The value as it is now."""
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value


def _same(now: Any, value: Any) -> bool:
    return now is value or type(now) is type(value) and isinstance(now, (*_PLAIN, *_CONTAINERS)) and now == value
