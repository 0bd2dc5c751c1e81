"""StackedBlocks: like blocks with stacked weights; its state_dict has the blocks' names.

ModuleList(blocks)      0.up.weight [h, m], 1.up.weight [h, m], ...
StackedBlocks           block.up.weight [rows, h, m]; `places` has the row of each block
its state_dict          0.up.weight [h, m], 1.up.weight [h, m], ...
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ..capture import is_capturing
from ..capture.draws import in_block
from ..capture.rewrites.loop_trace import run_loop
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from ..layout.annotate import Row
from ..layout.mark import mark_sharding, raw_mark
from ..layout.mesh import Mesh
from .block_calls import BlockCalls, BlockPlace, SharedArguments, of_block, separate


class StackedBlocks(nn.Module):
    """Blocks whose weights are stacked. A parameter of its `block` is [rows, ...].

    A loop over it calls all blocks as one (block_calls.py), so a model's
    `for block in blocks: x = block(x)` needs no change.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        what: str,
        places: Sequence[int],
        rows: int,
        mesh: Mesh | None = None,
        axis: str = "_",
    ) -> None:
        """Stack the blocks' weights.

        Args:
            blocks: The blocks.
            what: The new module's name, for messages.
            places: The row for each block's weights. The first block stands in other rows.
            rows: How many there are.
            mesh: The devices, for weights without a mark.
            axis: The axis that shards the rows.
        """
        super().__init__()
        self.places, self.rows, self.count = tuple(places), rows, len(blocks)
        self.row_axis, self.what = axis, what
        self.names = _common_names(blocks, what)
        stacked = {
            name: self._stacked([b.get_parameter(name) for b in blocks]) for name in self.names
        }
        # A copy, since the first block keeps its own weights.
        self.block = copy.deepcopy(blocks[0])
        separate(self.block, blocks, what)
        for name, tensor in stacked.items():
            first = blocks[0].get_parameter(name)
            parameter = nn.Parameter(tensor, first.requires_grad)
            _mark(parameter, first, mesh, axis)
            owner, _, last = name.rpartition(".")
            self.block.get_submodule(owner)._parameters[last] = parameter
        self.register_state_dict_post_hook(_to_names_of_blocks)
        self.register_load_state_dict_pre_hook(_from_names_of_blocks)

    def __getattr__(self, name: str) -> Any:
        """Return the module that stands for the block with this number, as state_dict names it."""
        # get_submodule("blocks.3.up") looks numbers up as attributes.
        if name.isdigit() and int(name) < self.count:
            return self.block
        return super().__getattr__(name)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[nn.Module]:
        calls = BlockCalls(self.count, self, self.run_one)
        return iter([BlockPlace(self.block, calls, number) for number in range(self.count)])

    def __getitem__(self, index: int | slice) -> Any:
        """Return the module that stands for a block; for the slice of all, a list for a loop."""
        if isinstance(index, int):
            return self.block
        if [*range(self.count)[index]] != [*range(self.count)]:
            raise ShardingError.here(
                f"a part of {self.count} stacked blocks is taken: {index}",
                why="all of them are one call",
                fix="stack the parts by themselves",
            )
        return [*self]

    def place(self, layer: int) -> int:
        return self.places[layer]

    def named_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield each block's weights, by their names."""
        for name, tensor in self.weights().items():
            for layer in range(self.count):
                yield f"{layer}.{name}", Row(tensor, self.row_axis)

    def weights(self) -> dict[str, Tensor]:
        return {name: attrgetter(name)(self.block) for name in self.names}

    def one_by_one(self, x: object, shared: SharedArguments) -> object:
        """Call one block after the other; return the last one's result."""
        for number in range(self.count):
            x = self.run_one(number, x, *shared.args, **shared.kwargs)
        return x

    def run_one(self, number: int, x: object, *args: object, **kwargs: object) -> Any:
        weights = {name: w[self.places[number]] for name, w in self.weights().items()}
        with of_block(number):
            return self.run(self.block, weights, x, SharedArguments(args, kwargs))

    def run_flat(
        self, tree: Any, shared: SharedArguments, weights: dict[str, Tensor], *leaves: Tensor
    ) -> list[Tensor]:
        """Run a block on leaves; return those of its result, which the next block can take."""
        y = self.run(self.block, weights, pytree.tree_unflatten([*leaves], tree), shared)
        results, other = pytree.tree_flatten(y)
        # Checked in the trace, since a loop's carry has one shape in all iterations.
        check_alike(self.what, leaves, tree, results, other)
        return results

    @staticmethod
    def run(
        block: nn.Module, weights: dict[str, Tensor], x: object, shared: SharedArguments
    ) -> Any:
        args = x, *shared.args
        with in_block():
            return torch.func.functional_call(block, weights, args, {**shared.kwargs})

    def _stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack the blocks' tensors; the first stands for blocks that are missing."""
        # A missing row gets real weights: it computes as well, and its result is dropped.
        rows = [tensors[0].detach()] * self.rows
        for place, tensor in zip(self.places, tensors):
            rows[place] = tensor.detach()
        return torch.stack(rows)


