"""What is in no dict, as tables: slots of an object, attributes of a class, a variable around a
function or of a context.

    class Model(nn.Module):
        calls = 0

        def forward(self, x):
            Model.calls += 1                                # "calls" in the table of class Model

There is one table of each for as long as somebody holds it: its id stands for it as that of a dict
does.
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
    """Those of one holder."""

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
    """Attributes of an object that its class keeps in slots."""

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
    """Attributes of a class itself, not of those that it inherits from."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.holder.__dict__.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.holder.__dict__)

    def __setitem__(self, name: str, value: Any) -> None:
        type.__setattr__(self.holder, name, value)

    def __delitem__(self, name: str) -> None:
        type.__delattr__(self.holder, name)


class CellVariable(Variables):
    """The variable in a cell."""

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
    return _table(Slots, holder, slots_of(type(holder)))


def class_variables(cls: type) -> Variables:
    return _table(ClassVariables, cls, ())


def cell_variable(name: str, cell: CellType) -> Variables:
    return _table(CellVariable, cell, (name,))


def context_variable(name: str, variable: ContextVar) -> Variables:
    return _table(ContextVariable, variable, (name,))


def _table(kind: type[Variables], holder: Any, names: tuple[str, ...]) -> Variables:
    table = _tables.get(id(holder))
    if type(table) is not kind or table.holder is not holder:
        table = _tables[id(holder)] = kind(holder, names)
    return table
