"""Symbolic numbers: one program for a number that changes from call to call.

    self.calls += 1                     every run adds 1 to the attribute
    if self.calls % 10 == 0:            a condition: a guard on the outcome
        y = y * self.tau                an input
    z = F.dropout(y, self.rate)         specialized: a guard on the number itself

During a trace a SymbolicNumber stands for such a number. Arithmetic on it gives another one. Beside
a tensor it is a 0-d tensor, which is a program input.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ...compat.private_apis import _pytree as pytree
from .source import Source
from .state_inputs import COUNTED, Conditions, Function, NumberInput, identity

_EXACT = 2.0**53  # doubles represent smaller integers exactly
_MANY = 64  # most operations; a longer expression is specialized


def _of_numbers_and_tensors(plain: Callable, of_tensors: Callable) -> Callable:
    """Return a function of Python's floats, which computes the same on tensors."""

    def function(*operands: Any) -> Any:
        is_traced = any(isinstance(o, Tensor) for o in operands)
        return (of_tensors if is_traced else plain)(*operands)

    return function


MATH = {  # math's functions by name
    name: _of_numbers_and_tensors(getattr(math, name), getattr(torch, name))
    for name in "cos erf exp expm1 log log10 log1p log2 pow sin sqrt tanh".split()
}
# operations with the same result on tensors
_TENSORS = (
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.truediv, operator.pow),
    *MATH.values(),
)
# A sum of 64 integers below 2 ** 53 fits into 64 bits.
_SUMS = (operator.add, operator.sub)


def _overloads(names: str) -> set[Any]:
    """Return torch's functions with these names, and the methods, in place too."""
    ways = (torch, ""), (Tensor, ""), (Tensor, "_")
    return {getattr(of, name + end, None) for name in names.split() for of, end in ways} - {None}


_BESIDE_TENSORS = _overloads("add sub rsub mul div true_divide pow gt ge lt le") | {
    getattr(Tensor, f"__{name}__")
    for name in "add radd iadd sub rsub isub mul rmul imul pow rpow gt ge lt le".split()
    + "truediv rtruediv itruediv".split()
}
_OPERANDS = _overloads("clamp clip lerp")  # x.clamp(min=number): their numbers may be tensors
# x.add_(y, alpha=number), x.addcdiv_(y, z, value=number): (keyword, sum, how a term is computed)
_FACTORS = {
    getattr(of, f"{name}{end}"): (keyword, getattr(of, f"{total}{end}"), combine)
    for of, end in ((torch, ""), (Tensor, ""), (Tensor, "_"))
    for name, keyword, total, combine in (
        ("add", "alpha", "add", None),
        ("sub", "alpha", "sub", None),
        ("addcmul", "value", "add", operator.mul),
        ("addcdiv", "value", "add", operator.truediv),
    )
}


@dataclass(eq=False)
class BackwardNumber:
    """A source's number in the backward, if forward has changed it."""

    source: Source
    value: int | float
    symbol: SymbolicNumber

    @property
    def traced(self) -> Tensor | None:
        """Return the number as a value in the program."""
        return _to_tensor(self.symbol)

    def guard_on(self, function: Function) -> Any:
        return of(self.symbol).guard_on(function)


@dataclass(frozen=True)
class Computed:
    """A number that every run computes from sources."""

    now: Callable[[], int | float]


@dataclass(frozen=True, eq=False)
class Expression:
    """How a number is computed: by a function on one source's number, or on several numbers."""

    number: NumberInput | BackwardNumber | None  # None: from several numbers
    value: int | float
    function: Function = identity
    operation: tuple = ()  # the operation and the operands that computed it
    size: int = field(init=False)  # operations, each as often as it is computed

    def __post_init__(self) -> None:
        size = sum(1 + of(o).size for o in self.operation if type(o) is SymbolicNumber)
        object.__setattr__(self, "size", size)

    def guard_on(self, function: Function) -> Any:
        if self.number is None:
            return function(self.specialize())
        return self.number.guard_on(lambda number: function(self.function(number)))

    def specialize(self) -> int | float:
        if self.number is not None:
            return self.number.guard_on(self.function)
        operation, *operands = self.operation
        return operation(*specialize_tree(operands))


