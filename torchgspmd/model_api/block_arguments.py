"""Arguments of the blocks in a loop: which all share, and which each block has for itself."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, did_you_mean
from .alike import numbered
from .between_blocks import PickedRow, misused
from .state_routes import SharedArguments, is_same


class BlockArguments:
    """The arguments of all blocks. Some tensors have a row for each batch row.

    row_tensors: the latter, [batch, ...].
    """

    def __init__(self, each: Sequence[SharedArguments]) -> None:
        """Take the arguments of each block."""
        self.leaves: list[list[Any]] = []
        self.trees: list[Any] = []
        known: dict[int, tuple[list[Any], Any]] = {}
        for arguments in each:
            if id(arguments) not in known:
                known[id(arguments)] = pytree.tree_flatten(tuple(arguments))
            leaves, tree = known[id(arguments)]
            self.leaves.append(leaves)
            self.trees.append(tree)
        self.each, self.row_tensors = each, dict[int, Tensor]()

    def divide_rows(
        self,
        block: nn.Module,
        names: Sequence[str] | None,
        batch: int,
        kinds: Sequence[Hashable] = (),
    ) -> None:
        """Find the tensors that have a row for each batch row.

        Args:
            block: A block, whose forward names the positional arguments.
            names: Names for the arguments that have such rows; None: there are none.
            batch: Number of batch rows.
            kinds: Of the blocks. Those of one kind may have different rows.
        """
        found: list[str] = []
        for leaves, shared in {id(a): (x, a) for x, a in zip(self.leaves, self.each)}.values():
            of_leaves = _names(shared, block)
            found += of_leaves
            for name, leaf in zip(of_leaves, leaves):
                # Another size cannot be divided: all stages get such a tensor. Bloom's alibi has a
                # row for each batch row and head.
                if not isinstance(leaf, Tensor) or not leaf.dim():
                    continue
                if leaf.shape[0] != batch and (name not in (names or ()) or leaf.shape[0] % batch):
                    continue
                if names is None:
                    raise ShardingError.here(
                        f"argument '{name}' of a pipeline has {batch} rows, as many as the batch",
                        why="a stage computes on a part of the batch",
                        fix=f"pass rows=('{name}',), which gives it the same part of the argument, "
                        "or rows=(), which gives all",
                    )
                if name in names:
                    self.row_tensors[id(leaf)] = leaf
            of_works = (each for work in shared.works for each in zip(work.rows, work.inputs))
            self.row_tensors |= {
                id(leaf): leaf for rows, leaf in of_works if rows and isinstance(leaf, Tensor)
            }
        for kind in dict.fromkeys(kinds):
            self._pick_rows([i for i, each in enumerate(kinds) if each == kind])
        if unknown := set(names or ()) - {*found, *inspect.signature(block.forward).parameters}:
            raise ShardingError.here(
                f"rows of a pipeline names an argument '{min(unknown)}', which its blocks lack",
                fix=did_you_mean(min(unknown), dict.fromkeys(found)),
            )

    def _pick_rows(self, blocks: Sequence[int]) -> None:
        """Give blocks one tensor, where each has other rows, and the number of its column."""
        first = blocks[0]
        if any(self.trees[block] != self.trees[first] for block in blocks):
            return
        picked: dict[int, list[PickedRow]] = {}
        for i, leaf in enumerate(self.leaves[first]):
            values = [self.leaves[block][i] for block in blocks]
            distinct = {id(x): x for x in values if isinstance(x, Tensor)}
            if len(distinct) > 1 and all(
                id(x) in self.row_tensors and (x.shape, x.dtype) == (leaf.shape, leaf.dtype)
                for x in values
            ):
                rows, numbers = torch.stack([*distinct.values()], 1), [*distinct]
                self.row_tensors[id(rows)] = rows
                picked[i] = [PickedRow(rows, torch.tensor(numbers.index(id(x)))) for x in values]
        for place, block in enumerate(blocks if picked else ()):
            leaves = [
                picked[i][place] if i in picked else x for i, x in enumerate(self.leaves[block])
            ]
            whole = pytree.tree_unflatten(leaves, self.trees[block])
            self.leaves[block], self.trees[block] = pytree.tree_flatten(whole)

    def kinds(self, slots: Sequence[Sequence[int]], own: bool) -> list[int]:
        """Number the arguments of slots, the same ones alike. slots: block numbers of each.

        own: tensors of one shape are alike, since each block may have its own.
        """
        firsts = [slot[0] for slot in slots]
        return numbered(firsts, lambda a, b: self._are_alike(a, b, own))

    def _are_alike(self, one: int, other: int, own: bool) -> bool:
        if self.each[one] is self.each[other] and self.leaves[one] is self.leaves[other]:
            return True
        return self.trees[one] == self.trees[other] and all(
            is_same(a, b) or own and self._may_differ(a, b)
            for a, b in zip(self.leaves[one], self.leaves[other])
        )

    def _may_differ(self, one: object, other: object) -> bool:
        """Return whether two tensors can be rows of one, by block."""
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return False
        in_rows = id(one) in self.row_tensors or id(other) in self.row_tensors
        return not in_rows and (one.shape, one.dtype) == (other.shape, other.dtype)

    def split(
        self, slots: Sequence[Sequence[int]], apart: Collection[int]
    ) -> list[tuple[int, list[int]]]:
        """Split slots into blocks that get like arguments; return (slot, its blocks).

        apart: blocks that run alone.
        """
        found: list[tuple[int, list[int]]] = []
        for slot, blocks in enumerate(slots):
            kinds = self.kinds([[block] for block in blocks], True)
            keys = [(kind, b if b in apart else -1) for kind, b in zip(kinds, blocks)]
            for key in dict.fromkeys(keys):
                found.append((slot, [b for b, each in zip(blocks, keys) if each == key]))
        return found

    def of(self, blocks: Sequence[int]) -> PlaceArguments:
        """Return the arguments of blocks that run one program; raise if they do not fit."""
        first = blocks[0]
        for block in blocks[1:]:
            if not self._are_alike(first, block, own=True):
                raise misused(f"block {block} gets other arguments than block {first}")
        own: dict[int, list[Tensor]] = {}
        for i, leaf in enumerate(self.leaves[first]):
            values = [self.leaves[block][i] for block in blocks]
            if not all(is_same(leaf, value) for value in values):
                own[i] = values
        return PlaceArguments(self, first, own)


class PlaceArguments(NamedTuple):
    """Arguments of blocks that run one program.

    first: the first of these blocks. own: tensors that each has for itself, by leaf and block.
    """

    all: BlockArguments
    first: int
    own: dict[int, list[Tensor]]

    def filled(self, own: Sequence[Tensor], rows: Mapping[int, Tensor]) -> SharedArguments:
        """Return a block's arguments.

        own: its own tensors, in order. rows: a microbatch's rows, by the id of the batch's tensor.
        """
        leaves = [rows.get(id(leaf), leaf) for leaf in self.all.leaves[self.first]]
        for i, x in zip(self.own, own):
            leaves[i] = x
        return SharedArguments(*pytree.tree_unflatten(leaves, self.all.trees[self.first]))


def _names(shared: SharedArguments, block: nn.Module) -> list[str]:
    """Name the argument that each leaf belongs to."""
    parameters = [*inspect.signature(block.forward).parameters][shared.route is None :]
    # Arguments that *args take have no names: their numbers stand for them.
    parameters += [f"{i + 1}" for i in range(len(parameters), len(shared.args))]
    named = [*zip(parameters, shared.args), *shared.kwargs.items()]
    return [name for name, value in named for _ in pytree.tree_leaves(value)]
