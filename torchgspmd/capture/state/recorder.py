"""What forwards read while they are traced: attributes of modules and of the objects that these
name, and variables.
"""

from __future__ import annotations

import functools
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import Tensor, nn

from .bytecode_names import (
    class_names,
    class_values,
    global_names,
    is_function,
    is_installed,
    is_own,
    names_in_code,
)
from .guards import ABSENT, ANY, KEPT_BY_TORCH, Guards, is_watched, snapshot
from .object_trees import OF_PYTHON, slots_of
from .places import LONG, is_table
from .variable_tables import cell_variable, class_variables, context_variable, slot_variables

_FIXED = 1 << 8  # a class whose attributes cannot be set: Py_TPFLAGS_IMMUTABLETYPE
_MANY, _MANY_VALUES = (
    1000,
    100_000,
    # objects that attributes are watched of, and values that are looked at for these, the nearest first
)
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


class Recorder:
    """What is read, as it is when it is read first."""

    def __init__(self, holders: Iterable[Any]) -> None:
        """holders: whose attributes count."""
        self.holders = {id(holder): holder for holder in holders}
        self.passed: set[tuple[int, str]] = set()  # what has been read
        self.seen: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}

    def read(self, holder: Any, name: str) -> None:
        """Before an attribute is read for the first time."""
        self.passed.add((id(holder), name))
        if id(holder) not in self.holders or name in KEPT_BY_TORCH or name.startswith("__"):
            return
        if name in slots_of(type(holder)):
            self.see(slot_variables(holder), name)
            return
        table = _attributes(holder)
        if table is None or name not in table:
            self.see_class(type(holder), name)
        if table is not None and not any(
            name in table.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")
        ):
            if (
                name in table
                or name == "forward"
                or not (isinstance(holder, nn.Module) and callable(getattr(nn.Module, name, None)))
            ):
                self.see(table, name)

    def see(self, table: Any, name: str) -> None:
        if (id(table), name) not in self.seen:
            value = table.get(name, ABSENT)
            self.seen[id(table), name] = table, name, value, snapshot(value)

    def see_class(self, cls: type, name: str) -> None:
        """What instances find in the class, or one that it inherits from; of methods and
        properties, nothing.
        """
        owner = next((c for c in cls.__mro__ if name in c.__dict__), None)
        if (
            owner is not None
            and owner.__flags__ & OF_PYTHON
            and not hasattr(type(owner.__dict__[name]), "__get__")
        ):
            self.see(class_variables(owner), name)

    def see_whole(self, holder: Any, names: Container[str]) -> None:
        """The attributes of these names of an object of which it is not seen what is read."""
        table: Any = _attributes(holder)
        for name in filter(names.__contains__, table):
            self.see(table, name)
        self.see(_Present(table, names), "attributes")

    def see_variables(self, functions: Iterable[FunctionType]) -> None:
        """Those that functions find by name; of lists and tables see Tables.reads."""
        for function in functions:
            for table, name in global_names(function):
                value = table[name]
                if isinstance(value, ContextVar):
                    self.see(context_variable(name, value), name)
                elif not isinstance(value, (type, ModuleType)) and not is_table(value):
                    self.see(table, name)
            for cls, attribute in class_names(function):
                self.see_class(cls, attribute)
            cells = () if is_installed(function.__module__) else function.__closure__ or ()
            for name, cell in zip(function.__code__.co_freevars, cells):
                if (
                    cell != CellType()
                    and is_watched(cell.cell_contents)
                    and not is_table(cell.cell_contents)
                ):
                    self.see(cell_variable(name, cell), name)

    def to_guards(self, watch: Callable[[dict, str, Any, Any], Any]) -> Guards:
        """watch: what is compared of an entry that was read with this value, which was this then;
        ANY if nothing.
        """
        reads = Guards()
        for table, name, value, at_read in self.seen.values():
            compared = watch(table, name, value, at_read)
            if compared is not ANY:
                reads.add(table, name, compared)
        return reads


class _Present:
    """Which attributes of these names an object has, as an entry of a table."""

    def __init__(self, table: dict, names: Container[str]) -> None:
        self.table, self.names = table, names

    def get(self, name: str, default: Any) -> tuple[str, ...]:
        return tuple(filter(self.names.__contains__, self.table))


@contextmanager
def record_reads(
    modules: Iterable[nn.Module], objects: Sequence[Any], functions: Iterable[FunctionType]
) -> Iterator[Recorder]:
    """Meanwhile it is written down which attributes of these are read. functions: that may read
    them.
    """
    recorder = Recorder([*modules, *objects])
    passed = recorder.passed

    def recording(before: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def record(self: Any, name: str) -> Any:
            if (id(self), name) not in passed:
                recorder.read(self, name)
            return before(self, name)

        return record

    classes: list[Any] = [
        nn.Module,
        *(cls for cls in dict.fromkeys(map(type, objects)) if not issubclass(cls, nn.Module)),
    ]
    originals: dict[Any, Any] = {}
    try:
        for cls in classes:
            if cls.__flags__ & (OF_PYTHON | _FIXED) == OF_PYTHON:
                with suppress(TypeError, AttributeError):  # of a metaclass that forbids it
                    original = cls.__dict__.get("__getattribute__")
                    cls.__getattribute__ = recording(cls.__getattribute__)
                    originals[cls] = original
        for holder in objects:
            if (
                type(holder) not in originals
                and not isinstance(holder, nn.Module)
                and _attributes(holder) is not None
            ):
                recorder.see_whole(holder, names_in_code(functions))  # a SimpleNamespace
        yield recorder
    finally:
        for cls, original in originals.items():
            if original is None:
                del cls.__getattribute__  # found without a look at it again
            else:
                cls.__getattribute__ = original


class Reach:
    """What can be found from attributes and variables: objects, such as a configuration, what these
    name, and functions in Python.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.objects: dict[int, Any] = {}
        self.functions: dict[int, Any] = {}
        self.passed = {id(m) for m in modules}
        self.add(
            value
            for m in modules
            for name, value in m.__dict__.items()
            if name not in KEPT_BY_TORCH
        )
        self.add(value for cls in dict.fromkeys(map(type, modules)) for value in _class_values(cls))

    def add(self, values: Iterable[Any], are_named: bool = False) -> None:
        """are_named: by functions; what an installed package has made counts as its own then, which
        a user does not change.
        """
        rest, seen = deque(values), 0
        while rest and seen < _MANY_VALUES and len(self.objects) < _MANY:
            value = rest.popleft()
            if type(value) in _SCALARS or id(value) in self.passed:
                continue
            seen += 1
            self.passed.add(id(value))
            if isinstance(value, tuple) or is_table(value):
                if len(value) <= LONG:
                    rest.extend(value.values() if isinstance(value, dict) else value)
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


def _is_object(value: Any) -> bool:
    """Whether it may have attributes that a user sets; of Python's own library only a namespace is
    one.
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
        and (_attributes(value) is not None or bool(slots_of(cls)))
    )


def _attributes(holder: Any) -> dict | None:
    try:
        of_thread = isinstance(holder, threading.local)
        table = holder.__dict__ if of_thread else object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def _class_values(cls: type) -> Iterator[Any]:
    """Attributes of a class other than methods."""
    return (value for _, value in class_values(cls) if not isinstance(value, FunctionType))


def _values(holder: Any) -> Iterator[Any]:
    if not isinstance(holder, nn.Module):
        yield from _class_values(type(holder))
    yield from (_attributes(holder) or {}).values()
    yield from slot_variables(holder).values()
