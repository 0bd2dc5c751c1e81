"""Numbers that forward only counts with (`self.calls += 1`): one program for all of them, where nothing else is done with one.

While it is traced a Count is in the place of the number. To add to it gives another Count; whatever else needs the number makes it
part of the program.
"""
from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from .state import COUNTED, Place


@dataclass(eq=False)
class Tally:
    """A number in its place, and whether the program depends on it."""
    place: Place
    value: int | float
    is_used: bool = False


@dataclass(frozen=True)
class Added:
    """What every run adds to the number in an entry, one after the other."""
    numbers: tuple[int | float, ...]

    def to(self, value: int | float) -> int | float:
        return reduce(operator.add, self.numbers, value)


class Count:
    """A tallied number to which something has been added."""
    __slots__ = ("__tally", "__added")

    def __init__(self, tally: Tally, added: tuple[int | float, ...] = ()):
        self.__tally, self.__added = tally, Added(added)

    @property
    def __class__(self) -> type:                                            # type: ignore[override]
        return type(self.__added.to(self.__tally.value))

    def __add__(self, other: Any) -> Any:
        return Count(self.__tally, (*self.__added.numbers, other)) if type(other) in COUNTED else number(self) + other

    def __sub__(self, other: Any) -> Any:
        return self + -other if type(other) in COUNTED else number(self) - other

    __radd__ = __add__

    def __reduce__(self) -> Any:
        return type(number(self)), (number(self),)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):                                           # looked for by those who ask what kind of object this is
            raise AttributeError(name)
        return getattr(number(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*numbers(args), **numbers(kwargs or {}))


def number(count: Count) -> int | float:
    """What it is; from now on the program depends on it."""
    tally = count._Count__tally
    tally.is_used = True
    return count._Count__added.to(tally.value)


def numbers(value: Any) -> Any:
    """The same with the number in the place of every Count in lists, tuples and tables."""
    if type(value) is Count:
        return number(value)
    if type(value) in (list, tuple):
        return type(value)(map(numbers, value))
    return {name: numbers(item) for name, item in value.items()} if type(value) is dict else value


def settled(value: Any, root: Any, path: tuple) -> Any:
    """What a run is to write there for what is there after the trace."""
    if type(value) is not Count:
        return numbers(value)
    tally, added = value._Count__tally, value._Count__added
    in_place = tally.place.root is root and tally.place.path == path
    return added if in_place and not tally.is_used else number(value)


def tallied(count: Count, otherwise: Any) -> Any:
    """The number, if the program depends on it."""
    return number(count) if count._Count__tally.is_used else otherwise


def _of_one(name: str) -> Any:
    def method(self: Count, *args: Any) -> Any:
        return getattr(number(self), name)(*args)
    return method


def _of_two(operation: Any, is_reflected: bool) -> Any:
    def method(self: Count, other: Any) -> Any:
        mine, other = number(self), numbers(other)
        return operation(other, mine) if is_reflected else operation(mine, other)
    return method


for _name in "bool int float complex index hash str repr format neg pos abs invert round trunc floor ceil".split():
    setattr(Count, f"__{_name}__", _of_one(f"__{_name}__"))
for _name in "eq ne lt le gt ge mul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(Count, f"__{_name}__", _of_two(getattr(operator, f"__{_name}__"), False))
for _name in "sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(Count, f"__r{_name}__", _of_two(getattr(operator, f"__{_name}__"), True))
Count.__divmod__, Count.__rdivmod__ = _of_two(divmod, False), _of_two(divmod, True)
