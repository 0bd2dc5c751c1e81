"""Symbolic numbers: one program for a number that changes from call to call.

    self.calls += 1                     every run adds 1 to the attribute
    if self.calls % 10 == 0:            a condition: a guard on the outcome
        y = y * self.tau                an input
    z = F.dropout(y, self.rate)         specialized: a guard on the number itself

During a trace a SymbolicNumber is in the place of such a number. Arithmetic on it gives another
one. Beside a tensor it is a tensor without dimensions, which is an input of the program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat.private_apis import _pytree as pytree
from .source import Source
from .state_inputs import COUNTED, Function, NumberInput, identity

_EXACT = 2.0**53  # doubles represent smaller integers exactly
_MANY = 64  # limit of operations; a longer expression is specialized
# operations with the same result on tensors
_TENSORS = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.neg,
    operator.truediv,
    operator.pow,
)
# A sum of 64 integers below 2 ** 53 fits into 64 bits.
_SUMS = (operator.add, operator.sub)
_BESIDE_TENSORS = {
    getattr(of, f"{name}{end}")
    for of, ends in ((torch, ("",)), (Tensor, ("", "_")))
    for end in ends
    for name in "add sub rsub mul div true_divide gt ge lt le".split()
    if hasattr(of, f"{name}{end}")
} | {
    getattr(Tensor, f"__{name}__")
    for name in "add radd iadd sub rsub isub mul rmul imul gt ge lt le".split()
    + "truediv rtruediv itruediv".split()
}


@dataclass(eq=False)
class BackwardNumber:
    """The number of a source in the backward, if forward has changed it."""

    source: Source
    value: int | float
    symbol: SymbolicNumber

    @property
    def traced(self) -> Tensor:
        """Return the number as a value of the program."""
        return _to_tensor(self.symbol)

    def guard_on(self, function: Function) -> Any:
        """Return the result of the function, and guard on it."""
        return _guard_on(self.symbol, function)


@dataclass(frozen=True)
class Computed:
    """A number that every run computes from sources."""

    now: Callable[[], int | float]


class SymbolicNumber:
    """A function of the number of a source, such as `self.calls % 10`.

    expression: the operation and operands that computed it. A function of several numbers has no
    number.
    """

    __slots__ = ("__number", "__function", "__value", "__expression", "__size")

    def __init__(
        self,
        number: NumberInput | BackwardNumber | None,
        function: Function = identity,
        expression: tuple = (),
        value: int | float | None = None,
    ) -> None:
        self.__number, self.__function, self.__expression = number, function, expression
        self.__value = value if number is None else function(number.value)
        # number of operations, each as often as it is computed
        self.__size = sum(1 + o.__size for o in expression if type(o) is SymbolicNumber)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.__value)

    def __reduce__(self) -> Any:
        return type(self.__value), (specialize(self),)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a probe for the protocols of the object
            raise AttributeError(name)
        return getattr(specialize(self), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _BESIDE_TENSORS and len(args) == 2:
            args = tuple(
                _tensor_operand(a, b) if type(a) is SymbolicNumber and isinstance(b, Tensor) else a
                for a, b in zip(args, args[::-1])
            )
        return func(*specialize_tree(args), **specialize_tree(kwargs or {}))


def _guard_on(symbol: SymbolicNumber, function: Function) -> Any:
    """Return a function of the number, and guard on the result."""
    if symbol._SymbolicNumber__number is None:
        return function(specialize(symbol))
    before = symbol._SymbolicNumber__function
    return symbol._SymbolicNumber__number.guard_on(lambda value: function(before(value)))


def specialize(symbol: SymbolicNumber) -> int | float:
    """Return the value of a symbolic number, and guard on it."""
    if symbol._SymbolicNumber__number is None:
        operation, *operands = symbol._SymbolicNumber__expression
        return operation(*specialize_tree(operands))
    return symbol._SymbolicNumber__number.guard_on(symbol._SymbolicNumber__function)


def specialize_tree(value: Any) -> Any:
    """Return the tree with the value in place of every symbolic number."""
    return pytree.tree_map(
        lambda leaf: specialize(leaf) if type(leaf) is SymbolicNumber else leaf, value
    )


def to_computed(value: Any) -> Any:
    """Return the tree with Computed in place of every symbolic number."""
    return pytree.tree_map(
        lambda leaf: Computed(_evaluator(leaf)) if type(leaf) is SymbolicNumber else leaf, value
    )


def source_of(value: Any) -> Source | None:
    """Return the source that a symbolic number is a function of; None for anything else."""
    number = number_of(value) if type(value) is SymbolicNumber else None
    return number and number.source


def _evaluator(symbol: SymbolicNumber) -> Callable[[], Any]:
    """Return a function that computes the number from the current state."""
    number, function = symbol._SymbolicNumber__number, symbol._SymbolicNumber__function
    if number is not None:
        return lambda: function(number.source.read())
    operation, *operands = (
        _evaluator(o) if type(o) is SymbolicNumber else o
        for o in symbol._SymbolicNumber__expression
    )
    return lambda: operation(*(o() if callable(o) else o for o in operands))


def at_backward(symbol: SymbolicNumber, source: Source) -> SymbolicNumber:
    """Return the symbolic number of a source from the end of forward on."""
    return (
        symbol
        if number_of(symbol) is not None and symbol._SymbolicNumber__function is identity
        else SymbolicNumber(BackwardNumber(source, symbol._SymbolicNumber__value, symbol))
    )


def number_of(symbol: SymbolicNumber) -> NumberInput | BackwardNumber | None:
    """Return what a symbolic number is a function of; None for a function of several numbers."""
    return symbol._SymbolicNumber__number


def _compute(operation: Callable, *operands: Any) -> Any:
    """Apply an operation to symbolic numbers.

    A result of several numbers that cannot be computed with tensors is specialized.
    """
    if any(isinstance(o, Tensor) for o in operands):
        return NotImplemented  # the method of the tensor runs
    if any(type(o) not in (SymbolicNumber, *COUNTED) for o in operands):
        return operation(*specialize_tree(operands))
    numbers = {number_of(o) for o in operands if type(o) is SymbolicNumber}
    number = numbers.pop()
    if numbers or number is None:
        size = sum(o._SymbolicNumber__size for o in operands if type(o) is SymbolicNumber)
        value = operation(
            *(o._SymbolicNumber__value if type(o) is SymbolicNumber else o for o in operands)
        )
        if size >= _MANY or operation not in (_TENSORS if type(value) is float else _SUMS):
            return operation(*specialize_tree(operands))
        return SymbolicNumber(None, expression=(operation, *operands), value=value)
    if (shorter := _merge_additions(operation, *operands)) is not None:
        return shorter
    functions = [
        o._SymbolicNumber__function if type(o) is SymbolicNumber else lambda value, o=o: o
        for o in operands
    ]
    result = SymbolicNumber(
        number,
        lambda value: operation(*(function(value) for function in functions)),
        (operation, *operands),
    )
    return (
        result
        if type(result._SymbolicNumber__value) in COUNTED and result._SymbolicNumber__size < _MANY
        else specialize(result)
    )


def _merge_additions(operation: Callable, one: Any, other: Any = None) -> Any:
    """Merge the addition of an integer to a sum with an integer, as in a loop that counts.

    Return None for anything else.
    """
    symbol, addend = (
        (other, one) if operation is operator.add and type(one) is int else (one, other)
    )
    if (
        operation not in (operator.add, operator.sub)
        or type(symbol) is not SymbolicNumber
        or type(addend) is not int
        or not symbol._SymbolicNumber__expression
    ):
        return None
    before, first, *rest = symbol._SymbolicNumber__expression
    if (
        before is not operator.add
        or type(first) is not SymbolicNumber
        or [type(r) for r in rest] != [int]
        or type(first._SymbolicNumber__value) is not int
    ):
        return None
    return _compute(operator.add, first, operation(rest[0], addend))


def _to_tensor(symbol: SymbolicNumber) -> Tensor | None:
    """Return the number as a value of the program; None if tensors cannot compute it."""
    number, value, expression = (
        symbol._SymbolicNumber__number,
        symbol._SymbolicNumber__value,
        symbol._SymbolicNumber__expression,
    )
    if type(value) is int and number is not None and not _guard_on(symbol, _is_exact):
        return None  # it may not fit into a tensor
    if not expression:
        return number.traced
    operation, *operands = expression
    if operation not in _TENSORS or type(value) is int and operation is operator.pow:
        return None
    tensors = [_to_tensor(o) if type(o) is SymbolicNumber else o for o in operands]
    if any(t is None for t in tensors):
        return None
    if type(value) is float:
        tensors = [t.double() if isinstance(t, Tensor) else float(t) for t in tensors]
    return operation(*tensors)


def _is_exact(value: int) -> bool:
    """Return whether a double represents the integer exactly."""
    return abs(value) < _EXACT


def _tensor_operand(symbol: SymbolicNumber, other: Tensor) -> Any:
    """Return the operand of an operation with a tensor.

    The result has the type of the tensor. Where PyTorch promotes the type, the number is
    specialized.
    """
    is_float = other.is_floating_point() or other.is_complex()
    if (
        not is_float
        and (type(symbol._SymbolicNumber__value) is float or not other.dim())
        or (tensor := _to_tensor(symbol)) is None
    ):
        return specialize(symbol)
    return tensor if other.dim() else tensor.to(other.dtype)


def _guarding_method(function: Function) -> Any:
    """Return a method that guards on the result of a function."""
    return lambda self, *args: _guard_on(self, lambda value: function(value, *args))


def _arithmetic_method(operation: Callable, is_reflected: bool) -> Any:
    """Return a method that applies a binary operation."""
    return lambda self, other: (
        _compute(operation, other, self) if is_reflected else _compute(operation, self, other)
    )


def _comparison_method(operation: Callable) -> Any:
    """Return a method that guards on the outcome of a comparison."""

    def method(self: SymbolicNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        other = specialize_tree(other)
        return (
            _guard_on(self, lambda value: operation(value, other))
            if type(other) in COUNTED
            else operation(specialize(self), other)
        )

    return method


for _name, _function in dict(
    bool=bool,
    int=int,
    float=float,
    complex=complex,
    index=operator.index,
    str=str,
    repr=repr,
    format=format,
    round=round,
    trunc=math.trunc,
    floor=math.floor,
    ceil=math.ceil,
    divmod=divmod,
).items():
    setattr(SymbolicNumber, f"__{_name}__", _guarding_method(_function))
for _name in "eq ne lt le gt ge".split():
    setattr(SymbolicNumber, f"__{_name}__", _comparison_method(getattr(operator, _name)))
for _name in "neg pos abs invert".split():
    setattr(
        SymbolicNumber,
        f"__{_name}__",
        lambda self, operation=getattr(operator, _name): _compute(operation, self),
    )
for _name in "add sub mul truediv floordiv mod pow and_ or_ xor lshift rshift".split():
    setattr(
        SymbolicNumber,
        f"__{_name.strip('_')}__",
        _arithmetic_method(getattr(operator, _name), False),
    )
    setattr(
        SymbolicNumber,
        f"__r{_name.strip('_')}__",
        _arithmetic_method(getattr(operator, _name), True),
    )
SymbolicNumber.__hash__ = lambda self: hash(specialize(self))
SymbolicNumber.__rdivmod__ = lambda self, other: _guard_on(self, lambda value: divmod(other, value))
