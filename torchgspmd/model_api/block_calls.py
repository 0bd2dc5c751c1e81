"""A loop over stacked blocks: its calls have to be a chain, since all of them run as one.

    for block in blocks:        block 0 keeps x; blocks 0 to n - 2 return a value without numbers;
        x = block(x, mask)      block n - 1 runs all blocks on x and returns the last result

A block that gets another value than its predecessor's, or other arguments than block 0, raises. So
does every operation on a value between two blocks: no program computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..capture import is_capturing
from ..compat.private_apis import DisableTorchFunction
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line
from .block_attributes import of_block

# Reads of a tensor's facts.
_FACTS = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "__len__"}


def _misused(what: str) -> ShardingError:
    return ShardingError(
        f"{what} in a loop over blocks that run as one",
        where=user_line(),
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
        """Call a block."""
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
