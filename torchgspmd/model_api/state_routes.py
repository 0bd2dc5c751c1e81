"""How the state follows from a block: the values that pass from block to block.

state 0: x [rows, m]                    Route((2, RouteChoice((1, 3)), RouteColumn(1)))
state 1: total [], once for each row    x is the block's result 2; total is result 1 or 3; the
state 2: kept [rows, columns, ...]      last is a column of results 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .between_blocks import BlockWork, Origin, PickedRow


@dataclass(frozen=True)
class StateLeaf:
    """Stands in a block's arguments for a leaf of the state."""

    number: int


@dataclass(frozen=True)
class RouteChoice:
    """Numbers of a block's results, and None for the value before: a tensor [] says which."""

    options: tuple[int | None, ...]

    def follow(self, x: Tensor, values: Sequence[Any], choice: Tensor) -> Tensor:
        first, *others = (x if i is None else values[i] for i in self.options)
        for number, value in enumerate(others, 1):
            first = torch.where(choice == number, value, first)
        return first


@dataclass(frozen=True)
class RouteColumn:
    """The number of a block's result, which a tensor keeps as one of its columns, or as none."""

    result: int

    def follow(self, x: Tensor, values: Sequence[Any], choice: Tensor) -> Tensor:
        value = values[self.result]
        if value.shape != (x.shape[0], *x.shape[2:]):
            raise ShardingError.here(
                f"a value of {[*value.shape]} is read behind a loop over blocks, and has "
                f"{[*x.shape[2:]]} for each of {x.shape[0]} rows",
                why="a microbatch has a part of the rows of dimension 0, or all of the value",
                fix="return it with another first dimension: value[None]",
            )
        return torch.where(choice.view(-1, *[1] * (value.dim() - 1)), value.unsqueeze(1), x)


@dataclass(frozen=True)
class Route:
    """results: for each leaf of the state the block's result that follows; None: it stays.

    lifted: leaves that have no batch rows. The state has them once for each row.
    """

    results: tuple[int | RouteChoice | RouteColumn | None, ...]
    lifted: frozenset[int] = frozenset()

    def arguments(self, state: Sequence[Tensor], *arguments: object) -> Any:
        """Return the arguments of a block for a state."""
        values = [x[0] if i in self.lifted else x for i, x in enumerate(state)]
        filled = pytree.tree_map_only(StateLeaf, lambda slot: values[slot.number], arguments)
        return PickedRow.all_values(filled)

    def after(self, state: Sequence[Tensor], values: Sequence[Any], choices: Any = ()) -> list[Any]:
        """Return the state behind a block with these results."""
        remaining, found = iter(choices), list[Any]()
        for i, (x, result) in enumerate(zip(state, self.results)):
            if result is None:
                found.append(x)
                continue
            if isinstance(result, int):
                value = values[result]
                value = value.expand(len(x), *value.shape) if i in self.lifted else value
            else:
                lifted = values
                if i in self.lifted:
                    lifted = [
                        v.expand(len(x), *v.shape) if isinstance(v, Tensor) else v for v in values
                    ]
                value = result.follow(x, lifted, next(remaining))
            found.append(value)
        return found


class FinalPlace(NamedTuple):
    """Where the last state has a value: a leaf, and its column."""

    leaf: int
    column: int | None
    is_lifted: bool

    def read(self, state: Sequence[Tensor]) -> Tensor:
        x = state[self.leaf]
        x = x if self.column is None else x.select(1, self.column)
        # Without batch rows it is the mean over the microbatches, as a loss.
        return (
            x.mean(0) if self.is_lifted and x.is_floating_point() else x[0] if self.is_lifted else x
        )


class SharedArguments(NamedTuple):
    """Arguments of a block, besides the previous block's result.

    route: None for `x = block(x, ...)`. Else the arguments are all, with a StateLeaf for each value
    that passes from block to block. works: what the block's program computes behind the block.
    choices: tensors by which the route chooses. has_called_hooks: the block's hooks, for its call.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    route: Route | None = None
    works: tuple[BlockWork, ...] = ()
    choices: tuple[Tensor, ...] = ()
    has_called_hooks: bool = False


class EachArguments(tuple[SharedArguments, ...]):
    """The arguments of each block, as a loop over the blocks has passed them.

    filled: blocks that get a value which they would compute alike.
    """

    filled: frozenset[int] = frozenset()


@dataclass
class StateColumns:
    """Values of one kind, as columns of a leaf of the state: [rows, columns, ...].

    like: such a value. leaf: the number in the state. is_lifted: whether they have no batch rows.
    """

    like: Tensor
    leaf: int
    is_lifted: bool
    rows: int
    origins: list[Origin] = field(default_factory=list[Origin])

    @property
    def start(self) -> Tensor:
        rows = (self.rows, *self.like.shape) if self.is_lifted else self.like.shape
        return self.like.new_zeros((rows[0], len(self.origins), *rows[1:]))


def is_same(one: object, other: object) -> bool:
    """Return whether two leaves are one tensor, or equal other values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one is other or bool(one == other)


def check_alike(what: str, taken: Any, returned: Any) -> None:
    """Raise unless a block returns a value that the next one can take in its place."""
    before, tree = pytree.tree_flatten(taken)
    after, other = pytree.tree_flatten(returned)
    if all(x is None for x in before):  # the first block makes the value
        return
    if tree != other or _text(before) != _text(after):
        raise ShardingError.here(
            f"a block of a {what} takes {_text(before)} and returns {_text(after)}",
            why="all blocks are one program: their value keeps its shape, dtype and structure",
            fix=f"leave out of the {what} what changes shape, dtype or structure; set param_dtype= "
            "in place of torch.autocast",
        )


def _text(leaves: Sequence[Any]) -> str:
    """Return the dtypes and sizes of leaves."""
    texts = [
        f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" if isinstance(x, Tensor) else repr(x)
        for x in leaves
    ]
    return ", ".join(texts)
