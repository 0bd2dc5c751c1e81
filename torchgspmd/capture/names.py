"""What functions can reach by name: those that they call, and the variables that these read."""
from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

_EMPTY = CellType()
_METHODS = (FunctionType, property, functools.cached_property, staticmethod, classmethod)
LIBRARIES = ("torch", __name__.partition(".")[0])
_MANY = 10_000                  # functions that are looked at


def called(functions: Iterable[Any], classes: Iterable[type]) -> list[FunctionType]:
    """The functions in Python among these and those that they name, and so on: global ones, those around them, and methods and properties
    of these classes. Not those of torch."""
    methods = _methods(classes)
    found: dict[int, FunctionType] = {}
    while functions and len(found) < _MANY:
        new = {id(f): f for function in functions for f in _plain_functions(function) if id(f) not in found}
        found.update(new)
        functions = [callee for f in new.values() for callee in _callees(f, methods)]
    return list(found.values())


def is_function(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, functools.partial))


def _methods(classes: Iterable[type]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for cls in dict.fromkeys(base for each in classes for base in each.__mro__):
        if cls.__module__.partition(".")[0] not in (*LIBRARIES, "builtins"):
            for name, value in cls.__dict__.items():
                if isinstance(value, _METHODS):
                    found.setdefault(name, []).append(getattr(value, "fget", None) or getattr(value, "func", None)
                                                      or getattr(value, "__func__", value))
    return found


def _plain_functions(function: Any) -> Iterator[FunctionType]:
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        else:
            if isinstance(function, FunctionType) and (function.__module__ or "").partition(".")[0] not in LIBRARIES:
                yield function
            function = getattr(function, "__wrapped__", None)


def _callees(function: FunctionType, methods: dict[str, list[Any]]) -> Iterator[Any]:
    for name in names_in(function.__code__):
        yield function.__globals__.get(name)
        yield from methods.get(name, ())
    for cell in function.__closure__ or ():
        if cell != _EMPTY and is_function(cell.cell_contents):
            yield cell.cell_contents


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """The global variables that it reads; in one order in all processes."""
    return tuple(dict.fromkeys(i.argval for part in _parts(code) for i in dis.get_instructions(part) if i.opname == "LOAD_GLOBAL"))


@functools.lru_cache(maxsize=4096)
def assigned_globals(code: CodeType) -> tuple[str, ...]:
    """The global variables that it assigns."""
    return tuple(dict.fromkeys(i.argval for part in _parts(code) for i in dis.get_instructions(part) if i.opname == "STORE_GLOBAL"))


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Names of global variables and of attributes in it."""
    return tuple(dict.fromkeys(name for part in _parts(code) for name in part.co_names))


def _parts(code: CodeType) -> Iterator[CodeType]:
    """It, and the comprehensions and functions that are written in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def named(function: Any) -> Iterator[Any]:
    """What a function can reach by name: variables around it and global ones, the object it is a method of, arguments it was given."""
    if hasattr(function, "__wrapped__"):
        yield from named(function.__wrapped__)
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *named(function.func))
    elif isinstance(function, MethodType):
        yield from (function.__self__, *named(function.__func__))
    elif isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
        yield from (*cells, *(function.__defaults__ or ()), *(function.__globals__.get(name) for name in names_in(function.__code__)))
    else:
        yield function
