"""Guards on numbers: the results of functions of a number that a trace depended on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .places import Place

Function = Callable[[Any], Any]


def identity(value: Any) -> Any:
    """Return the value."""
    return value


@dataclass(eq=False)
class Tally:
    """A number in its place, its input tensor, and the conditions that the program depends on."""

    place: Place
    value: int | float
    tensor: Tensor
    conditions: list[tuple[Function, Any]] = field(default_factory=list)

    def guard_on(self, function: Function) -> Any:
        """Return the result of the function; the program holds for numbers with this result."""
        result = function(self.value)
        if function is identity:
            self.conditions = [(function, result)]
        elif not self.conditions or self.conditions[0][0] is not identity:
            self.conditions.append((function, result))
        return result

    def to_conditions(self) -> Conditions:
        """Return the conditions as a guard."""
        return Conditions(
            type(self.value), *(zip(*self.conditions) if self.conditions else ((), ()))
        )


@dataclass(frozen=True)
class Conditions:
    """The guard on a number: results of functions of it."""

    cls: type
    functions: tuple[Function, ...]
    results: tuple

    def hold(self, value: Any) -> bool:
        """Return whether all functions of the number have the same results as in the trace."""
        if type(value) is not self.cls:
            return False
        try:
            return all(
                _is_same_number(function(value), expected)
                for function, expected in zip(self.functions, self.results)
            )
        except (ArithmeticError, ValueError):  # as forward would raise
            return False


def _is_same_number(a: Any, b: Any) -> bool:
    """Return whether two numbers agree in type and value."""
    return type(a) is type(b) and a == b
