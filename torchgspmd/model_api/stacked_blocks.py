"""StackedBlocks: like blocks with stacked weights; its state_dict has the blocks' names.

ModuleList(blocks)      0.up.weight [h, m], 1.up.weight [h, m], ...
StackedBlocks           block.up.weight [rows, h, m]; `places` has the row of each block
its state_dict          0.up.weight [h, m], 1.up.weight [h, m], ...

Blocks with other modules or shapes than block 0 have a stack of their own: block1, block2, ...
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..capture.draws import in_block
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from ..layout.annotate import Row
from ..layout.mark import mark_sharding, raw_mark
from ..layout.mesh import Mesh
from .alike import Alike
from .between_blocks import BlockWork, PickedRow
from .block_calls import check_weights, of_blocks, separate
from .block_hooks import leaves_of, seen_by_hooks
from .block_loops import BlockLoop, BlockPlace, loop_by_index
from .state_routes import EachArguments, SharedArguments, check_alike

Weights = list[dict[str, Tensor]]  # by stack, and by name in a block
# The weights that blocks had before they were stacked, by name. A pickle cannot keep them.
_before: WeakKeyDictionary[nn.Module, dict[str, ref[Tensor]]] = WeakKeyDictionary()


class StackedBlocks(nn.Module):
    """Blocks whose weights are stacked. A parameter of its `block` is [rows, ...].

    A loop over it calls all blocks as one (block_loops.py), so a model's
    `for block in blocks: x = block(x)` needs no change.
    """

    is_repeated = False  # a lone block that forward calls again and again
    is_dict = False  # whether it stands for a ModuleDict, whose keys are the blocks' numbers

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        what: str,
        stacks: Sequence[int],
        places: Sequence[int],
        rows: Sequence[int],
        mesh: Mesh | None = None,
        axis: str = "_",
        additions: Mapping[int, nn.Module] | None = None,
    ) -> None:
        """Stack the blocks' weights.

        Args:
            blocks: The blocks.
            what: The new module's name, for messages.
            stacks: The stack of each block's weights.
            places: The row of each block's weights. A stack's first block stands in other rows.
            rows: How many each stack has.
            mesh: The devices, for weights without a mark.
            axis: The axis that shards the rows.
            additions: Blocks with modules that those they are stacked with lack, by number.
        """
        super().__init__()
        self.places, self.rows, self.count = tuple(places), tuple(rows), len(blocks)
        self.stacks, self.row_axis, self.what = tuple(stacks), axis, what
        for stack, name in enumerate(self.stack_names):
            own = {i: each for i, each in enumerate(blocks) if stacks[i] == stack}
            setattr(self, name, self._stand_in(stack, own, mesh))
        self.additions = frozenset(additions or ())
        self.inner_hooks: list[object] = []  # of the blocks, which run in their program
        for number, block in (additions or {}).items():
            setattr(self, f"own{number}", block)
        named = [(i, *each) for i, block in enumerate(blocks) for each in block.named_parameters()]
        _before[self] = {f"{i}.{name}": ref(weight) for i, name, weight in named}
        self.register_state_dict_post_hook(_to_names_of_blocks)
        self.register_load_state_dict_pre_hook(_from_names_of_blocks)

    def _stand_in(self, stack: int, blocks: dict[int, nn.Module], mesh: Mesh | None) -> nn.Module:
        """Return a block that has a stack's weights and stands for its blocks, by number."""
        first, *_ = blocks.values()
        stacked = {
            name: self._stacked(stack, [b.get_parameter(name) for b in blocks.values()])
            for name, _ in first.named_parameters()
        }
        # A copy, since the first block keeps its own weights.
        block = copy.deepcopy(first)
        separate(block, blocks, self.what)
        for name, tensor in stacked.items():
            of_first = first.get_parameter(name)
            parameter = nn.Parameter(tensor, of_first.requires_grad)
            _mark(parameter, of_first, mesh, self.row_axis)
            owner, _, last = name.rpartition(".")
            block.get_submodule(owner)._parameters[last] = parameter
        return block

    @property
    def stack_names(self) -> list[str]:
        return ["block", *(f"block{stack}" for stack in range(1, len(self.rows)))]

    def block_of(self, number: int) -> nn.Module:
        """Return the module that stands for a block."""
        return getattr(self, self.stack_names[self.stacks[0 if self.is_repeated else number]])

    def whole(self, number: int) -> nn.Module:
        """Return a module that has all that a block has, besides stacked weights."""
        return getattr(self, f"own{number}") if number in self.additions else self.block_of(number)

    def of_stack(self, stack: int) -> list[int]:
        """Return the numbers of a stack's blocks."""
        return [number for number, each in enumerate(self.stacks) if each == stack]

    def __getattr__(self, name: str) -> Any:
        """Return the module that stands for the block with this number, as state_dict names it."""
        # get_submodule("blocks.3.up") looks numbers up as attributes.
        if name.isdigit() and int(name) < self.count:
            return self.block_of(int(name))
        return super().__getattr__(name)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys() if self.is_dict else self.values())

    def keys(self) -> list[str]:
        return [str(number) for number in range(self.count)]

    def values(self) -> list[nn.Module]:
        loop = self._loop()
        return [BlockPlace(self.block_of(i), loop, i) for i in range(self.count)]

    def items(self) -> list[tuple[str, nn.Module]]:
        return [*zip(self.keys(), self.values())]

    def _loop(self) -> BlockLoop:
        return BlockLoop(self, self.what, self.kinds_of_blocks(), self.run_one)

    def runs_in_turn(self) -> bool:
        """Return whether a trace has one block after the other."""
        return False

    def kinds_of_blocks(self) -> Sequence[Hashable]:
        """Return each block's kind."""
        return self.stacks

    def __getitem__(self, index: int | str | slice) -> Any:
        """Return a block for a loop; for the slice of all, a list of them."""
        if not isinstance(index, slice):
            number = range(self.count)[int(index)]
            return BlockPlace(self.block_of(number), loop_by_index(self, self._loop), number)
        if [*range(self.count)[index]] != [*range(self.count)]:
            raise ShardingError.here(
                f"a part of {self.count} stacked blocks is taken: {index}",
                why="all of them are one call",
                fix="stack the parts by themselves",
            )
        return self.values()

    def check_model(self, state: Mapping[str, Tensor]) -> None:
        """Raise ShardingError if a model has a weight that was one of its blocks' weights, too."""
        names = {id(tensor): name for name, tensor in state.items()}
        for own, weight in _before.get(self, {}).items():
            if (tied := names.get(id(weight()))) is not None and weight() is not None:
                raise ShardingError.here(
                    f"{tied} was {own} of the {self.what} before it was made",
                    why=f"the {self.what} has a copy of it as a row, and a step changes each alone",
                    fix=f"pass the shared weight to the blocks as an argument, or leave out of the "
                    f"{self.what} the block that has it",
                )

    def place(self, layer: int) -> int:
        return self.places[layer]

    def named_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield each block's weights, by their names."""
        for stack, weights in enumerate(self.weights()):
            for name, tensor in weights.items():
                for layer in self.of_stack(stack):
                    yield f"{layer}.{name}", Row(tensor, self.row_axis)
        for number in self.additions:
            for name, tensor in self.whole(number).named_parameters():
                yield f"{number}.{name}", Row(tensor, "")  # a tensor of its own

    def weights(self) -> Weights:
        # Read by name: a trace puts other tensors in their place.
        return [
            {name: attrgetter(name)(block) for name, _ in block.named_parameters()}
            for block in (getattr(self, name) for name in self.stack_names)
        ]

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        return self.run_all(x, self._each(args, kwargs))

    def _each(self, args: tuple[object, ...], kwargs: dict[str, object]) -> EachArguments:
        """Return each block's arguments, of a call or of a loop over the blocks."""
        if args and isinstance(args[0], EachArguments):
            return args[0]
        return EachArguments([SharedArguments(args, kwargs)] * self.count)

    def run_all(self, x: object, arguments: Sequence[SharedArguments]) -> Any:
        """Run all blocks. arguments: each block's, besides the previous block's result."""
        raise NotImplementedError

    def one_by_one(self, x: object, arguments: Sequence[SharedArguments]) -> object:
        """Call one block after the other; return the last one's result."""
        for number, own in enumerate(arguments):
            with of_blocks(number):
                x = self.run(self.whole(number), self._row(number), x, own)
        return x

    def run_one(self, number: int, *args: object, **kwargs: object) -> Any:
        """Call a block."""
        with of_blocks(number), in_block():
            return torch.func.functional_call(self.whole(number), self._row(number), args, kwargs)

    def _row(self, number: int) -> dict[str, Tensor]:
        """Return a block's weights."""
        number = 0 if self.is_repeated else number
        rows = self.weights()[self.stacks[number]]
        return {name: w[self.places[number]] for name, w in rows.items()}

    def run_flat(
        self,
        tree: Any,
        numbers: Sequence[int],
        shared: SharedArguments,
        weights: dict[str, Tensor],
        *leaves: Tensor,
    ) -> list[Tensor]:
        """Run a block on leaves; return those of its result, which the next block can take.

        numbers: those of the blocks that this run stands for.
        """
        with of_blocks(*numbers):
            x = pytree.tree_unflatten([*leaves], tree)
            block = self.block_of(numbers[0]) if numbers[1:] else self.whole(numbers[0])
            y = self.run(block, weights, x, shared)
        # Checked in the trace, since a loop's carry has one shape in all iterations.
        check_alike(self.what, x, y)
        return pytree.tree_leaves(y)

    def run(
        self, block: nn.Module, weights: dict[str, Tensor], x: object, shared: SharedArguments
    ) -> Any:
        """Return a block's result, or the state that its route takes from it."""
        args, kwargs, works = (x, *shared.args), {**shared.kwargs}, shared.works
        if (route := shared.route) is not None:
            args, kwargs, works = route.arguments(cast(Any, x), shared.args, kwargs, works)
        else:
            args, kwargs = PickedRow.all_values((args, kwargs))
        inner = self.inner_hooks if shared.has_called_hooks else None
        with in_block():
            with seen_by_hooks(block, inner) as seen:
                y = torch.func.functional_call(block, weights, args, kwargs)
            if route is None:
                return y
            leaves = [*pytree.tree_leaves(y), *leaves_of(seen)]
            values = BlockWork.all_results(works, (args, kwargs), leaves)
            return route.after(cast(Any, x), values, shared.choices)

    def _stacked(self, stack: int, tensors: Sequence[Tensor]) -> Tensor:
        """Stack a stack's tensors; the first stands for blocks that are missing."""
        # A missing row gets real weights: it computes as well, and its result is dropped.
        rows = [tensors[0].detach()] * self.rows[stack]
        for number, tensor in zip(self.of_stack(stack), tensors):
            rows[self.places[number]] = tensor.detach()
        return torch.stack(rows)


