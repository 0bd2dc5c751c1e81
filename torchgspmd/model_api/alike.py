"""Whether attributes of two blocks behave alike, so that one program may read either.

0.1                           0.2                        no
lambda x: x * k               the same, with another k   no: a function has a closure
Config(width=8)               another Config(width=8)    yes: equal in all that pickle keeps
the block's own module "up"   the other block's "up"     yes: its attributes are compared too
a lock                        another lock               no: nothing tells
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

_PLAIN = bool, int, float, complex, str, bytes, type, CodeType
Own = Mapping[int, str]  # the names of what a block consists of, by id


def own_names(block: nn.Module) -> Own:
    """Return the names of a block's modules, parameters and buffers, by id."""
    named = *block.named_modules(), *block.named_parameters(), *block.named_buffers()
    return {id(each): name for name, each in named}


def numbered(values: Iterable[Any], same: Callable[[Any, Any], bool]) -> list[int]:
    """Number values, the same ones alike, in the order of their first."""
    firsts: list[Any] = []
    numbers: list[int] = []
    for value in values:
        number = next((i for i, first in enumerate(firsts) if same(first, value)), len(firsts))
        firsts += [value] * (number == len(firsts))
        numbers.append(number)
    return numbers


def numbers_of(values: Sequence[Any], owns: Sequence[Own]) -> list[int]:
    """Number the values of blocks, those that behave alike by one number."""
    return numbered(range(len(values)), lambda i, j: Alike(owns[i], owns[j])(values[i], values[j]))


class Alike:
    """Compares a value of one block with a value of another."""

    def __init__(self, one: Own, other: Own) -> None:
        self.one, self.other = one, other
        # Values under comparison may refer to themselves. They are kept, so no id comes twice.
        self.seen: dict[tuple[int, int], tuple[object, object]] = {}

    def __call__(self, one: Any, other: Any) -> bool:
        """Return whether two values behave alike. False if nothing tells."""
        if id(one) in self.one or id(other) in self.other:
            return self.one.get(id(one)) == self.other.get(id(other))
        if one is other and not isinstance(one, (FunctionType, MethodType, tuple, list, dict)):
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, _PLAIN):
            return bool(one == other)
        if (id(one), id(other)) in self.seen:
            return True
        self.seen[id(one), id(other)] = one, other
        if isinstance(one, Tensor):
            return _are_equal(one, other)
        if isinstance(one, (tuple, list)):
            return self._all(one, other)
        if isinstance(one, dict):
            return self._all(one, other) and self._all(one.values(), other.values())
        if isinstance(one, FunctionType):
            kept = keeps_own(one, self.one) or keeps_own(other, self.other)
            return not kept and self._all(_of_function(one), _of_function(other))
        return _says_equal(one, other) or self._all(_state(one), _state(other))

    def _all(self, one: Iterable[Any] | None, other: Iterable[Any] | None) -> bool:
        if one is None or other is None:
            return False
        values, others = [*one], [*other]
        return len(values) == len(others) and all(map(self, values, others))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if type(one) not in (Tensor, nn.Parameter) or one.shape != other.shape:
        return False
    kinds = (one.dtype, one.device) == (other.dtype, other.device)
    return kinds and (one.is_meta or torch.equal(one, other))


def _says_equal(one: Any, other: Any) -> bool:
    try:
        return type(one).__eq__ is not object.__eq__ and bool(one == other)
    except Exception:  # such as an array's, which has no truth value
        return False


def _of_function(function: FunctionType) -> list[Any]:
    defaults = function.__defaults__, function.__kwdefaults__, vars(function)
    return [function.__code__, function.__module__, *defaults, *_closure(function)]


def _closure(function: FunctionType) -> Iterator[Any]:
    """Yield the values of the variables that a function reads from around it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None


def keeps_own(value: object, own: Own) -> bool:
    """Return whether a function's closure has a part of the block. No copy of the block owns it."""
    return isinstance(value, FunctionType) and any(
        id(each) in own or id(getattr(each, "__self__", None)) in own for each in _closure(value)
    )


def _state(value: Any) -> list[Any] | None:
    """Return the state that pickle keeps of an object. None if it refuses the object."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, BuiltinFunctionType):
        return [value.__qualname__, value.__self__]
    if isinstance(value, ref):
        return [value()]
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # of any class, if pickle refuses it
        return None
    # Behind the third, parts iterate over a list's and a dict's items.
    parts = (reduced,) if isinstance(reduced, str) else reduced
    return [[*part] if i > 2 and part is not None else part for i, part in enumerate(parts)]
