"""A loop over stacked blocks: its calls have to be a chain, since all of them run as one.

    for block in blocks:        block 0 keeps x; blocks 0 to n - 2 return a value without numbers;
        x = block(x, mask)      block n - 1 runs all blocks on x and returns the last result

A block that gets another value than its predecessor's, or other arguments than block 0, raises. So
does every operation on a value between two blocks: no program computes it.
"""

from __future__ import annotations

import inspect
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
from ..errors import ShardingError, did_you_mean

_PLAIN = bool, int, float, complex, str, bytes, NoneType, Enum, torch.dtype
_MISSING, _UNKNOWN = object(), object()
_number: ContextVar[int | None] = ContextVar("number", default=None)
_VALUES = "_values_of_blocks"  # in a module's __dict__: attribute -> the value of each block

# Reads of a tensor's facts.
_FACTS = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "__len__"}


def _misused(what: str) -> ShardingError:
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
        raise _misused(f"{getattr(func, '__name__', func)} reads a value between two blocks")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        raise _misused(f"{func} reads a value between two blocks")


class BlockCalls:
    """The calls of one loop over blocks.

    count: the blocks. run_all: runs all blocks. run_one: runs the block with a number.
    """

    def __init__(
        self, count: int, run_all: Callable[..., Any], run_one: Callable[..., Any]
    ) -> None:
        self.count, self.run_all, self.run_one = count, run_all, run_one
        self.first: Any = None
        self.arguments: tuple[list[Any], Any] = [], None
        self.between: list[tuple[list[Any], Any]] = []

    def call(self, number: int, x: object, *args: object, **kwargs: object) -> Any:
        if not is_capturing():
            return self.run_one(number, x, *args, **kwargs)
        taken, arguments = pytree.tree_flatten(x), pytree.tree_flatten((args, kwargs))
        if not number:
            self.first, self.arguments, self.between = x, arguments, []
        elif len(self.between) < number or not _are_same(taken, self.between[number - 1]):
            raise _misused(f"block {number} does not get the result of block {number - 1}")
        elif not _are_same(arguments, self.arguments):
            raise _misused(f"block {number} gets other arguments than block 0")
        if number == self.count - 1:
            return self.run_all(self.first, *args, **kwargs)
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
        with of_block(vars(self)["_number"]):
            return getattr(vars(self)["_block"], name)

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        return self._calls.call(self._number, x, *args, **kwargs)


def _are_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    """Return whether two flat trees have the same tensors, and equal other leaves."""
    return one[1] == other[1] and all(
        a is b or not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
        for a, b in zip(one[0], other[0])
    )


# blocks[0].layer_idx = 0; blocks[1].layer_idx = 1    ->    block.layer_idx: 0, 1
# A loop over the blocks and eager code read each block's own value. One program for all
# blocks has no value for it, so a read raises there.
def of_block(number: int) -> AbstractContextManager[int | None]:
    """Give differing attributes the values that the block with a number has."""
    return setting(_number, number)


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
            raise ShardingError.here(
                f"the blocks of a {self.what} read {self.path}, which differs: "
                f"{', '.join(values[:4])}{', ...' * (len(values) > 4)}",
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


class SharedArguments(NamedTuple):
    """Arguments that all blocks get, besides the previous block's result."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class RowArguments:
    """Arguments that all blocks get; some have a row for each batch row.

    tensors: the latter, [batch, ...].
    """

    def __init__(
        self, shared: SharedArguments, block: nn.Module, names: Sequence[str] | None, batch: int
    ) -> None:
        """Take a call's arguments.

        Args:
            shared: The arguments.
            block: A block, whose forward names the positional arguments.
            names: Names for the arguments that have such rows; None: there are none.
            batch: Number of batch rows.
        """
        leaves, self.tree = pytree.tree_flatten(tuple(shared))
        self.leaves = leaves
        of_leaves = _names(shared, block)
        if unknown := set(names or ()) - {*of_leaves, *inspect.signature(block.forward).parameters}:
            raise ShardingError.here(
                f"rows of a pipeline names an argument '{min(unknown)}', which its blocks lack",
                fix=did_you_mean(min(unknown), dict.fromkeys(of_leaves)),
            )
        self.places: list[int] = []
        for i, (name, leaf) in enumerate(zip(of_leaves, leaves)):
            # A size other than the batch's cannot be divided with it: all stages get such a tensor.
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch:
                continue
            if names is None:
                raise ShardingError.here(
                    f"argument '{name}' of a pipeline has {batch} rows, as many as the batch",
                    why="a stage computes on a part of the batch",
                    fix=f"pass rows=('{name}',), which gives it the same part of the argument, "
                    "or rows=(), which gives all",
                )
            self.places += [i] * (name in names)

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments with a row for each batch row."""
        return [self.leaves[i] for i in self.places]

    def without_gradient(self) -> list[Tensor]:
        """Return `tensors`; raise ShardingError if one needs a gradient."""
        if any(x.requires_grad for x in self.tensors):
            raise ShardingError.here(
                "an argument of a pipeline with a loss has rows of the batch and needs a gradient",
                why="its gradient would be a sum over the stages of what they computed when",
                fix="let it pass from block to block: self.blocks((x, argument))",
            )
        return self.tensors

    def with_rows(self, rows: Sequence[Tensor]) -> SharedArguments:
        """Return the arguments with a microbatch's rows instead of the batch's."""
        leaves = list(self.leaves)
        for i, x in zip(self.places, rows):
            leaves[i] = x
        return SharedArguments(*pytree.tree_unflatten(leaves, self.tree))


def _names(shared: SharedArguments, block: nn.Module) -> list[str]:
    """Name the argument that each leaf belongs to."""
    parameters = [*inspect.signature(block.forward).parameters][1:]
    # Arguments that *args take have no names: their numbers stand for them.
    parameters += [f"{i + 1}" for i in range(len(parameters), len(shared.args))]
    named = [*zip(parameters, shared.args), *shared.kwargs.items()]
    return [name for name, value in named for _ in pytree.tree_leaves(value)]
