"""Recorder: the attributes and variables that a forward reads while it is traced."""

from __future__ import annotations

import functools
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from .bytecode_names import (
    called_functions,
    cell_sources,
    class_names,
    class_values,
    global_sources,
    is_function,
    is_installed,
    is_own,
    may_name_its_class,
    names_in_code,
    reachable_values,
)
from .dependencies import WATCHED, hooks_of
from .guards import KEPT_BY_TORCH, HasAttributes, is_watched, snapshot
from .object_trees import OF_PYTHON
from .source import (
    LONG,
    Attribute,
    Source,
    attributes_of,
    is_table,
    items_of,
    length,
    slots,
    slots_of,
)

_FIXED = 1 << 8  # flag on classes without settable attributes: Py_TPFLAGS_IMMUTABLETYPE
_MANY = 1000  # most objects whose attributes are watched, the nearest first
_MANY_VALUES = 100_000  # most values that are searched for such objects
_WITH_TABLES = ("torch", "torchgspmd")  # nn.Module finds parameters by way of `__dict__`
_TABLES = ("__dict__", "__getstate__")  # code, and copy.copy, read all attributes by these
_SCALARS = {bool, int, float, complex, str, bytes, type(None)}
_NAMESPACES = (SimpleNamespace, Namespace, threading.local)
_NO_OBJECTS = (
    Tensor,
    type,
    Enum,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    functools.partial,
)


class _AllNames:
    """The names of all attributes, but of what torch keeps in a module."""

    def __contains__(self, name: object) -> bool:
        return name not in KEPT_BY_TORCH


class Recorder:
    """The sources that were read, each with its value and a snapshot at the first read."""

    def __init__(self, modules: Iterable[nn.Module], objects: Sequence[object]) -> None:
        """Record reads on attributes of modules, and of objects; some may be modules in lists."""
        self.holders = {id(holder): holder for holder in (*modules, *objects)}
        self.unread = {id(each): each for each in objects if isinstance(each, nn.Module)}
        self.visited: set[tuple[int, str]] = set()  # (holder id, name) for past reads
        self.entries: dict[Source, tuple[Any, Any]] = {}

    def read(self, holder: object, name: str) -> None:
        """Record an attribute before its first read."""
        # First: reading the value below would call this function again.
        self.visited.add((id(holder), name))
        if (module := self.unread.pop(id(holder), None)) is not None:
            self.record_module(module)
        if id(holder) not in self.holders or name in KEPT_BY_TORCH or name.startswith("__"):
            return
        source = Source(holder, (Attribute(name),))
        if name in slots_of(type(holder)):
            self.record(source)
            return
        table = attributes_of(holder)
        if table is None or name not in table:
            self.record_class(type(holder), name)
        if table is not None and not any(
            name in table.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")
        ):
            if (
                name in table
                or name == "forward"
                or not (isinstance(holder, nn.Module) and callable(getattr(nn.Module, name, None)))
            ):
                self.record(source)

    def record_module(self, module: nn.Module) -> None:
        """Record the tables and the mode of a module that is in a plain list or dict.

        Registered ones have other guards (dependencies.py).
        """
        for source in map(Source, map(vars(module).get, WATCHED)):
            self.record(source)
        self.record(Source(module, (Attribute("training"),)))

    def record(self, source: Source) -> None:
        if source not in self.entries:
            value = source.read()
            self.entries[source] = value, snapshot(value)

    def record_class(self, cls: type, name: str) -> None:
        """Record attributes that instances find in the class or a base.

        Methods and properties are left out.
        """
        owner = next((c for c in cls.__mro__ if name in c.__dict__), None)
        if (
            owner is not None
            and owner.__flags__ & OF_PYTHON
            # Descriptors compute: methods and properties read attributes, which are recorded
            # themselves.
            and not hasattr(type(owner.__dict__[name]), "__get__")
        ):
            self.record(Source(owner, (Attribute(name),)))

    def record_all(self, holder: object, names: Container[str]) -> None:
        """Record all attributes with these names, for an object whose reads cannot be seen."""
        present = HasAttributes.of(holder, names)
        for name in present.present:
            self.record(Source(holder, (Attribute(name),)))
        # A new attribute may change the program, so their presence is guarded, too.
        self.entries[Source(holder)] = holder, present

    def read_table(self, holder: object) -> None:
        """Record all attributes of a holder whose `__dict__` code other than torch's reads."""
        reader = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
        if id(holder) in self.holders and reader not in _WITH_TABLES:
            self.visited |= {(id(holder), name) for name in _TABLES}
            self.record_all(holder, _AllNames())

    def record_variables(self, functions: Iterable[FunctionType]) -> None:
        """Record the variables that functions find by name.

        For lists and tables see Tables.reads.
        """
        for function in functions:
            for source in global_sources(function):
                value = source.read()
                if isinstance(value, ContextVar):
                    self.record(Source(value, (Attribute(source.name),)))
                elif not isinstance(value, (type, ModuleType)) and not is_table(value):
                    self.record(source)
            for cls, attribute in class_names(function):
                self.record_class(cls, attribute)
            # No code names the class in this form, so each attribute of that name counts.
            if may_name_its_class(function):  # type(self).rate
                for cls in dict.fromkeys(map(type, self.holders.values())):
                    for attribute in names_in_code([function]):
                        self.record_class(cls, attribute)
            if not is_installed(function.__module__):
                for source in cell_sources(function):
                    if is_watched(value := source.read()) and not is_table(value):
                        self.record(source)