def _mark(parameter: Tensor, first: Tensor, mesh: Mesh | None, axis: str) -> None:
    mark = raw_mark(first)
    if mark is None and mesh is None:
        return
    mesh, spec, _ = mark or (mesh, " ".join("_" * first.dim()), None)
    stacked = f"{axis} {spec}".strip()
    mark_sharding(parameter, mesh, stacked) if mesh else mark_sharding(parameter, stacked)


def check_blocks(blocks: Sequence[nn.Module], what: str) -> None:
    """Raise ShardingError unless these are blocks that may be stacked."""
    if not blocks:
        raise ShardingError.here(f"a {what} has no blocks")
    if any(isinstance(module, StackedBlocks) for block in blocks for module in block.modules()):
        raise ShardingError.here(
            f"a {what} is made of stacked blocks", fix=f"give the blocks themselves to {what}"
        )
    check_weights(blocks, what)


def _to_names_of_blocks(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Put each block's weights into a state_dict, under its own names."""
    blocks = cast(StackedBlocks, module)
    for stack, (name_of_stack, weights) in enumerate(zip(blocks.stack_names, blocks.weights())):
        shared = f"{prefix}{name_of_stack}."
        stacked = {name: state.pop(f"{shared}{name}", None) for name in weights}
        buffers = {key: state.pop(key) for key in [k for k in state if k.startswith(shared)]}
        for layer in blocks.of_stack(stack):
            for name, weight in stacked.items():
                if weight is not None:
                    state[f"{prefix}{layer}.{name}"] = weight[blocks.place(layer)]
            for key, value in buffers.items():
                state[f"{prefix}{layer}.{key.removeprefix(shared)}"] = value
    for number in blocks.additions:
        own = f"{prefix}own{number}."
        for key in [key for key in state if key.startswith(own)]:
            state[f"{prefix}{number}.{key.removeprefix(own)}"] = state.pop(key)


def _from_names_of_blocks(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Stack all blocks' weights in a state_dict that is loaded."""
    blocks = cast(StackedBlocks, module)
    for number in blocks.additions:
        own = blocks.whole(number)
        parameters = [name for name, _ in own.named_parameters()]
        for name in [*parameters, *(name for name, _ in own.named_buffers())]:
            if (key := f"{prefix}{number}.{name}") in state:
                state[f"{prefix}own{number}.{name}"] = state[key]
        for name in parameters:
            state.pop(f"{prefix}{number}.{name}", None)
    for stack, (name_of_stack, weights) in enumerate(zip(blocks.stack_names, blocks.weights())):
        layers, shared = blocks.of_stack(stack), f"{prefix}{name_of_stack}."
        for name in weights:
            keys = [f"{prefix}{layer}.{name}" for layer in layers]
            if all(key in state for key in keys):
                tensors = [state.pop(key) for key in keys]
                whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
                state[f"{shared}{name}"] = blocks._stacked(stack, whole)
        for name, _ in getattr(blocks, name_of_stack).named_buffers():
            keys = [f"{prefix}{layer}.{name}" for layer in layers]
            values = {key: state.pop(key) for key in keys if key in state}
            for key, value in values.items():
                first = state.setdefault(f"{shared}{name}", value)
                if not Alike({}, {})(first, value):
                    raise ShardingError.here(
                        f"{keys[0]} and {key} differ in what is loaded",
                        why="blocks that run one program have one tensor for their buffers",
                        fix="make it a parameter (with requires_grad=False)",
                    )