class SymbolicNumber:
    """A number that is a function on sources' numbers, such as `self.calls % 10`."""

    __slots__ = ("__of",)

    def __init__(self, expression: Expression) -> None:
        self.__of = expression

    @property
    def __class__(self) -> type:  # type: ignore[override]
        # isinstance() then sees the number's own type.
        return type(self.__of.value)

    def __reduce__(self) -> object:
        return type(self.__of.value), (self.__of.specialize(),)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a probe for the object's protocols
            raise AttributeError(name)
        return getattr(self.__of.specialize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _BESIDE_TENSORS and len(args) == 2:
            args = tuple(
                _tensor_operand(a, b) if type(a) is SymbolicNumber and isinstance(b, Tensor) else a
                for a, b in zip(args, args[::-1])
            )
        row, named = _FACTORS.get(func), kwargs or {}
        if func in _OPERANDS and isinstance(args[0], Tensor):
            args, named = _with_tensors(args[0], (args, named))
        if row is not None and type(named.get(row[0])) is SymbolicNumber:
            keyword, total, combine = row
            x, *terms = args
            term = terms[0] if combine is None else combine(*terms)
            return total(x, term * named[keyword])
        return func(*specialize_tree(args), **specialize_tree(named))


def of(symbol: SymbolicNumber) -> Expression:
    """Return how a symbolic number is computed."""
    return symbol._SymbolicNumber__of


def specialize_tree(value: object) -> Any:
    """Return the tree with the value in place of every symbolic number."""
    return pytree.tree_map(
        lambda leaf: of(leaf).specialize() if type(leaf) is SymbolicNumber else leaf, value
    )


def to_computed(value: object) -> Any:
    """Return the tree with Computed in place of every symbolic number."""
    return pytree.tree_map(
        lambda leaf: Computed(_evaluator(leaf)) if type(leaf) is SymbolicNumber else leaf, value
    )


def conditions_of(symbol: SymbolicNumber) -> Conditions | None:
    """Return the predicate on the number that a symbolic number stands for."""
    number = of(symbol).number
    return number.to_conditions() if isinstance(number, NumberInput) else None


def source_of(value: object) -> Source | None:
    """Return the source behind a symbolic number's function; None for anything else."""
    number = of(value).number if type(value) is SymbolicNumber else None
    return number and number.source


def _evaluator(symbol: SymbolicNumber) -> Callable[[], Any]:
    """Return a function that computes the number from the current state."""
    number, function = of(symbol).number, of(symbol).function
    if number is not None:
        return lambda: function(number.source.read())
    operation, *operands = (
        _evaluator(o) if type(o) is SymbolicNumber else o for o in of(symbol).operation
    )
    return lambda: operation(*(o() if callable(o) else o for o in operands))


def at_backward(symbol: SymbolicNumber, source: Source) -> SymbolicNumber:
    """Return a source's symbolic number from the end of forward on."""
    if of(symbol).number is not None and of(symbol).function is identity:
        return symbol
    return symbolic(BackwardNumber(source, of(symbol).value, symbol))


def with_symbols(name: str) -> Callable[[Callable], Callable]:
    """Return how to wrap a function of math: it computes with symbolic numbers, too."""

    def wrap(before: Callable) -> Callable:
        @functools.wraps(before)
        def function(*operands: object) -> Any:
            has_symbols = any(type(o) is SymbolicNumber for o in operands)
            return _compute(MATH[name], *operands) if has_symbols else before(*operands)

        return function

    return wrap


def symbolic(number: NumberInput | BackwardNumber) -> SymbolicNumber:
    return SymbolicNumber(Expression(number, number.value))


def _compute(operation: Callable, *operands: object) -> Any:
    """Apply an operation to symbolic numbers.

    A result from several numbers that tensors cannot compute is specialized.
    """
    if any(isinstance(o, Tensor) for o in operands):
        return NotImplemented  # the tensor's method runs
    if any(type(o) not in (SymbolicNumber, *COUNTED) for o in operands):
        return operation(*specialize_tree(operands))
    if (shorter := _merge_additions(operation, *operands)) is not None:
        return shorter
    numbers = {of(o).number for o in operands if type(o) is SymbolicNumber}
    number = numbers.pop() if len(numbers) == 1 else None
    values = [of(o).value if type(o) is SymbolicNumber else o for o in operands]
    functions = [
        of(o).function if type(o) is SymbolicNumber else lambda value, o=o: o for o in operands
    ]

    def function(value: object) -> Any:
        return operation(*(function(value) for function in functions))

    value = operation(*values)
    result = Expression(number, value, function, (operation, *operands))
    is_computable = (
        operation in (_TENSORS if type(value) is float else _SUMS)
        if number is None
        else type(value) in COUNTED
    )
    is_symbolic = is_computable and result.size < _MANY
    return SymbolicNumber(result) if is_symbolic else result.specialize()


def _merge_additions(operation: Callable, one: object, other: object = None) -> Any:
    """Merge adding an integer into a sum with an integer, as in a loop that counts.

    Return None for anything else.
    """
    symbol, addend = (
        (other, one) if operation is operator.add and type(one) is int else (one, other)
    )
    if operation not in _SUMS or type(symbol) is not SymbolicNumber or type(addend) is not int:
        return None
    if of(symbol).number is None or not of(symbol).operation:
        return None
    before, first, *rest = of(symbol).operation
    if (
        before is not operator.add
        or type(first) is not SymbolicNumber
        or [type(r) for r in rest] != [int]
        or type(of(first).value) is not int
    ):
        return None
    return _compute(operator.add, first, operation(rest[0], addend))


def _to_tensor(symbol: SymbolicNumber) -> Tensor | None:
    """Return the number as a value in the program; None if tensors cannot compute it."""
    number, value = of(symbol).number, of(symbol).value
    if type(value) is int and number is not None and not of(symbol).guard_on(_is_exact):
        return None  # it may not fit into a tensor
    if not of(symbol).operation:
        return number.traced if number is not None else None
    operation, *operands = of(symbol).operation
    if operation not in _TENSORS or type(value) is int and operation is operator.pow:
        return None
    tensors: list[Any] = [_to_tensor(o) if type(o) is SymbolicNumber else o for o in operands]
    if any(t is None for t in tensors):
        return None
    if type(value) is float:
        # Python's floats are doubles, so the program's arithmetic is, too.
        tensors = [t.double() if isinstance(t, Tensor) else float(t) for t in tensors]
    return operation(*tensors)


def _is_exact(value: int) -> bool:
    return abs(value) < _EXACT


def _tensor_operand(symbol: SymbolicNumber, other: Tensor) -> object:
    """Return the operand for an operation with a tensor.

    The result has the tensor's type. Where PyTorch promotes the type, the number is specialized.
    """
    is_float = other.is_floating_point() or other.is_complex()
    if (
        not is_float
        and (type(of(symbol).value) is float or not other.dim())
        or (tensor := _to_tensor(symbol)) is None
    ):
        return of(symbol).specialize()
    return tensor if other.dim() else tensor.to(other.dtype)


def _with_tensors(x: Tensor, operands: Any) -> Any:
    """Return operands of a tensor's method with tensors in place of all numbers, or of none."""
    leaves, form = pytree.tree_flatten(operands)
    leaves = [_tensor_operand(o, x) if type(o) is SymbolicNumber else o for o in leaves]
    if any(isinstance(o, Tensor) and not o.dim() for o in leaves[1:]):
        new = partial(torch.scalar_tensor, dtype=x.dtype, device=x.device)
        leaves = [new(o) if type(o) in COUNTED else o for o in leaves]
    return pytree.tree_unflatten(leaves, form)


def _guarding_method(function: Callable[..., object]) -> Any:
    return lambda self, *args: of(self).guard_on(lambda value: function(value, *args))


def _arithmetic_method(operation: Callable, is_reflected: bool) -> Any:
    return lambda self, other: (
        _compute(operation, other, self) if is_reflected else _compute(operation, self, other)
    )


def _comparison_method(operation: Callable) -> Any:
    """Return a method that guards on a comparison's outcome."""

    def method(self: SymbolicNumber, other: object) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        other = specialize_tree(other)
        return (
            of(self).guard_on(lambda value: operation(value, other))
            if type(other) in COUNTED
            else operation(of(self).specialize(), other)
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
    for _prefix in "", "r":
        _method = _arithmetic_method(getattr(operator, _name), bool(_prefix))
        setattr(SymbolicNumber, f"__{_prefix}{_name.strip('_')}__", _method)
SymbolicNumber.__hash__ = lambda self: hash(of(self).specialize())
cast(Any, SymbolicNumber).__rdivmod__ = lambda self, other: of(self).guard_on(
    lambda value: divmod(other, value)
)
