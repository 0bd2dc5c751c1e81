"""Tables of what is in no dict: slots, class attributes, closure variables, context variables.

    class Model(nn.Module):
        calls = 0

    def forward(self, x):
        Model.calls += 1                                # "calls" in the table of class Model

Each holder has one table while it is referenced. The id of the table identifies it, like that of a
dict.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from types import CellType
from typing import Any
from weakref import WeakValueDictionary

from .object_trees import slots_of

Table = MutableMapping[str, Any] | list[Any]  # a dict, list or deque, or Variables


class Variables(MutableMapping[str, Any]):
    """The variables of one holder."""

    def __init__(self, holder: Any, names: tuple[str, ...]) -> None:
        self.holder, self.names = holder, names

    def __getitem__(self, name: str) -> Any:
        if (value := self.get(name, self)) is self:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if self.get(name, self) is not self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    __eq__, __hash__ = object.__eq__, object.__hash__


class Slots(Variables):
    """The attributes that the class of an object keeps in slots."""

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return object.__getattribute__(self.holder, name)
        except AttributeError:
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.holder, name, value)  # also of a frozen dataclass

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.holder, name)


class ClassVariables(Variables):
    """The attributes of a class itself, without its bases."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.holder.__dict__.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.holder.__dict__)

    def __setitem__(self, name: str, value: Any) -> None:
        type.__setattr__(self.holder, name, value)

    def __delitem__(self, name: str) -> None:
        type.__delattr__(self.holder, name)


class CellVariable(Variables):
    """The variable in a closure cell."""

    def get(self, name: str, default: Any = None) -> Any:
        return default if self.holder == CellType() else self.holder.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.holder.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.holder.cell_contents


class ContextVariable(Variables):
    """The value of a context variable."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.holder.get(default)

    def __setitem__(self, name: str, value: Any) -> None:
        self.holder.set(value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("a context variable cannot be unset")


_tables: WeakValueDictionary[int, Variables] = WeakValueDictionary()


def slot_variables(holder: Any) -> Variables:
    """Return the table of the slots of an object."""
    return _table(Slots, holder, slots_of(type(holder)))


def class_variables(cls: type) -> Variables:
    """Return the table of the attributes of a class."""
    return _table(ClassVariables, cls, ())


def cell_variable(name: str, cell: CellType) -> Variables:
    """Return the table of a closure cell."""
    return _table(CellVariable, cell, (name,))


def context_variable(name: str, variable: ContextVar) -> Variables:
    """Return the table of a context variable."""
    return _table(ContextVariable, variable, (name,))


def _table(kind: type[Variables], holder: Any, names: tuple[str, ...]) -> Variables:
    """Return the table of the holder, the same one at every call."""
    table = _tables.get(id(holder))
    if type(table) is not kind or table.holder is not holder:
        table = _tables[id(holder)] = kind(holder, names)
    return table
