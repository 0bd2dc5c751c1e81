"""Attributes that differ between blocks that run as one, such as transformers' `layer_idx`.

blocks[0].layer_idx = 0; blocks[1].layer_idx = 1    ->    block.layer_idx: 0, 1

A loop over the blocks and eager code read each block's own value. One program for all blocks has no
value for it, so a read raises there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import nn

from ..capture import is_capturing
from ..errors import ShardingError, user_line

_PLAIN = bool, int, float, complex, str, bytes, NoneType, Enum, torch.dtype
_MISSING, _UNKNOWN = object(), object()
_number: ContextVar[int | None] = ContextVar("number", default=None)
_VALUES = "_values_of_blocks"  # in a module's __dict__: attribute -> the value of each block


@contextmanager
def of_block(number: int) -> Iterator[None]:
    """Give differing attributes the values that the block with a number has."""
    token = _number.set(number)
    try:
        yield
    finally:
        _number.reset(token)


def separate(block: nn.Module, blocks: Sequence[nn.Module], what: str) -> None:
    """Give a block, which stands for all, the numbers and texts in which they differ.

    what: the name of the module that runs them as one.
    """
    named = [dict(each.named_modules()) for each in blocks]
    for name, module in block.named_modules():
        differing = _differing([each[name] for each in named])
        if not differing:
            continue
        for key in differing:
            vars(module).pop(key, None)
        vars(module)[_VALUES] = differing
        paths = {key: f"{name}.{key}".lstrip(".") for key in differing}
        _watch(module, type(module), {key: _Differing(path, what) for key, path in paths.items()})


def _watch(module: nn.Module, kind: Any, attributes: Mapping[str, _Differing]) -> None:
    """Give a module a class of its own, as torch's fully_shard does: it watches attributes."""
    names = {**attributes, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), names) if attributes else kind


def _differing(modules: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Return the attributes in which modules differ, with the value of each."""
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for module in modules for key in vars(module)):
        values = [vars(module).get(key, _MISSING) for module in modules]
        first, *others = map(_comparable, values)
        # Others may be unequal objects that behave alike.
        if any(each != first for each in others if _UNKNOWN not in (each, first)):
            found[key] = values
    return found


def _comparable(value: object) -> object:
    """Return a key that tells plain values and functions apart; _UNKNOWN for other objects."""
    if value is _MISSING or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return value.__module__, value.__qualname__
    if isinstance(value, (tuple, list)):
        parts = [*map(_comparable, value)]
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        parts = [(key, _comparable(each)) for key, each in value.items()]
    else:
        return _UNKNOWN
    return type(value), parts


class _Differing:
    """Reads the attribute of the block that runs; raises in a program for all blocks."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        self.key = path.rpartition(".")[2]

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        values, number = vars(module)[_VALUES][self.key], _number.get()
        if number is None and is_capturing():
            values = [*dict.fromkeys("none" if v is _MISSING else repr(v) for v in values)]
            raise ShardingError(
                f"the blocks of a {self.what} read {self.path}, which differs: "
                f"{', '.join(values[:4])}{', ...' * (len(values) > 4)}",
                where=user_line(),
                why="all blocks run one program, which has no number of a block",
                fix="make it a parameter or an argument, set it alike in all blocks, or leave out "
                "what reads it, such as a cache (use_cache=False)",
            )
        if (value := values[number or 0]) is _MISSING:
            raise AttributeError(self.key)
        return value

    def __set__(self, module: nn.Module, value: object) -> None:
        # All blocks have it from now on, as an attribute like others.
        watching = type(module)
        rest = {k: v for k, v in vars(watching).items() if isinstance(v, _Differing)}
        del rest[self.key], vars(module)[_VALUES][self.key]
        _watch(module, watching.__bases__[0], rest)
        vars(module)[self.key] = value