@contextmanager
def record_reads(
    modules: Iterable[nn.Module], objects: Sequence[object], functions: Iterable[FunctionType]
) -> Iterator[Recorder]:
    """Record which attributes of the modules and objects are read.

    functions: those that may read them.
    """
    recorder = Recorder(modules, objects)
    visited = recorder.visited

    def recording(original: Callable[[Any, str], Any]) -> Callable[[object, str], object]:
        def record(self: object, name: str) -> Any:
            if (id(self), name) not in visited:
                if name in _TABLES:
                    recorder.read_table(self)
                else:
                    recorder.read(self, name)
            return original(self, name)

        return record

    # All modules inherit from nn.Module, so one patch serves them.
    classes: list[Any] = [
        nn.Module,
        *(cls for cls in dict.fromkeys(map(type, objects)) if not issubclass(cls, nn.Module)),
    ]
    originals: dict[Any, Any] = {}
    try:
        for cls in classes:
            if cls.__flags__ & (OF_PYTHON | _FIXED) == OF_PYTHON:
                with suppress(TypeError, AttributeError):  # a metaclass may forbid it
                    # None where the class inherits it: then the patch is deleted, not replaced.
                    original = cls.__dict__.get("__getattribute__")
                    cls.__getattribute__ = recording(cls.__getattribute__)
                    originals[cls] = original
        for holder in objects:
            if (
                type(holder) not in originals
                and not isinstance(holder, nn.Module)
                and attributes_of(holder) is not None
            ):
                recorder.record_all(holder, names_in_code(functions))  # such as SimpleNamespace
        yield recorder
    finally:
        for cls, original in originals.items():
            if original is None:
                del cls.__getattribute__  # inherited again
            else:
                cls.__getattribute__ = original


class ReachedObjects:
    """Objects, such as a configuration, and functions that attributes and variables lead to."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.objects: dict[int, Any] = {}
        self.functions: dict[int, Any] = {}
        self.visited = {id(m) for m in modules}
        self.add(
            value
            for m in modules
            for name, value in m.__dict__.items()
            if name not in KEPT_BY_TORCH
        )
        self.add(value for cls in dict.fromkeys(map(type, modules)) for value in _class_values(cls))

    def add(self, values: Iterable[Any], are_named: bool = False) -> None:
        """Add everything that the values lead to.

        are_named: functions name the values. Objects from installed packages are left out then,
        since a user does not change them.
        """
        # Breadth first, so that the nearest objects come before the limits.
        rest, seen = deque(values), 0
        while rest and seen < _MANY_VALUES and len(self.objects) < _MANY:
            value = rest.popleft()
            if type(value) in _SCALARS or id(value) in self.visited:
                continue
            seen += 1
            self.visited.add(id(value))
            if isinstance(value, tuple) or is_table(value):
                # A long table is data, such as a vocabulary; walking it would take longer than the
                # trace.
                if length(value) <= LONG:
                    rest.extend(value.values() if isinstance(value, dict) else items_of(value))
            elif is_function(value):
                if not (are_named and is_installed(getattr(value, "__module__", None))):
                    self.functions[id(value)] = value
            elif _is_object(value) and not (are_named and is_installed(type(value).__module__)):
                self.objects[id(value)] = value
                rest.extend(_values(value))
                if (
                    not isinstance(value, nn.Module)
                    and (call := type(value).__dict__.get("__call__")) is not None
                ):
                    self.functions[id(call)] = call


def _is_object(value: object) -> bool:
    """Return whether a user may set attributes on the value.

    Among the standard library's classes this holds for namespaces only.
    """
    cls = type(value)
    is_known = (
        not is_own(cls.__module__)
        and not str(cls.__module__).startswith("torch.")
        and cls not in _NAMESPACES
    )
    return (
        not is_known
        and not isinstance(value, _NO_OBJECTS)
        and (attributes_of(value) is not None or bool(slots_of(cls)))
    )


def _class_values(cls: type) -> Iterator[object]:
    """Yield a class's attributes other than methods."""
    return (value for _, value in class_values(cls) if not isinstance(value, FunctionType))


def _values(holder: object) -> Iterator[object]:
    if not isinstance(holder, nn.Module):
        yield from _class_values(type(holder))
    yield from (attributes_of(holder) or {}).values()
    yield from slots(holder).values()


class Reach:
    """Functions and objects to which forward, its hooks or a function lead, by names.

    functions: forwards, hooks, and functions in attributes. called: these and the Python functions
    that they name, and so on. objects: of a module only.
    """

    def __init__(self, fn: Callable | nn.Module) -> None:
        self.modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
        forwards = [module.forward for module in self.modules]
        roots: list[Any] = [fn, *forwards, *(hooks_of(self.modules) if self.modules else ())]
        reach, before = ReachedObjects(self.modules), -1
        # Objects lead to further functions, and these to further objects.
        while len(reach.objects) != before:
            before = len(reach.objects)
            self.functions = [*roots, *reach.functions.values()]
            self.called = called_functions(
                self.functions, map(type, (*self.modules, *reach.objects.values()))
            )
            reach.add(
                (
                    value
                    for function in (*self.functions, *self.called)
                    for value in reachable_values(function)
                ),
                are_named=True,
            )
        self._objects = [*reach.objects.values()]
        self.objects = self._objects if self.modules else []

    def classes(self) -> Iterator[type]:
        """Yield the classes of modules and objects, and those that functions name."""
        yield from map(type, (*self.modules, *self._objects))
        for function in self.called:
            yield from (cls for cls, _ in class_names(function))
