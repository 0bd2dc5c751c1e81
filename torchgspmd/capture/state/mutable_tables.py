"""Dicts, lists and class attributes in which a program may leave tensors and plain values."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import count, islice
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from .bytecode_names import (
    assigned_attributes,
    assigned_cells,
    assigned_globals,
    class_names,
    global_sources,
    is_own,
    may_name_its_class,
    reachable_values,
)
from .guards import KEPT_BY_TORCH, snapshot, snapshot_components
from .recorder import Reach
from .source import (
    ABSENT,
    LISTS,
    LONG,
    Attribute,
    Source,
    Step,
    attributes,
    attributes_of,
    component,
    is_table,
    slots_of,
    step_name,
)
from .state_inputs import TensorInput

# A logger caches the levels for which it is enabled, which is no program state.
_NO_STATE = (Tensor, ModuleType, logging.Filterer, logging.LoggerAdapter)
_MANY = 2000  # most tables below one module, object or table


class MutableTable:
    """The entries in a dict or list, or an object's attributes, now and before.

    before: before the trace. initial: with the trace's stand-ins. last: at the last look for
    mutations. steps: for variables and classes, the steps that functions assign or that hold
    tensors.
    """

    before: dict[Step, Any]
    initial: dict[Step, Any]
    last: dict[Step, Any]

    def __init__(
        self,
        source: Source,
        container: Any,
        are_attributes: bool = False,
        is_named: bool = False,
        steps: tuple[Step, ...] | None = None,
    ) -> None:
        """Take the entries.

        are_attributes: whether these are attributes or variables; only their tensors and plain
        values are tracked. is_named: whether a function names the table, or the object.
        """
        self.source, self.container, self.are_attributes = source, container, are_attributes
        self.is_named, self.steps = is_named, steps
        self.before = self.initial = self.last = self.entries()

    def entries(self) -> dict[Step, Any]:
        """Return the current entries by their steps."""
        if self.steps is not None:
            return {
                step: value
                for step in self.steps
                if (value := component(self.container, step)) is not ABSENT
            }
        if not self.are_attributes:
            is_list = isinstance(self.container, LISTS)
            return dict(enumerate(self.container) if is_list else self.container)
        entries = attributes(self.container)
        # torch's own tables, such as parameters and hooks, have other guards.
        if isinstance(self.container, nn.Module):
            return {step: v for step, v in entries.items() if step.name not in KEPT_BY_TORCH}
        return entries

    def snapshot(self) -> object:
        """Return a snapshot of the entries for `matches` to compare with."""
        return (snapshot_components if self.are_attributes else snapshot)(self.container)


def find_tables(
    modules: Sequence[nn.Module],
    objects: Sequence[Any],
    functions: Sequence[Any],
    called: Sequence[FunctionType],
) -> Iterator[MutableTable]:
    """Yield the tables that a program may mutate.

    They are attributes and buffers in modules and objects, and tables that functions name.
    Variables and class attributes that functions assign are tables of their own.
    """
    seen: set[int] = set()
    # First, so that the tensors of a module in a plain list have their own names.
    for each in objects:
        for table in (each._parameters, each._buffers) if isinstance(each, nn.Module) else ():
            yield from _nested_tables(table, seen, Source(table))
    for holder in (*modules, *objects):
        if attributes_of(holder) is not None or slots_of(type(holder)):
            yield from _nested_tables(holder, seen, Source(holder), True)
    for module in modules:
        yield from _nested_tables(module._buffers, seen, Source(module._buffers))
    variables = {
        id(value): source
        for function in called
        for source in global_sources(function)
        if is_table(value := source.read())
    }
    for function in (*functions, *called):
        for value in reachable_values(function):
            is_container = isinstance(value, (dict, *LISTS))
            if (
                is_table(value) if is_container else attributes_of(value) is not None
            ) and not isinstance(value, _NO_STATE):
                # A variable's source names the global in messages; a bare table has no name.
                source = variables.get(id(value), Source(value))
                yield from _nested_tables(value, seen, source, not is_container, True)
    assigned: dict[Source, dict[Step, None]] = {}
    sources = [*_assigned_variables(called), *_class_attributes((*modules, *objects), called)]
    for source in sources:
        assigned.setdefault(Source(source.root), {})[source.steps[0]] = None
    for source, steps in assigned.items():
        yield MutableTable(source, source.root, True, steps=tuple(steps))


def tables_of(reach: Reach) -> list[MutableTable]:
    return [*find_tables(reach.modules, reach.objects, reach.functions, reach.called)]


def places_of(
    ids: Container[int], tables: Iterable[MutableTable], modules: Iterable[nn.Module]
) -> Iterator[tuple[Source, Tensor]]:
    """Yield the places in tables, and in tuples there, that hold tensors with these ids.

    modules: those whose own tables are left out.
    """
    own = {id(module._buffers) for module in modules}
    for table in tables:
        for step, value in table.before.items() if id(table.container) not in own else ():
            if isinstance(value, (Tensor, tuple)):
                for source, leaf in table.source.at(step).leaves():
                    if isinstance(leaf, Tensor) and id(leaf) in ids:
                        yield source, leaf


def names_of(fn: object, inputs: Sequence[TensorInput]) -> list[str]:
    """Return the names of a program's state inputs, each another: gradients have them, too."""
    modules = dict(fn.named_modules()) if isinstance(fn, nn.Module) and inputs else {}
    known = {*map(id, modules.values())}
    prefixes = {id(module): f"{name}." for name, module in modules.items() if name}
    for path, module in modules.items():
        for source, value in Source(module.__dict__).leaves() if module.__dict__ else ():
            # Modules in plain lists and dicts.
            if isinstance(value, nn.Module) and id(value) not in known:
                path_of_it = f"{path}.{source.name}".lstrip(".")
                for name, each in value.named_modules(prefix=path_of_it):
                    prefixes |= {id(t): f"{name}." for t in (each._parameters, each._buffers)}
    names: dict[str, None] = {}
    for each in inputs:
        name = prefixes.get(id(each.source.root), "") + each.name
        others = (f"{name}_{i}" for i in count(2))
        names[next(x for x in (name, *islice(others, len(names))) if x not in names)] = None
    return [*names]