def _mark(parameter: Tensor, first: Tensor, mesh: Mesh | None, axis: str) -> None:
    mark = raw_mark(first)
    if mark is None and mesh is None:
        return
    mesh, spec, _ = mark or (mesh, " ".join("_" * first.dim()), None)
    stacked = f"{axis} {spec}".strip()
    mark_sharding(parameter, mesh, stacked) if mesh else mark_sharding(parameter, stacked)


def _common_names(blocks: Sequence[nn.Module], what: str) -> list[str]:
    """Return the parameters' names. Raise unless the blocks differ in values alone."""
    if not blocks:
        raise ShardingError.here(f"a {what} has no blocks")
    if any(isinstance(module, StackedBlocks) for block in blocks for module in block.modules()):
        raise ShardingError.here(
            f"a {what} is made of stacked blocks", fix=f"give the blocks themselves to {what}"
        )
    first, *others = map(_description, blocks)
    for i, other in enumerate(others, 1):
        differ = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differ:
            raise ShardingError.here(
                f"blocks 0 and {i} of a {what} differ: {differ}",
                why="all blocks run one program, on weights that are stacked",
                fix=f"leave out of the {what} what is before and after the like blocks",
            )
        buffers = zip(blocks[0].buffers(), blocks[i].buffers())
        if not all(torch.equal(a, b) for a, b in buffers if not a.is_meta):
            raise ShardingError.here(
                f"blocks 0 and {i} of a {what} have buffers that differ",
                fix="pass what differs as arguments, or make it a parameter",
            )
    return [name for name, _ in blocks[0].named_parameters()]


def _description(block: nn.Module) -> dict[str, object]:
    """Return the types of a block's modules, and shapes of its tensors, by their names."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    types = {name or type(m).__name__: type(m) for name, m in block.named_modules()}
    return {**types, **{name: (tuple(t.shape), t.dtype) for name, t in tensors}}


def check_alike(what: str, taken: Any, tree: object, returned: list[Tensor], other: object) -> None:
    """Raise unless a block returns a value that the next one can take in its place."""
    before = [(tuple(x.shape), x.dtype) for x in taken]
    after = [(tuple(x.shape), x.dtype) for x in returned]
    if tree != other or before != after:
        raise ShardingError.here(
            f"a block of a {what} takes {_text(before)} and returns {_text(after)}",
            why="all blocks are one program: their value keeps its shape, dtype and structure",
            fix=f"leave out of the {what} what changes shape, dtype or structure; set param_dtype= "
            "in place of torch.autocast",
        )


def _text(values: list[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{[*shape]}" for shape, dtype in values)


def _to_names_of_blocks(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Put each block's weights into a state_dict, under its own names."""
    blocks = cast(StackedBlocks, module)
    stacked = {name: state.pop(f"{prefix}block.{name}", None) for name in blocks.names}
    shared = f"{prefix}block."
    buffers = {key: state.pop(key) for key in [k for k in state if k.startswith(shared)]}
    for layer in range(blocks.count):
        for name, weight in stacked.items():
            if weight is not None:
                state[f"{prefix}{layer}.{name}"] = weight[blocks.place(layer)]
        for key, value in buffers.items():
            state[f"{prefix}{layer}.{key.removeprefix(shared)}"] = value


def _from_names_of_blocks(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Stack all blocks' weights in a state_dict that is loaded."""
    blocks = cast(StackedBlocks, module)
    for name in blocks.names:
        keys = [f"{prefix}{layer}.{name}" for layer in range(blocks.count)]
        if all(key in state for key in keys):
            tensors = [state.pop(key) for key in keys]
            whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
            state[f"{prefix}block.{name}"] = blocks._stacked(whole)
    for name in dict(blocks.block.named_buffers()):
        # Buffers are equal in all blocks (_common_names), so the first one's are enough.
        values = [state.pop(f"{prefix}{layer}.{name}", None) for layer in range(blocks.count)]
        if values[0] is not None:
            state[f"{prefix}block.{name}"] = values[0]


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
        shared = SharedArguments(args, kwargs)
        if not is_capturing():
            return self.one_by_one(x, shared)
        leaves, tree = pytree.tree_flatten(x)
        weights = self.weights()

        block = partial(self.run_flat, tree, shared)

        def body(*inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            # run_loop passes the carry first, then this iteration's row of each weight.
            row = dict(zip(weights, inputs[len(leaves) :]))
            carry = inputs[: len(leaves)]
            if self.recompute:
                return [*checkpoint(block, row, *carry, use_reentrant=False)], []
            return block(row, *carry), []

        last, _ = run_loop(body, leaves, [*weights.values()], self.count)
        return pytree.tree_unflatten(last, tree)
