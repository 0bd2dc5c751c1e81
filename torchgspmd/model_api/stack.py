"""stack: like blocks as one loop, in place of a loop over a ModuleList."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..capture import is_capturing
from ..compat.private_apis import _pytree as pytree
from .block_arguments import BlockArguments
from .block_groups import (
    GroupPlace,
    find_repeats,
    groups_of,
    kinds_of,
    places_of,
    raise_unlike,
    rows_of_places,
    run_places,
    stacks_of,
)
from .stacked_blocks import StackedBlocks, check_blocks
from .state_routes import SharedArguments


def stack(blocks: Iterable[nn.Module], *, recompute: bool = False) -> nn.Module:
    """Return a module that computes `for block in blocks: x = block(x)` as one loop.

    Planning takes the same time for any number of blocks. On one device the module is that Python
    loop. Its state_dict has the names that nn.ModuleList(blocks) has.

    Args:
        blocks: Modules with the same parameters and code, or groups of such modules that repeat:
            the loop has one iteration for each group then. Each takes the previous one's result: a
            tensor, or tuples, lists and dicts of tensors. Marks on the first one's weights hold for
            all that are like it.
        recompute: Whether the backward computes each block again, so that only values between
            blocks are kept.

    Returns:
        A module that is called with x, and with further arguments that all blocks get as they are
        (a mask, rotary tables).

    Raises:
        ShardingError: No group of blocks repeats, or a block returns another shape than it takes.

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
        check_blocks(blocks, "stack")
        stacks = stacks_of(blocks)
        if len(blocks) > 1 and not find_repeats(stacks).saved:
            raise_unlike(blocks, "stack")
        rows = [stacks.count(stack) for stack in dict.fromkeys(stacks)]
        places = [stacks[:layer].count(stack) for layer, stack in enumerate(stacks)]
        kinds = kinds_of(blocks, stacks)
        # Kinds that repeat in no group are left to the program: it may read none of their values.
        kinds = kinds if find_repeats(kinds).saved else stacks
        super().__init__(blocks, "stack", stacks, places, rows)
        self.recompute, self.kinds = recompute, tuple(kinds)

    def kinds_of_blocks(self) -> Sequence[Hashable]:
        return [*zip(self.stacks, self.kinds)]

    def extra_repr(self) -> str:
        return f"{self.count} blocks"

    def run_all(self, x: object, arguments: Sequence[SharedArguments]) -> Any:
        if not is_capturing():
            return self.one_by_one(x, arguments)
        leaves, tree = pytree.tree_flatten(x)
        own = BlockArguments(arguments)
        slots = [[number] for number in range(self.count)]
        repeats = groups_of(self.kinds, slots, own)
        if self.count > 1 and not repeats.saved:
            own.of(range(self.count))  # raises, since their arguments alone can differ so
        places = places_of(repeats, slots, self.stacks, own)
        rows = rows_of_places(places, repeats, self.weights())
        inputs = [
            (row, [torch.stack(x) for x in p.arguments.own.values()])
            for p, row in zip(places, rows)
        ]

        def step(place: GroupPlace, row: Any, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
            weights, mine = row
            block = partial(self.run_flat, tree, place.numbers, place.arguments.filled(mine, {}))
            if self.recompute:
                return checkpoint(block, weights, *leaves, use_reentrant=False)
            return block(weights, *leaves)

        return pytree.tree_unflatten([*run_places(repeats, places, inputs, leaves, step)], tree)
