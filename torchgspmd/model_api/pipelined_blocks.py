"""pipeline: like blocks as stages of a pipeline, in place of a loop over a ModuleList.

    tick     stage 0   stage 1   stage 2        p stages, m microbatches: m + p - 1 ticks
    0        0                                  of which a stage computes in m
    1        1         0
    2        2         1         0
    3                  2         1
    4                            2

The weights of all stages are one tensor, whose first dimension is sharded over the axis; so are the
stages' values. A tick is the stages' block under torch.vmap; then each stage's result goes to the
next: a shift along that dimension, one permute. So the program is the same on all devices, and
other axes are sharded inside the stages as ever. Source: GSPMD paper, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..capture import is_capturing
from ..capture.rewrites.loop_trace import (
    is_unrolling,
    note_results,
    of_loops_around,
    run_loop,
    use_in_bodies_around,
)
from ..capture.rewrites.microbatches import divided, joined
from ..compat.private_apis import _pytree as pytree
from ..features.pipelines.list_scheduler import Order, order_within
from ..features.pipelines.schedule import Schedule, Times, in_ticks
from ..layout.mark import mark_sharding
from ..layout.mesh import Mesh
from ..layout.spec_notation import UNCONSTRAINED
from .block_arguments import BlockArguments
from .block_calls import of_blocks, without_additions
from .block_groups import (
    GroupPlace,
    Repeats,
    Slots,
    find_slots,
    groups_of,
    kinds_of,
    places_of,
    raise_additions,
    raise_unlike,
    rows_by_place,
    rows_of_places,
    run_places,
    stacks_of,
)
from .scheduled import ScheduledStages, only
from .stacked_blocks import StackedBlocks, Weights, check_blocks
from .state_routes import EachArguments, SharedArguments

Loss = Callable[..., Tensor]
# What a call of the blocks does while pipeline_model runs the model around them.
at_blocks: ContextVar[Callable[..., Any] | None] = ContextVar("at_blocks", default=None)


def in_model(*_: object) -> Tensor:
    """Stand for the loss of a model that pipeline_model has changed: its forward has it."""
    raise NotImplementedError


class _StageProgram(NamedTuple):
    """A stage's program for a call: places for its slots, in groups that repeat.

    tree: of the value that passes from block to block. rows: arguments with a row for each batch
    row, by id. at: the device, round and slot of each block. slots: how many a stage has.
    """

    tree: Any
    repeats: Repeats
    places: list[GroupPlace]
    rows: dict[int, Tensor]
    at: dict[int, tuple[int, int, int]]
    slots: int


class Pipeline(StackedBlocks):
    """Module from pipeline(). A parameter of its `block` is [stages x repeats x layers, ...]."""

    def __init__(
        self,
        blocks: list[nn.Module],
        mesh: Mesh,
        axis: str,
        order: Order,
        loss: Loss | None = None,
        row_arguments: Sequence[str] | None = None,
    ) -> None:
        stages, repeats = order.devices, order.rounds
        check_blocks(blocks, "pipeline")
        stacks = stacks_of(blocks)
        # A stage with twice its share of slots would leave half of them out.
        share = -(-len(blocks) // (stages * repeats))
        slots = find_slots(stacks, stages * repeats, 2 * share - 1)
        # A block that has more than others, as T5's first, can be in their slots.
        alike, additions = without_additions(blocks)
        if additions and (slots is None or len(slots.kinds) > share):
            own = find_slots(stacks_of(alike), stages * repeats, 2 * share - 1)
            if own and (slots is None or len(own.kinds) < len(slots.kinds)):
                slots, blocks, stacks = own, alike, stacks_of(alike)
        if slots is None:
            raise_unlike(blocks, "pipeline")
        additions = additions if blocks is alike else {}
        # Kinds that do not fit are left to the program: it may read none of their values.
        limit = 2 * len(slots.kinds) - 1
        kinds = kinds_of(blocks, stacks, additions)
        slots = find_slots(kinds, stages * repeats, limit) or slots
        self.slots, self.kinds = slots.blocks(), slots.kinds
        of_slots = [stacks[numbers[0]] for numbers in self.slots]
        self.order, self.found, self.at = order, slots, _at(order, slots)
        # A model whose layers are one (ALBERT) calls it again: all stages have its weights.
        self.is_repeated = len(blocks) == 1 and loss is in_model
        rows = [stages * repeats * of_slots.count(stack) for stack in dict.fromkeys(stacks)]
        rows = [1] if self.is_repeated else rows
        # A device's rows are together, round by round; rows without a block pass their input on.
        places = [
            (device * repeats + round_) * of_slots.count(stack) + of_slots[:slot].count(stack)
            for stack, (device, round_, slot) in zip(stacks, self.at)
        ]
        of_rows = "_" if self.is_repeated else axis
        super().__init__(
            blocks,
            "pipeline",
            stacks,
            places,
            rows,
            mesh=mesh,
            axis=of_rows,
            additions=additions,
        )
        self.mesh, self.axis, self.microbatches = mesh, axis, order.microbatches
        self.repeats, self.stages, self.layers = repeats, stages, len(self.slots)
        self.loss, self.row_arguments = loss, row_arguments

    def schedule(self, times: Times | None = None) -> Schedule:
        """Return the schedule for all devices. times: how long a stage's pieces take.

        With a loss: for a plan that stays within its memory in the usual order.
        """
        if self.loss is not None:
            return order_within(replace(self.order, memory=0), 0, True).timed(times or Times())
        return in_ticks(self.stages, self.microbatches, self.repeats, times)

    def runs_in_turn(self) -> bool:
        return self.stages == 1

    def kinds_of_blocks(self) -> Sequence[Hashable]:
        kinds = [self.kinds[slot] for _, _, slot in self.at]
        return [*zip(self.stacks, kinds)]

    def extra_repr(self) -> str:
        return (
            f"{self.count} blocks, {self.stages} stages along '{self.axis}', "
            f"{self.microbatches} microbatches, {self.repeats} repeats"
        )

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        """Return the last block's result for the batch; its loss, if there is one."""
        if self.loss is None or self.loss is in_model or at_blocks.get() is not None:
            return self.run_all(x, self._each(args, kwargs))
        arguments = self._each(args, {})
        if not self.runs_by_schedule():
            return self._loss_of(self.loss, self.outputs_of(x, arguments), kwargs)
        return self.scheduled(self.loss, x, arguments, kwargs)

    def run_all(self, x: object, arguments: Sequence[SharedArguments]) -> Any:
        if (stand_in := at_blocks.get()) is not None:
            return stand_in(self, x, arguments)
        return self.outputs_of(x, arguments)

    def runs_by_schedule(self) -> bool:
        """Return whether backwards run between forwards, now that a call is traced."""
        return self.loss is not None and self.stages > 1 and is_capturing() and not is_unrolling()

    def _loss_of(self, loss: Loss, results: object, targets: dict[str, object]) -> Tensor:
        """Return the mean loss over the microbatches."""
        leaves, tree = pytree.tree_flatten((results, targets))
        parts = [divided(x, self.microbatches) if isinstance(x, Tensor) else x for x in leaves]
        losses = []
        for i in range(self.microbatches):
            row = [x[i].contiguous() if isinstance(x, Tensor) else x for x in parts]
            y, others = pytree.tree_unflatten(row, tree)
            losses.append(loss(y, **others))
        return torch.stack(losses).mean()

    def scheduled(
        self,
        loss: Loss,
        x: object,
        arguments: Sequence[SharedArguments],
        targets: dict[str, object],
    ) -> Tensor:
        """Return the loss from a pipeline that computes forward and backward in turn."""
        leaves, tree = pytree.tree_flatten(x)
        others, of_targets = pytree.tree_flatten(targets)
        tensors = [t for t in others if isinstance(t, Tensor)]
        program = self._program(arguments, leaves, tree)
        # All stages add to the gradient of such an argument, so it passes from stage to stage.
        passing = {i: t for i, t in program.rows.items() if t.requires_grad}
        still = {i: t for i, t in program.rows.items() if i not in passing}
        count, shape = len(leaves), (self.stages, self.repeats, -1)
        stacked, of_stacked = pytree.tree_flatten(self._stacked_rows(program))
        of_rounds = [
            [each.flatten(0, 1) for each in w.unflatten(0, shape).unbind(1)] for w in stacked
        ]
        is_block = self._is_block(program, leaves[0].device).unbind(1)

        def stages(
            round_: int, state: Sequence[Tensor], rows: Sequence[Tensor]
        ) -> Sequence[Tensor]:
            present = [each[round_].unflatten(0, (self.stages, -1)) for each in of_rounds]
            present = pytree.tree_unflatten(present, of_stacked)
            mine = [x.expand(self.stages, *x.shape) for x in rows[len(tensors) :]]
            by_id = dict(zip((*still, *passing), (*mine, *state[count:])))
            results = self._stage_of_all(program, present, is_block[round_], state[:count], by_id)
            return [*results, *state[count:]]

        def losses(state: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
            def one(state: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
                remaining = iter(rows)
                kwargs = pytree.tree_unflatten(
                    [next(remaining) if isinstance(t, Tensor) else t for t in others], of_targets
                )
                return loss(pytree.tree_unflatten([*state], tree), **kwargs)

            return _of_all_stages(one, [*state[:count]], [*rows[: len(tensors)]])

        run = ScheduledStages(stages, losses, self._along, self.axis, self.order)
        batch = leaves[0].shape[0]
        parts = [self._divided(each, batch) for each in (*leaves, *passing.values())]
        return run(parts, [self._divided(t, batch) for t in (*tensors, *still.values())])

    def _program(
        self, arguments: Sequence[SharedArguments], leaves: Sequence[Tensor], tree: object
    ) -> _StageProgram:
        """Return a stage's program for a call. leaves: the first block's arguments."""
        own = BlockArguments(arguments)
        with of_blocks(0):
            kinds = () if self.is_repeated else self.kinds_of_blocks()
            own.divide_rows(self.block, self.row_arguments, leaves[0].shape[0], kinds)
        # Blocks of one slot whose arguments differ are in slots of their own, of which a stage has
        # one. The limit is that for kinds of blocks.
        filled = arguments.filled if isinstance(arguments, EachArguments) else frozenset[int]()
        apart = self.additions - filled
        found, stacks = self.found, self.stacks
        if self.is_repeated:  # each of its calls is a block
            stacks = [0] * len(arguments)
            found = find_slots(stacks, self.stages * self.repeats, len(stacks)) or found
        all_slots, of_blocks_at = found.blocks(), _at(self.order, found)
        parts = own.split(all_slots, apart)
        if len(parts) >= 2 * len(all_slots):
            if apart:
                raise_additions(self.what, self.whole(min(apart)), self.block_of(min(apart)))
            parts = [*enumerate(all_slots)]
        rows, slots = [slot for slot, _ in parts], [blocks for _, blocks in parts]
        kinds = [(found.kinds[i], b[0] if b[0] in apart else -1) for i, b in parts]
        repeats = groups_of(kinds, slots, own)
        places = places_of(repeats, slots, stacks, own, rows)
        at = {
            number: (*of_blocks_at[number][:2], slot)
            for slot, blocks in enumerate(slots)
            for number in blocks
        }
        return _StageProgram(tree, repeats, places, own.row_tensors, at, len(slots))

    def _divided(self, x: Tensor, batch: int) -> Tensor:
        """Split a tensor with rows of the batch into [microbatches, rows, ...].

        It may have several rows for each of the batch, one after the other.
        """
        if x.shape[0] == batch or not batch:
            return divided(x, self.microbatches)
        return divided(x.unflatten(0, (batch, -1)), self.microbatches).flatten(1, 2)

    def _stacked_rows(self, program: _StageProgram) -> tuple[Weights, list[list[Tensor]]]:
        """Return the weights, and the places' own arguments: [stages x repeats x slots, ...]."""
        weights = self.weights()
        if self.is_repeated:
            count = self.stages * self.repeats * program.slots
            weights = [
                {name: self._along(w.expand(count, *w.shape[1:])) for name, w in named.items()}
                for named in weights
            ]
        return weights, [
            [self._own_rows(program, place, values) for values in place.arguments.own.values()]
            for place in program.places
        ]

    def _own_rows(
        self, program: _StageProgram, place: GroupPlace, values: Sequence[Tensor]
    ) -> Tensor:
        """Stack the tensors that a place's blocks have for themselves."""
        of_blocks = {program.at[number]: x for number, x in zip(place.numbers, values)}
        rows = [
            of_blocks.get((device, round_, slot), values[0])
            for device in range(self.stages)
            for round_ in range(self.repeats)
            for slot in place.slots
        ]
        return self._along(torch.stack(rows))

    def outputs(self, x: object, *args: object, **kwargs: object) -> Any:
        """Return the last block's result for the batch, without the loss."""
        return self.outputs_of(x, self._each(args, kwargs))

    def outputs_of(self, x: object, arguments: Sequence[SharedArguments]) -> Any:
        """Return the last block's result for the batch. arguments: by block."""
        if self.runs_in_turn() or not is_capturing():
            return self.one_by_one(x, arguments)
        leaves, tree = pytree.tree_flatten(x)
        program = self._program(arguments, leaves, tree)
        weights = pytree.tree_map(
            lambda w: w.unflatten(0, (self.stages, self.repeats, -1)), self._stacked_rows(program)
        )
        parts = [divided(leaf, self.microbatches) for leaf in leaves]  # [microbatches, rows, ...]
        is_block = self._is_block(program, leaves[0].device)
        if self.order.vee:  # the second round begins where the first one ends
            for r, shift in enumerate((1, -1)):
                present = pytree.tree_map(lambda w, r=r: w[:, r : r + 1], weights)
                parts = self._ticks(program, present, is_block[:, r : r + 1], parts, shift)
        else:
            parts = self._ticks(program, weights, is_block, parts)
        return pytree.tree_unflatten([joined(each) for each in parts], tree)

    def _is_block(self, program: _StageProgram, device: torch.device) -> Tensor:
        """Return a mask, [stages, repeats, slots]: True for a slot that a block has."""
        shape, taken = (self.stages, self.repeats, program.slots), {*program.at.values()}
        rows = [place in taken for place in product(*map(range, shape))]
        return torch.tensor(rows, device=device).view(shape)

    def _ticks(
        self,
        program: _StageProgram,
        weights: Any,
        is_block: Tensor,
        parts: list[Tensor],
        shift: int = 1,
    ) -> list[Tensor]:
        """Return the last block's results, as leaves [microbatches, rows, ...].

        weights, is_block: [stages, rounds, slots, ...]. shift: from a stage to the next one.
        """
        m, p, rounds = self.microbatches, self.stages, is_block.shape[1]
        first, last = (0, p - 1)[::shift]
        # A result waits m - p ticks for its next round: stage 0 is busy with the others until then.
        ticks, waiting = m * rounds + p - 1, max(m - p, 0) if rounds > 1 else 0
        count_up = partial(torch.arange, device=parts[0].device)
        stage = count_up(p)
        batch = m * parts[0].shape[1]
        own = {i: self._divided(x, batch) for i, x in program.rows.items()}
        position = stage if shift > 0 else stage.flip(0)
        # Stages without work compute on the first microbatch: values as real ones, and no gradient.
        entering = [x.index_select(0, count_up(ticks).clamp(max=m) % m) for x in parts]
        state = [self._along(x[:1].expand(p, *x.shape[1:])) for x in parts]
        # what has left the last stage and waits for its next round, the oldest first
        queue = [x[:1].expand(waiting, p, *x.shape[1:]) for x in parts] if waiting else []

        def tick(*inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            count = len(parts)
            state, queue = inputs[:count], list(inputs[count : len(carry)])
            number, *new = inputs[len(carry) :]
            passed = [torch.roll(x, shift, 0) for x in state]
            if rounds > 1:
                again = [q[0] for q in queue] if queue else passed
                queue = [torch.cat([q[1:], x[None]]) for q, x in zip(queue, passed)]
                is_new = number < m
                new = [torch.where(is_new, x, old) for x, old in zip(new, again)]
            else:
                new = [x[None] for x in new]
            moved = [self._along(only(first, x, old)) for x, old in zip(new, passed)]
            begun = (number - position).clamp(min=0)
            round_of = (begun // m).clamp(max=rounds - 1)
            mine = {i: self._along(x.index_select(0, begun % m)) for i, x in own.items()}
            present = pytree.tree_map(lambda w: _rows(w, round_of), weights)
            real = _rows(is_block, round_of)
            args = program, present, real, moved, mine, self.order.recompute
            results = self._stage_of_all(*args)
            results = [*map(self._along, results)]
            return [*results, *queue], results

        carry = [*state, *queue]
        _, states = run_loop(tick, carry, [count_up(ticks), *entering], ticks)
        return [leaves[-m:, last] for leaves in states]

    def _stage_of_all(
        self,
        program: _StageProgram,
        stacked: tuple[Weights, list[list[Tensor]]],
        real: Tensor,
        state: Sequence[Tensor],
        mine: dict[int, Tensor],
        recompute: bool = False,
    ) -> list[Tensor]:
        """Run every stage's blocks on its values, those of a group in a loop.

        stacked: weights and own arguments, [stages, slots, ...]. real: [stages, slots], whether a
        slot has a block. mine: row arguments, [stages, ...], by the id of the batch's.
        """
        repeats, places = program.repeats, program.places

        def layer(
            place: GroupPlace, weights: Any, own: Any, real: Any, mine: Any, *leaves: Tensor
        ) -> tuple[Tensor, ...]:
            arguments = place.arguments.filled(own, mine)
            computed = self.run_flat(program.tree, place.numbers, arguments, weights, *leaves)
            if len(place.numbers) == self.stages * self.repeats * len(place.slots):
                return tuple(computed)
            return tuple(torch.where(real, new, old) for new, old in zip(computed, leaves))

        def step(place: GroupPlace, row: Any, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
            use_in_bodies_around([*mine.values()])
            # torch.vmap takes a loop's outside values as they are: no mode replaces them.
            rows = dict(zip(mine, of_loops_around([*mine.values()])))
            return _of_all_stages(partial(layer, place), *row, rows, *leaves)

        def all_stages(stacked: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
            weights, own = pytree.tree_map(lambda w: w.transpose(0, 1), stacked)
            of_blocks = rows_by_place(places, repeats, real.T)
            own = [
                [x if len(place.slots) > 1 else x[0] for x in of_place]
                for place, of_place in zip(places, own)
            ]
            rows = [*zip(rows_of_places(places, repeats, weights), own, of_blocks)]
            return tuple(run_places(repeats, places, rows, leaves, step))

        if recompute:
            return [*checkpoint(all_stages, stacked, *state, use_reentrant=False)]
        return [*all_stages(stacked, *state)]

    def _along(self, leaf: Tensor) -> Tensor:
        return mark_sharding(leaf, self.mesh, (self.axis, *[UNCONSTRAINED] * (leaf.dim() - 1)))


def _at(order: Order, slots: Slots) -> list[tuple[int, int, int]]:
    """Return the device, round and slot of each block."""
    places = order.places
    return [(places.device(stage), places.round(stage), slot) for stage, slot in slots.places]


def _of_all_stages(function: Callable[..., object], *args: object) -> Any:
    """Map a function for one stage over all stages' values."""
    results = torch.vmap(function, randomness="different")(*args)
    note_results(pytree.tree_leaves(results))
    return results


def _rows(weight: Tensor, round_of: Tensor) -> Tensor:
    """Return weights [stages, layers, ...]: those for each stage's current round."""
    if weight.shape[1] == 1:
        return weight[:, 0]
    return weight[torch.arange(len(round_of), device=round_of.device), round_of]
