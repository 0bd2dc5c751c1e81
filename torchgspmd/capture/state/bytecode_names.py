"""Names in functions' bytecode: functions that they call, variables that they read."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from .instructions import (
    ATTRIBUTE,
    CELL,
    COPY,
    GLOBAL,
    IMPORT,
    LOCAL,
    STORE_ATTRIBUTE,
    STORE_CELL,
    STORE_GLOBAL,
    bodies,
)
from .source import ABSENT, Attribute, Source

_METHODS = (FunctionType, property, functools.cached_property, staticmethod, classmethod)
_COMMON = {*dir(Tensor), *dir(dict), *dir(list), *dir(str)}
# methods that are called without their name
_UNNAMED = ("__init__", "__post_init__", "__call__", "forward", "backward", "setup_context")
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", __name__.partition(".")[0]}
_MANY = 500  # most functions; those that few calls lead to come first
_FAR = 3  # most calls from a forward into installed packages


def called_functions(functions: Iterable[object], classes: Iterable[type]) -> list[FunctionType]:
    """Return all Python functions reachable from these.

    This includes global functions, those in modules and classes, closures, and the classes'
    methods and properties; torch's are left out.
    """
    methods = _methods(classes)
    functions_by_id: dict[int, FunctionType] = {}
    calls = 0
    # Breadth first, so that the functions nearest to forward come before the limit.
    while functions and len(functions_by_id) < _MANY:
        new = {
            id(f): f
            for function in functions
            for f in _plain_functions(function)
            if id(f) not in functions_by_id and (calls < _FAR or not is_installed(f.__module__))
        }
        functions_by_id.update(new)
        functions = [callee for f in new.values() for callee in _callees(f, methods)]
        calls += 1
    return list(functions_by_id.values())


def is_function(value: object) -> bool:
    return isinstance(value, (FunctionType, MethodType, functools.partial))


def is_own(module: str | None) -> bool:
    """Return whether a user may change the module's contents.

    False for torch and for the standard library.
    """
    return str(module).partition(".")[0] not in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def is_installed(module: str | None) -> bool:
    """Return whether the module belongs to an installed package."""
    file = str(getattr(sys.modules.get(str(module).partition(".")[0]), "__file__", None))
    return "site-packages" in file or "dist-packages" in file


def global_sources(function: FunctionType) -> Iterator[Source]:
    """Yield the sources for the globals that a function reads.

    This includes Python modules' attributes, as in `settings.SCALE`.
    """
    for names in dotted_names(function.__code__):
        yield from (source for source, _ in _resolve_dotted_name(function, names))


def cell_sources(function: FunctionType) -> Iterator[Source]:
    """Yield the sources for a function's closure variables."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield Source(cell, (Attribute(name),))


def class_names(function: FunctionType) -> Iterator[tuple[type, str]]:
    """Yield (class, attribute name) for the classes that a function names.

    A class that is called gives `__init__`.
    """
    for names in dotted_names(function.__code__):
        for source, rest in _resolve_dotted_name(function, names):
            if isinstance(cls := source.read(), type) and is_own(cls.__module__):
                yield cls, rest[0] if rest else "__init__"
    around = {source.name: source.read() for source in cell_sources(function)}
    for name, *rest in dotted_names(function.__code__, CELL) if around else ():
        # The cell `__class__` belongs to super().
        if (
            isinstance(cls := around.get(name), type)
            and name != "__class__"
            and is_own(cls.__module__)
        ):
            yield cls, rest[0] if rest else "__init__"


def assigned_globals(function: FunctionType) -> Iterator[Source]:
    """Yield the sources for the globals and module attributes that a function may assign."""
    for name in _stored_names(function.__code__, STORE_GLOBAL):
        yield Source(function.__globals__, (name,))
    stored = _stored_names(function.__code__, STORE_ATTRIBUTE)
    for source in global_sources(function) if stored else ():
        if isinstance(value := source.read(), ModuleType) and is_own(value.__name__):
            yield from (Source(value.__dict__, (attribute,)) for attribute in stored)


def assigned_cells(function: FunctionType) -> Iterator[Source]:
    """Yield the closure variables that a function assigns, and those that hold tensors.

    A function assigns one that it declares `nonlocal`.
    """
    stored = _stored_names(function.__code__, STORE_CELL)
    for source in cell_sources(function):
        if source.name in stored or isinstance(source.read(), Tensor):
            yield source


def assigned_attributes(function: FunctionType) -> tuple[str, ...]:
    """Return the attribute names that a function assigns, on any object."""
    return _stored_names(function.__code__, STORE_ATTRIBUTE)


def may_name_its_class(function: FunctionType) -> bool:
    """Return whether a function may reach an object's class.

    It does by type(self), by self.__class__, or by a class method's first argument.
    """
    return function.__code__.co_varnames[:1] == ("cls",) or not {"type", "__class__"}.isdisjoint(
        function.__code__.co_names
    )