def _assigned_variables(called: Sequence[FunctionType]) -> Iterator[Source]:
    """Yield the variables that functions may assign, and those that hold tensors."""
    for function in called:
        yield from assigned_globals(function)
        yield from (s for s in global_sources(function) if isinstance(s.read(), Tensor))
        yield from assigned_cells(function)


def _class_attributes(holders: Sequence[Any], called: Sequence[FunctionType]) -> Iterator[Source]:
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
            Source(cls, (Attribute(name),))
            for cls in classes
            for name in names
            if not _is_descriptor(cls.__dict__.get(name))
        )
    for cls in kinds:
        yield from (
            Source(cls, (Attribute(name),))
            for name, value in cls.__dict__.items()
            if isinstance(value, Tensor) or name in assigned_anywhere and not _is_descriptor(value)
        )


def _bases(classes: Iterable[type]) -> list[type]:
    """Return the classes and their bases, but for library classes."""
    return [
        *dict.fromkeys(base for cls in classes for base in cls.__mro__ if is_own(base.__module__))
    ]


def _is_descriptor(value: Any) -> bool:
    return hasattr(type(value), "__get__")


def _nested_tables(
    container: Any,
    seen: set[int],
    source: Source,
    are_attributes: bool = False,
    is_named: bool = False,
    inside: set[int] | None = None,
) -> Iterator[MutableTable]:
    """Yield a table and the tables and lists in it.

    Long tables are not searched, nor more than _MANY tables.
    """
    if id(container) in seen:
        return
    seen.add(id(container))
    table = MutableTable(source, container, are_attributes, is_named)
    yield table
    inside = set() if inside is None else inside
    for step, value in table.before.items() if len(table.before) <= LONG else ():
        if is_table(value) and step_name(step) not in KEPT_BY_TORCH and len(inside) < _MANY:
            inside.add(id(value))
            yield from _nested_tables(value, seen, source.at(step), inside=inside)
