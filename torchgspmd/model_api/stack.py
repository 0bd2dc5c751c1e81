"""stack: like blocks in place of a loop over a ModuleList, as a loop of the program.

The weights of all blocks are stacked. An iteration takes its row of them, so the program does not
grow with the number of blocks, and neither does the time to plan it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..capture import is_capturing
from ..capture.rewrites.loop_trace import run_loop
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line
from ..features.loops.recomputed_loops import recomputed
from .row_arguments import SharedArguments
from .stacked_blocks import StackedBlocks


def stack(blocks: Iterable[nn.Module], *, recompute: bool = False) -> nn.Module:
    """Return a module that computes `for block in blocks: x = block(x)`, as a loop of the program.

    Planning takes the same time whatever the number of blocks. On one device the module is that
    loop of Python. Its state_dict has the names of nn.ModuleList(blocks).

    Args:
        blocks: Modules with the same parameters and code. Each takes the result of the one before:
            a tensor, or tuples, lists and dicts of tensors. Marks on the weights of the first one
            hold for all.
        recompute: Whether the backward computes each block again, so that only values between
            blocks are kept.

    Returns:
        A module that is called with x, and with further arguments that all blocks get as they are
        (a mask, tables of rotary positions).

    Raises:
        ShardingError: The blocks differ, or a block returns another shape than it takes.

    Example:
        >>> import torch
        >>> from torchgspmd import Mesh, plan
        >>> model = stack(torch.nn.Linear(8, 8) for _ in range(64))
        >>> program = plan(model, torch.ones(16, 8), mesh=Mesh(data=4)).program
        >>> len(program.graph.nodes) < 32
        True
    """
    return Stack([*blocks], recompute)


class Stack(StackedBlocks):
    """Module of stack(). A parameter of its `block` is [blocks, ...]."""

    def __init__(self, blocks: list[nn.Module], recompute: bool) -> None:
        super().__init__(blocks, "stack", range(len(blocks)), len(blocks))
        self.recompute = recompute

    def extra_repr(self) -> str:
        return f"{self.count} blocks"

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        """Return the result of the last block."""
        shared = SharedArguments(args, kwargs)
        if not is_capturing():
            return self.one_by_one(x, shared)
        leaves, tree = pytree.tree_flatten(x)
        weights = self.weights()

        def block(row: dict[str, Tensor], *leaves: Tensor) -> list[Tensor]:
            y = self.run(self.block, row, pytree.tree_unflatten(leaves, tree), shared)
            results, other = pytree.tree_flatten(y)
            _check(leaves, tree, results, other)
            return results

        def body(*inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            row = dict(zip(weights, inputs[len(leaves) :]))
            carry = inputs[: len(leaves)]
            if self.recompute:
                return [*recomputed(block, row, *carry)], []
            return block(row, *carry), []

        last, _ = run_loop(body, leaves, [*weights.values()], self.count)
        return pytree.tree_unflatten(last, tree)


def _check(taken: Any, tree: object, returned: list[Tensor], other: object) -> None:
    """Raise unless a block returns a value that the next one can take in its place."""
    before = [(tuple(x.shape), x.dtype) for x in taken]
    after = [(tuple(x.shape), x.dtype) for x in returned]
    if tree != other or before != after:
        raise ShardingError(
            f"a block of a stack takes {_text(before)} and returns {_text(after)}",
            where=user_line(),
            why="all blocks are one program, so each takes what it returns",
            fix="leave out of the stack what changes the shape, the dtype or the structure",
        )


def _text(values: list[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{[*shape]}" for shape, dtype in values)