def _resolve_dotted_name(
    function: FunctionType, names: tuple[str, ...]
) -> Iterator[tuple[Source, tuple[str, ...]]]:
    """Resolve a dotted global name.

    Yields (source, remaining names) for every module namespace on the way.
    """
    table: dict = function.__globals__
    for i, name in enumerate(names):
        if name not in table:
            return
        yield Source(table, (name,)), names[i + 1 :]
        if not isinstance(value := table[name], ModuleType) or not is_own(value.__name__):
            return
        table = value.__dict__


@functools.lru_cache(maxsize=4096)
def dotted_names(code: CodeType, action: str = GLOBAL) -> tuple[tuple[str, ...], ...]:
    """Return the dotted names that the code reads, in one order in all processes.

    action: GLOBAL, or CELL for those that begin with a closure variable.
    """
    dotted_names: dict[tuple[str, ...], None] = {}
    for body in bodies(code):
        names: tuple[str, ...] = ()
        for step in body.steps:
            if names and step.action == ATTRIBUTE:
                names += (step.name,)
            # An augmented assignment copies the object before it loads the attribute.
            elif not names or step.action != COPY:
                dotted_names[names] = None
                names = (step.name,) if step.action == action else ()
    dotted_names.pop((), None)
    return tuple(dotted_names)


@functools.lru_cache(maxsize=4096)
def _stored_names(code: CodeType, action: str) -> tuple[str, ...]:
    steps = (step for body in bodies(code) for step in body.steps)
    return tuple(dict.fromkeys(step.name for step in steps if step.action == action))


def class_values(cls: type) -> Iterator[tuple[str, object]]:
    """Yield name and value for the attributes in a class and its bases, but for library classes."""
    for base in cls.__mro__:
        if is_own(base.__module__):
            yield from base.__dict__.items()


def _methods(classes: Iterable[type]) -> dict[str, list[object]]:
    """Return the functions in all the classes' methods and properties, by name."""
    methods: dict[str, list[Any]] = {}
    for cls in dict.fromkeys(classes):
        for name, value in class_values(cls):
            if isinstance(value, _METHODS):
                methods.setdefault(name, []).append(function_in(value))
    return methods


def function_in(value: object) -> object:
    """Return a method's or property's function."""
    return (
        getattr(value, "fget", None)
        or getattr(value, "func", None)
        or getattr(value, "__func__", value)
    )


def _plain_functions(function: object) -> Iterator[FunctionType]:
    """Yield the plain Python functions inside partials, methods and wrappers."""
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        else:
            if isinstance(function, FunctionType) and is_own(function.__module__):
                yield function
            function = getattr(function, "__wrapped__", None)


def _callees(function: FunctionType, methods: dict[str, list[object]]) -> Iterator[object]:
    """Yield the objects that a function may call: globals, methods, closure variables."""
    yield from (source.read() for source in global_sources(function))
    for cls, attribute in class_names(function):
        unnamed = () if is_installed(cls.__module__) else _UNNAMED
        yield from (
            function_in(value)
            for name, value in class_values(cls)
            if isinstance(value, _METHODS) and (name == attribute or name in unnamed)
        )
    for name in _method_names(function.__code__):
        yield from methods.get(name, ())
    yield from filter(is_function, (source.read() for source in cell_sources(function)))


@functools.lru_cache(maxsize=4096)
def imports_own_modules(code: CodeType) -> bool:
    """Return whether the code imports a module that may be the user's."""
    return any(
        step.action == IMPORT and is_own(step.name) and not is_installed(step.name)
        for body in bodies(code)
        for step in body.steps
    )


@functools.lru_cache(maxsize=4096)
def _method_names(code: CodeType) -> tuple[str, ...]:
    """Return attribute names in the code that may be methods.

    They are the first argument's attributes, and others that tensors do not have.
    """
    own: dict[str, None] = {}
    for body in bodies(code):
        before = None
        for step in body.steps:
            if step.action == ATTRIBUTE and (before in body.first or step.name not in _COMMON):
                own[step.name] = None
            before = step.name if step.action in (LOCAL, CELL) else None
    return tuple(own)


def names_in_code(functions: Iterable[FunctionType]) -> set[str]:
    """Return all names and strings in the functions' code."""
    return {
        name
        for function in functions
        for body in bodies(function.__code__)
        for name in (*body.names, *body.strings)
    }


def reachable_values(function: Any) -> Iterator[object]:
    """Yield the values that a function can reach by name.

    They are closure variables, globals, a bound method's object, defaults and a partial's
    arguments.
    """
    if hasattr(function, "__wrapped__"):
        yield from reachable_values(function.__wrapped__)
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *reachable_values(function.func))
    elif isinstance(function, MethodType):
        yield from (function.__self__, *reachable_values(function.__func__))
    elif isinstance(function, FunctionType):
        class_attributes = (
            value
            for cls, attribute in class_names(function)
            for name, value in class_values(cls)
            if name == attribute
        )
        yield from (
            *(v for source in cell_sources(function) if (v := source.read()) is not ABSENT),
            *(function.__defaults__ or ()),
            *(source.read() for source in global_sources(function)),
            *class_attributes,
        )
    else:
        yield function
