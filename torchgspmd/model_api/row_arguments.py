"""Arguments that all blocks get: as they are, or the rows of a microbatch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, did_you_mean


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
