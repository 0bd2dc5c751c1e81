"""Methods: the functions in classes, and torch's functions, that a program has run.

    Block.forward = faster          a method of a class
    F.gelu = approximated           a function of torch

A class is compared as a whole, its bases too: an entry that is new may hide an inherited one.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from operator import is_
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch import nn

from .bytecode_names import dotted_names, function_in, names_in_code
from .object_trees import OF_PYTHON

_OWN = __name__.partition(".")[0]
_FAR = 3  # most calls from a forward of torch's into its functions
_PARTS = ("fget", "fset", "fdel", "func", "__func__")
_ABSENT = object()
_GET: Any = MappingProxyType.get
# What a call of a module runs before its forward.
_OF_CALLS = [
    function
    for name in ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")
    if isinstance(function := vars(nn.Module).get(name), FunctionType)
]


class Methods:
    """The methods of classes with their bases, and torch's functions, at planning time."""

    def __init__(self, classes: Iterable[type], functions: Iterable[FunctionType]) -> None:
        classes = [*dict.fromkeys(classes)]
        # Nobody replaces methods of the standard library.
        kept = {*sys.stdlib_module_names, _OWN}
        bases = dict.fromkeys(
            base
            for c in classes
            for base in c.__mro__
            if base.__flags__ & OF_PYTHON and str(base.__module__).partition(".")[0] not in kept
        )
        self.classes = [*bases]
        of_torch = [c.forward for c in classes if issubclass(c, nn.Module) and _is_torch(c)]
        code = [*functions, *(f for f in map(function_in, of_torch) if isinstance(f, FunctionType))]
        # Of torch's classes, which have many methods, those that are named; of others all.
        self.named = names_in_code([*code, *_OF_CALLS])
        named = {(id(table), name): table for table, name in _torch_names(code)}
        self.tables, self.names = [*named.values()], [name for _, name in named]
        self._watch()
        self.then = self._facts()

    def _watch(self) -> None:
        """Record the entries, which hold() compares by identity."""
        self.spaces = [*map(vars, self.classes)]
        self.sizes = [*map(len, self.spaces)]
        entries = [
            (space, name, value)
            for cls, space in zip(self.classes, self.spaces)
            for name, value in self._methods(cls)
        ]
        self.owners, self.keys, self.methods = map(list, zip(*entries) if entries else ((),) * 3)
        self.functions = [*map(dict.get, self.tables, self.names)]

    def _methods(self, cls: type) -> Iterator[tuple[str, Any]]:
        is_torch = _is_torch(cls)
        for name, value in vars(cls).items():
            if hasattr(type(value), "__get__") and not (is_torch and name not in self.named):
                yield name, value

    def _facts(self) -> dict[tuple[int, str], Any]:
        """Return the methods and functions by class or table, and name."""
        classes = enumerate(self.classes)
        facts = {(i, name): value for i, cls in classes for name, value in self._methods(cls)}
        names = enumerate(zip(self.tables, self.names))
        return facts | {(-1 - i, name): table.get(name) for i, (table, name) in names}

    def hold(self) -> bool:
        """Return whether each class and table has the functions from planning time."""
        # By identity, in C: this runs at every call.
        if (
            [*map(len, self.spaces)] == self.sizes
            and all(map(is_, map(_GET, self.owners, self.keys), self.methods))
            and all(map(is_, map(dict.get, self.tables, self.names), self.functions))
        ):
            return True
        if next(self.changes(), None) is not None:
            return False
        self._watch()  # only other values have come or gone
        return True

    def changes(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, function now and function at planning time for those that differ."""
        now = self._facts()
        for key in dict.fromkeys((*self.then, *now)):
            one, other = now.get(key, _ABSENT), self.then.get(key, _ABSENT)
            if one is not other:
                texts = ["absent" if x is _ABSENT else _place(x) for x in (one, other)]
                if texts[0] == texts[1]:
                    texts[0] = f"another {texts[0]}"
                yield self._name(*key), texts[0], texts[1]

    def _name(self, i: int, name: str) -> str:
        if i >= 0:
            return f"{self.classes[i].__qualname__}.{name}"
        return f"{self.tables[-1 - i].get('__name__')}.{name}"

    def described(self) -> list[list[str]]:
        """Return names and checksums, the same texts in every process with the same functions."""
        rows = [
            (f"the methods of {cls.__module__}.{cls.__qualname__}", self._methods(cls))
            for cls in self.classes
        ]
        functions = ((name, table.get(name)) for table, name in zip(self.tables, self.names))
        rows.append(("the functions of torch", functions))
        return [[name, _checksum(items)] for name, items in rows]


def _is_torch(owner: Any) -> bool:
    return str(getattr(owner, "__module__", None)).partition(".")[0] == "torch"


def _torch_names(functions: Iterable[Any]) -> Iterator[tuple[dict, str]]:
    """Yield table and name for torch's functions that functions name, and that those name."""
    seen: set[int] = set()
    for _ in range(_FAR):
        callees = []
        for function in functions:
            if isinstance(function, FunctionType) and id(function) not in seen:
                seen.add(id(function))
                for table, name in _named_in_torch(function):
                    yield table, name
                    if str(getattr(table[name], "__module__", None)).startswith("torch.nn."):
                        callees.append(table[name])
        functions = callees


def _named_in_torch(function: FunctionType) -> Iterator[tuple[dict, str]]:
    """Yield table and name for the functions in torch's modules that a function names."""
    for names in dotted_names(function.__code__):
        table: dict = function.__globals__
        is_torch = _is_torch(function)
        for name in names:
            value = table.get(name)
            if not isinstance(value, ModuleType):
                if is_torch and callable(value) and not isinstance(value, type):
                    yield table, name
                break
            table = value.__dict__
            is_torch = value.__name__.partition(".")[0] == "torch"


def _checksum(items: Iterable[tuple[str, Any]]) -> str:
    text = "\n".join(sorted(f"{name} {_code(value)}" for name, value in items))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _place(value: Any) -> str:
    return re.sub(" [0-9a-f]{8}", "", _code(value))


def _code(value: Any) -> str:
    """Return a function's, method's or property's name, line and code as text."""
    if isinstance(value, FunctionType):
        code = value.__code__
        checksum = hashlib.sha256(code.co_code).hexdigest()[:8]
        return f"{value.__qualname__}:{code.co_firstlineno} {checksum}"
    if isinstance(value, (property, classmethod, staticmethod, cached_property, partial)):
        parts = [part for name in _PARTS if (part := getattr(value, name, None)) is not None]
        return f"{type(value).__name__}({', '.join(map(_code, parts))})"
    return getattr(value, "__qualname__", type(value).__qualname__)
