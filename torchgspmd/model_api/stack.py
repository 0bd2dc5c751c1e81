"""stack: like blocks as one loop in the program, in place of a loop over a ModuleList.

The weights of all blocks are stacked, and an iteration takes its row. So neither the program nor
the time to plan it grows with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..capture import is_capturing
from ..capture.rewrites.loop_trace import run_loop
from ..compat.private_apis import _pytree as pytree
from .row_arguments import SharedArguments
from .stacked_blocks import StackedBlocks, check_alike


def stack(blocks: Iterable[nn.Module], *, recompute: bool = False) -> nn.Module:
    """Return a module that computes `for block in blocks: x = block(x)` as one loop.

    Planning takes the same time for any number of blocks. On one device the module is that Python
    loop. Its state_dict has the names that nn.ModuleList(blocks) has.

    Args:
        blocks: Modules with the same parameters and code. Each takes the previous one's result: a
            tensor, or tuples, lists and dicts of tensors. Marks on the first one's weights hold for
            all.
        recompute: Whether the backward computes each block again, so that only values between
            blocks are kept.

    Returns:
        A module that is called with x, and with further arguments that all blocks get as they are
        (a mask, rotary tables).

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
    """Module from stack(). A parameter of its `block` is [blocks, ...]."""

    def __init__(self, blocks: list[nn.Module], recompute: bool) -> None:
        super().__init__(blocks, "stack", range(len(blocks)), len(blocks))
        self.recompute = recompute

    def extra_repr(self) -> str:
        return f"{self.count} blocks"

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        """Return the last block's result."""
        shared = SharedArguments(args, kwargs)
        if not is_capturing():
            return self.one_by_one(x, shared)
        leaves, tree = pytree.tree_flatten(x)
        weights = self.weights()

        def block(row: dict[str, Tensor], *leaves: Tensor) -> list[Tensor]:
            y = self.run(self.block, row, pytree.tree_unflatten(leaves, tree), shared)
            results, other = pytree.tree_flatten(y)
            # Checked in the trace, since a loop's carry has one shape in all iterations.
            check_alike("stack", leaves, tree, results, other)
            return results

        def body(*inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            # run_loop passes the carry first, then this iteration's row of each weight.
            row = dict(zip(weights, inputs[len(leaves) :]))
            carry = inputs[: len(leaves)]
            if self.recompute:
                return [*checkpoint(block, row, *carry, use_reentrant=False)], []
            return block(row, *carry), []

        last, _ = run_loop(body, leaves, [*weights.values()], self.count)
        return pytree.tree_unflatten(last, tree)
