"""int(), float(), len(), max() and min() on numbers that only a run knows.

Python's own need a number now. If a trace fails because of one, the next trace replaces them, as
below, in the calling module's namespace.

    torch.arange(int(lengths.max()))        lengths.max().item()
    min(n, 8)                               torch.sym_min(n, 8)
    max(1, mask.sum())                      torch.maximum(torch.tensor(1), mask.sum())
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_NUMBERS = (torch.SymInt, torch.SymFloat)
Namespace = dict[str, Any]


class _NumberType(type):
    """The type of the replacements for int and float, which otherwise behave as these."""

    plain: type
    symbolic: type
    convert: Callable[[Any], Any]

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        value = args[0].item() if len(args) == 1 and isinstance(args[0], Tensor) else None
        value = args[0] if value is None and args else value
        if isinstance(value, _NUMBERS) and len(args) == 1:
            return cls.convert(value)
        return cls.plain(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.plain, cls.symbolic))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.plain)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.plain

    def __hash__(cls) -> int:
        return hash(cls.plain)

    def __or__(cls, other: object) -> object:
        return cls.plain | other

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)


NUMBER_TYPE = _NumberType.__name__


class _Int(metaclass=_NumberType):
    plain = int
    symbolic = torch.SymInt
    convert = staticmethod(torch.sym_int)


class _Float(metaclass=_NumberType):
    plain = float
    symbolic = torch.SymFloat
    convert = staticmethod(torch.sym_float)


def _extremum(plain: Callable, symbolic: Callable, of_tensors: Callable) -> Callable:
    """Wrap max or min, to take symbolic numbers as well, and tensors that are numbers."""

    def extremum(*args: object, **kwargs: object) -> object:
        # An iterator can be read once, and its values are looked at three times.
        values = list(args[0]) if len(args) == 1 and isinstance(args[0], Iterable) else list(args)
        if not kwargs and any(isinstance(value, Tensor) for value in values):
            return functools.reduce(of_tensors, map(torch.as_tensor, values))
        if not kwargs and any(isinstance(value, _NUMBERS) for value in values):
            return functools.reduce(symbolic, values)
        return plain(*args, **kwargs) if len(args) > 1 else plain(values, **kwargs)

    return extremum


def _length(value: Any) -> int:
    """Return len(value), which is the row count for tensors."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else builtins.len(value)


REPLACEMENTS: dict[str, Any] = {
    "len": _length,
    "int": _Int,
    "float": _Float,
    "max": _extremum(builtins.max, torch.sym_max, torch.maximum),
    "min": _extremum(builtins.min, torch.sym_min, torch.minimum),
}


def namespace_of(frame: TracebackType | None) -> Namespace | None:
    """Return a frame's namespace if its code names a function that has a replacement."""
    if frame is None or REPLACEMENTS.keys().isdisjoint(frame.tb_frame.f_code.co_names):
        return None
    return frame.tb_frame.f_globals


@contextmanager
def replaced(namespaces: Iterable[Namespace]) -> Iterator[None]:
    """Put the replacements into namespaces that have no variable with their name."""
    # A module's variables hide builtins, so adding and removing these suffices.
    added = [(space, name) for space in namespaces for name in REPLACEMENTS.keys() - space.keys()]
    try:
        for space, name in added:
            space[name] = REPLACEMENTS[name]
        yield
    finally:
        for space, name in added:
            space.pop(name, None)
