"""A loop over stacked blocks: its calls have to be a chain, since all of them run as one.

    for block in blocks:        block 0 keeps x; blocks 0 to n - 2 return a value without numbers;
        x = block(x, mask)      block n - 1 runs all blocks on x and returns the last result

A block that gets another value than its predecessor's raises. So does every operation on a value
between two blocks: no program computes it. Blocks may get arguments of their own (BlockArguments).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..capture import is_capturing
from ..compat.patches import setting
from ..compat.private_apis import DisableTorchFunction
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError

_PLAIN = bool, int, float, complex, str, bytes, NoneType, Enum, torch.dtype
_MISSING, UNKNOWN = object(), object()
_numbers: ContextVar[tuple[int, ...]] = ContextVar("numbers", default=())
# In a module's __dict__: attribute -> the value of each block, by the block's number.
_VALUES = "_values_of_blocks"

# Reads of a tensor's facts.
_FACTS = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "__len__"}


def misused(what: str) -> ShardingError:
    return ShardingError.here(
        f"{what} in a loop over blocks that run as one",
        why="the loop of a stack or pipeline computes `x = block(x, ...)` for all blocks at once",
        fix="put what stands between two calls into the blocks, and pass all blocks the same",
    )


class _Between(Tensor):
    """A value between two blocks, which has a shape and no numbers."""

    @staticmethod
    def like(x: Tensor) -> Tensor:
        """Return one with a tensor's shape and type."""
        return Tensor._make_wrapper_subclass(_Between, x.shape, dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _FACTS:
            with DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        raise misused(f"{getattr(func, '__name__', func)} reads a value between two blocks")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        raise misused(f"{func} reads a value between two blocks")


class SharedArguments(NamedTuple):
    """Arguments of a block, besides the previous block's result."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class EachArguments(tuple[SharedArguments, ...]):
    """The arguments of each block, as a loop over the blocks has passed them."""


class BlockCalls:
    """The calls of one loop over blocks.

    count: the blocks. run_all: runs all blocks, on a value and EachArguments. run_one: runs the
    block with a number.
    """

    def __init__(
        self, count: int, run_all: Callable[..., Any], run_one: Callable[..., Any]
    ) -> None:
        self.count, self.run_all, self.run_one = count, run_all, run_one
        self.first: Any = None
        self.arguments: list[SharedArguments] = []
        self.between: list[tuple[list[Any], Any]] = []

    def call(self, number: int, x: object, *args: object, **kwargs: object) -> Any:
        if not is_capturing():
            return self.run_one(number, x, *args, **kwargs)
        taken = pytree.tree_flatten(x)
        if not number:
            self.first, self.between = x, []
        elif len(self.between) < number or not _are_same(taken, self.between[number - 1]):
            raise misused(f"block {number} does not get the result of block {number - 1}")
        self.arguments[number:] = [SharedArguments(args, kwargs)]
        if number == self.count - 1:
            return self.run_all(self.first, EachArguments(self.arguments))
        leaves = [_Between.like(x) if isinstance(x, Tensor) else x for x in taken[0]]
        # A recomputed call has its value already.
        self.between[number:] = [(leaves, taken[1])]
        return pytree.tree_unflatten(leaves, taken[1])


class BlockPlace(nn.Module):
    """A block in a loop. Its attributes are those of the block that stands for all."""

    def __init__(self, block: nn.Module, calls: BlockCalls, number: int) -> None:
        super().__init__()
        # No submodule: a loop adds no modules to the model.
        vars(self).update(_block=block, _calls=calls, _number=number)
        self.training = block.training

    def __getattr__(self, name: str) -> Any:
        with of_blocks(vars(self)["_number"]):
            return getattr(vars(self)["_block"], name)

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        return self._calls.call(self._number, x, *args, **kwargs)


def _are_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    """Return whether two flat trees have the same tensors, and equal other leaves."""
    return one[1] == other[1] and all(map(is_same, one[0], other[0]))


def is_same(one: object, other: object) -> bool:
    """Return whether two leaves are one tensor, or equal other values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one is other or bool(one == other)


# blocks[0].layer_idx = 0; blocks[1].layer_idx = 1    ->    block.layer_idx: 0, 1
# A loop over the blocks and eager code read each block's own value. In a program for several
# blocks a read raises, unless these have one value.
def of_blocks(*numbers: int) -> AbstractContextManager[tuple[int, ...]]:
    """Give differing attributes the value that the blocks with these numbers have."""
    return setting(_numbers, numbers)


def differing_attributes(blocks: Sequence[nn.Module]) -> dict[str, dict[str, list[Any]]]:
    """Return the numbers and texts in which like blocks differ: by module, attribute and block."""
    named = [dict(each.named_modules()) for each in blocks]
    found = {name: _differing([each[name] for each in named]) for name in named[0]}
    return {name: differing for name, differing in found.items() if differing}


def separate(block: nn.Module, blocks: Mapping[int, nn.Module], what: str) -> None:
    """Give a block, which stands for others, the numbers and texts in which they differ.

    blocks: these, by number. what: the name of the module that runs them.
    """
    for name, differing in differing_attributes([*blocks.values()]).items():
        module = block.get_submodule(name)
        for key in differing:
            vars(module).pop(key, None)
        vars(module)[_VALUES] = {key: dict(zip(blocks, each)) for key, each in differing.items()}
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
        first, *others = map(comparable, values)
        # Others may be unequal objects that behave alike.
        if any(each != first for each in others if UNKNOWN not in (each, first)):
            found[key] = values
    return found


def comparable(value: object) -> object:
    """Return a key that tells plain values and functions apart; UNKNOWN for other objects."""
    if value is _MISSING or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return value.__module__, value.__qualname__
    if isinstance(value, (tuple, list)):
        parts = [*map(comparable, value)]
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        parts = [(key, comparable(each)) for key, each in value.items()]
    else:
        return UNKNOWN
    return type(value), parts


class _Differing:
    """Reads the attribute of the block that runs; raises in a program for all blocks."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        self.key = path.rpartition(".")[2]

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        values: dict[int, Any] = vars(module)[_VALUES][self.key]
        asked = [values[number] for number in _numbers.get()] or [*values.values()]
        if is_capturing() and any(comparable(v) != comparable(asked[0]) for v in asked):
            shown = ("none" if v is _MISSING else repr(v) for v in values.values())
            different = [*dict.fromkeys(shown)]
            raise ShardingError.here(
                f"the blocks of a {self.what} read {self.path}, which differs: "
                f"{', '.join(different[:4])}{', ...' * (len(different) > 4)}",
                why="blocks at one place of their groups run one program",
                fix="make it a parameter or an argument, set it alike in all blocks, or leave out "
                "what reads it, such as a cache (use_cache=False)",
            )
        if (value := asked[0]) is _MISSING:
            raise AttributeError(self.key)
        return value

    def __set__(self, module: nn.Module, value: object) -> None:
        # All blocks have it from now on, as an attribute like others.
        watching = type(module)
        rest = {k: v for k, v in vars(watching).items() if isinstance(v, _Differing)}
        del rest[self.key], vars(module)[_VALUES][self.key]
        _watch(module, watching.__bases__[0], rest)
        vars(module)[self.key] = value
