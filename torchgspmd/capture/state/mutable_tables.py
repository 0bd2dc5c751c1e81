"""Dicts, lists and class attributes in which a program may leave tensors and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from .bytecode_names import (
    assigned_attributes,
    assigned_cells,
    assigned_globals,
    class_names,
    global_names,
    is_own,
    may_name_its_class,
    reachable_values,
)
from .guards import ABSENT, KEPT_BY_TORCH
from .object_trees import slots_of
from .places import LISTS, LONG, is_table
from .variable_tables import Table, cell_variable, class_variables, slot_variables

_MANY = 2000  # limit of tables below one module, object or table


@dataclass
class MutableTable:
    """A dict or list, and its entries before the trace."""

    container: Table
    before: dict
    last_entries: dict  # entries at the last look for mutations
    # attributes of a module or object, global variables, or a table in a closure
    root: Table
    path: tuple = ()  # keys from the root to this table
    # whether these are attributes, of which only tensors and plain values are tracked
    attributes: bool = False
    is_named: bool = False  # whether a function names the table, or the object of the attributes
    # of variables and classes: names that functions assign, and names of tensors
    names: tuple[str, ...] | None = None

    def entries(self) -> dict:
        """Return the current entries; of a list by position."""
        if self.names is None:
            return _entries(self.container)
        return {
            name: value
            for name in self.names
            if (value := self.container.get(name, ABSENT)) is not ABSENT
        }


def find_tables(
    modules: Sequence[nn.Module],
    objects: Sequence[Any],
    functions: Sequence[Any],
    called: Sequence[FunctionType],
) -> Iterator[MutableTable]:
    """Yield the tables that a program may mutate.

    They are attributes and buffers of modules and objects, and tables that functions name.
    Variables and class attributes that functions assign are tables of their own.
    """
    seen: set[int] = set()
    for holder in (*modules, *objects):
        if is_table(attributes := getattr(holder, "__dict__", None)):
            yield from _nested_tables(attributes, seen, attributes, (), True)
        if slots_of(type(holder)):
            yield from _nested_tables(
                slot_variables(holder), seen, slot_variables(holder), (), True
            )
    for module in modules:
        yield from _nested_tables(module._buffers, seen, module._buffers)
    variables = {
        id(table[name]): (table, (name,))
        for function in called
        for table, name in global_names(function)
        if is_table(table[name])
    }
    for function in (*functions, *called):
        for value in reachable_values(function):
            attributes = (
                value if isinstance(value, (dict, *LISTS)) else getattr(value, "__dict__", None)
            )
            if is_table(attributes) and not isinstance(value, (Tensor, ModuleType)):
                root, path = variables.get(id(value), (attributes, ()))
                yield from _nested_tables(
                    attributes, seen, root, path, attributes is not value, True
                )
    written: dict[int, tuple[Table, dict[str, None]]] = {}
    for function in called:
        tensors = (
            (table, name)
            for table, name in global_names(function)
            if isinstance(table[name], Tensor)
        )
        cells = ((cell_variable(name, cell), name) for name, cell in assigned_cells(function))
        for table, name in (*assigned_globals(function), *tensors, *cells):
            written.setdefault(id(table), (table, {}))[1][name] = None
    for table, name in _class_attributes((*modules, *objects), called):
        written.setdefault(id(table), (table, {}))[1][name] = None
    for table, names in written.values():
        entries = {name: table[name] for name in names if name in table}
        yield MutableTable(table, entries, entries, table, (), True, names=tuple(names))


def _class_attributes(
    holders: Sequence[Any], called: Sequence[FunctionType]
) -> Iterator[tuple[Table, str]]:
    """Yield the class attributes that functions may assign, and those that hold tensors."""
    kinds, assigned_anywhere = _bases(map(type, holders)), set()
    for function in called:
        names = assigned_attributes(function)
        assigned_anywhere.update(names)
        classes = [
            *_bases(cls for cls, _ in class_names(function)),
            *(kinds if may_name_its_class(function) else ()),
        ]
        yield from (
            (class_variables(cls), name)
            for cls in classes
            for name in names
            if not _is_descriptor(cls.__dict__.get(name))
        )
    for cls in kinds:
        yield from (
            (class_variables(cls), name)
            for name, value in cls.__dict__.items()
            if isinstance(value, Tensor) or name in assigned_anywhere and not _is_descriptor(value)
        )


def _bases(classes: Iterable[type]) -> list[type]:
    """Return the classes and their bases, but for library classes."""
    return [
        *dict.fromkeys(base for cls in classes for base in cls.__mro__ if is_own(base.__module__))
    ]


def _is_descriptor(value: Any) -> bool:
    """Return whether the value is a method, a property or another descriptor."""
    return hasattr(type(value), "__get__")


def _nested_tables(
    container: Table,
    seen: set[int],
    root: Table,
    path: tuple = (),
    attributes: bool = False,
    is_named: bool = False,
    inside: set[int] | None = None,
) -> Iterator[MutableTable]:
    """Yield a table and the tables and lists in it.

    Long tables are not searched, nor more than _MANY tables.
    """
    if id(container) in seen:
        return
    seen.add(id(container))
    entries = _entries(container)
    yield MutableTable(container, entries, entries, root, path, attributes, is_named)
    inside = set() if inside is None else inside
    for name, value in entries.items() if len(entries) <= LONG else ():
        if is_table(value) and name not in KEPT_BY_TORCH and len(inside) < _MANY:
            inside.add(id(value))
            yield from _nested_tables(value, seen, root, (*path, name), inside=inside)


def _entries(container: Table) -> dict:
    """Return the entries of a table; of a list by position."""
    return dict(enumerate(container)) if isinstance(container, LISTS) else dict(container)
