"""Blocks in groups that repeat: one trace for each place of a group, in a loop over the groups.

    slots       0 1 2 3 4 5 6       kinds d m n m n m n: 1 before, a group of 2, 3 times
    places      0 | 1 2             slot 0; slots 1, 3, 5; slots 2, 4, 6

A slot is a block of a stack, or in a pipeline the blocks that the stages have at one point of their
program. A place's row of a weight is [...] outside of the loop, and [groups, ...] in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from ..capture.rewrites.loop_trace import run_loop
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .alike import Alike, numbered, own_names
from .block_arguments import BlockArguments, PlaceArguments
from .block_calls import description, differing_attributes, hooks_of


class GroupPlace(NamedTuple):
    """A part of the program that stands for blocks.

    numbers: theirs. slots: those with these blocks, by group. stack: of their weights. rows: the
    slots' rows of weights, which slots share if a slot of a pipeline is split.
    """

    numbers: tuple[int, ...]
    slots: tuple[int, ...]
    stack: int
    rows: tuple[int, ...]
    arguments: PlaceArguments


def groups_of(
    kinds: Sequence[Hashable], slots: Sequence[Sequence[int]], arguments: BlockArguments
) -> Repeats:
    """Return the groups of slots that repeat with their arguments. kinds: the slots'."""
    exact, own = (find_repeats([*zip(kinds, arguments.kinds(slots, own))]) for own in (False, True))
    # A loop reads each group's own tensors as rows, which are copies.
    return exact if 2 * exact.saved >= own.saved else own


def places_of(
    repeats: Repeats,
    slots: Sequence[Sequence[int]],
    stacks: Sequence[int],
    arguments: BlockArguments,
    rows: Sequence[int] = (),
) -> list[GroupPlace]:
    """Return the program's places.

    slots: each one's block numbers. stacks: by block. rows: by slot; a slot's number if empty.
    """
    rows = rows or range(len(slots))
    found: list[GroupPlace] = []
    groups = [
        tuple(repeats.before + place + repeats.period * i for i in range(repeats.count))
        for place in range(repeats.period)
    ]
    before, after = range(repeats.before), range(repeats.end, len(slots))
    for own in (*((slot,) for slot in before), *groups, *((slot,) for slot in after)):
        numbers = tuple(number for slot in own for number in slots[slot])
        of_slots = tuple(rows[slot] for slot in own)
        place = GroupPlace(numbers, own, stacks[numbers[0]], of_slots, arguments.of(numbers))
        found.append(place)
    return found


def rows_of_places(
    places: Sequence[GroupPlace], repeats: Repeats, weights: Sequence[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Return each place's rows of weights, which are [slots of the stack, ...], by stack."""
    found: list[dict[str, Tensor]] = [{} for _ in places]
    for stack, named in enumerate(weights):
        numbers = [i for i, place in enumerate(places) if place.stack == stack]
        own = [places[i] for i in numbers]
        of_slots = sorted({row for place in own for row in place.rows})
        is_split = sum(len(place.rows) for place in own) > len(of_slots)
        for name, w in named.items():
            if is_split:
                rows = [_picked([of_slots.index(row) for row in p.rows], w) for p in own]
            else:
                rows = rows_by_place(own, repeats, w)
            for i, row in zip(numbers, rows):
                found[i][name] = row
    return found


def _picked(rows: Sequence[int], w: Tensor) -> Tensor:
    """Return the row of a tensor; those of a group, which are equally far apart."""
    if len(rows) == 1:
        return w[rows[0]]
    return w[rows[0] : rows[-1] + 1 : rows[1] - rows[0]]


def rows_by_place(places: Sequence[GroupPlace], repeats: Repeats, w: Tensor) -> list[Tensor]:
    """Return the rows of a tensor that has one for each slot of these places."""
    in_groups = [len(place.slots) > 1 for place in places]
    if len(places) == 1:
        return [w if in_groups[0] else w[0]]  # the gradient of unbind is a copy
    if not any(in_groups):
        return [*w.unbind(0)]
    before = in_groups.index(True)
    period = sum(in_groups)
    if before or len(places) > before + period:
        sizes = before, period * repeats.count, len(places) - before - period
        first, groups, last = w.split(sizes)
    else:
        first, groups, last = w[:0], w, w[:0]
    inside = [groups] if period == 1 else groups.unflatten(0, (repeats.count, period)).unbind(1)
    return [*first.unbind(0), *inside, *last.unbind(0)]


Step = Callable[[GroupPlace, Any, Sequence[Tensor]], Sequence[Tensor]]


def run_places(
    repeats: Repeats,
    places: Sequence[GroupPlace],
    rows: Sequence[Any],
    leaves: Sequence[Tensor],
    step: Step,
) -> Sequence[Tensor]:
    """Run all places in order, those of a group in a loop; return the last one's leaves.

    rows: by place, a tree of tensors. step: (place, an iteration's tree, leaves) -> leaves.
    """
    start, end = repeats.before, repeats.before + repeats.period

    def several(numbers: range, rows: Sequence[Any], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        for number, row in zip(numbers, rows):
            leaves = step(places[number], row, leaves)
        return leaves

    leaves = several(range(start), rows[:start], leaves)
    if repeats.count:
        flat, tree = pytree.tree_flatten([*rows[start:end]])

        def body(*inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            # run_loop passes the carry first, then this iteration's row of each tensor.
            row = pytree.tree_unflatten(inputs[len(leaves) :], tree)
            return [*several(range(start, end), row, inputs[: len(leaves)])], []

        leaves, _ = run_loop(body, leaves, flat, repeats.count)
    return several(range(end, len(places)), rows[end:], leaves)


# Kinds of layers: which of them one program computes, and which a stage has a slot for.
#
#     Gemma 2     s f s f s f s f      sliding and full attention: a group of two, four times
#     Gemma 3     s s s s s f s s ...  a group of six, and a remainder
#     DeepSeek    d m m m m m          a dense layer, and five mixtures
#
# Weights of layers with the same modules and shapes are stacked: they have one stack. A kind is a
# stack's layers with the same numbers and texts, of those attributes whose values repeat.


class Repeats(NamedTuple):
    """A sequence: `before` single items, `count` alike groups of `period` items, and the rest.

    No item is in a group if none repeats.
    """

    before: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.before + self.period * self.count

    @property
    def saved(self) -> int:
        """The items that a loop over the groups does not repeat."""
        return self.period * max(self.count - 1, 0)


def find_repeats(items: Sequence[Hashable]) -> Repeats:
    """Return the groups of which the most items repeat; the shortest group of these."""
    size, best = len(items), Repeats(len(items), 0, 0)
    for period in range(1, size // 2 + 1):
        for before in range(size - 2 * period + 1):
            if size - before - period <= best.saved:
                break
            group, count = items[before : before + period], 1
            while items[before + count * period :][:period] == group:
                count += 1
            best = max(best, Repeats(before, period, count), key=lambda each: each.saved)
    return best


class Slots(NamedTuple):
    """A stage's program: kinds, in order. places: each layer's (stage, slot)."""

    kinds: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    def blocks(self) -> list[list[int]]:
        """Return the numbers of each slot's layers."""
        of_slots: list[list[int]] = [[] for _ in self.kinds]
        for number, (_, slot) in enumerate(self.places):
            of_slots[slot].append(number)
        return of_slots


def find_slots(kinds: Sequence[int], stages: int, limit: int) -> Slots | None:
    """Return the shortest program for all stages; None if it has more slots than the limit.

    A stage takes the layers behind those of the stage before, each in the next slot of its kind.
    """
    size = len(kinds)
    for count in range(-(-size // stages), min(size, limit) + 1):
        windows = (tuple(kinds[start : start + count]) for start in range(size - count + 1))
        for slots in dict.fromkeys(windows):
            if (places := _filled(kinds, slots, stages)) is not None:
                used = sorted({slot for _, slot in places})
                places = tuple((stage, used.index(slot)) for stage, slot in places)
                return Slots(tuple(slots[slot] for slot in used), places)
    return None


def _filled(
    kinds: Sequence[int], slots: Sequence[int], stages: int
) -> tuple[tuple[int, int], ...] | None:
    """Return the layers' places, or None if some are left."""
    places: list[tuple[int, int]] = []
    for stage in range(stages):
        for slot, kind in enumerate(slots):
            if len(places) < len(kinds) and kinds[len(places)] == kind:
                places.append((stage, slot))
    return tuple(places) if len(places) == len(kinds) else None


def stacks_of(blocks: Sequence[nn.Module]) -> list[int]:
    """Return the number of each block's stack: blocks that differ in the values of weights."""
    owns = [own_names(block) for block in blocks]
    described = [(description(block), [*block.buffers()], hooks_of(block)) for block in blocks]

    def same(i: int, j: int) -> bool:
        one, other = described[i], described[j]
        alike = Alike({}, {})  # the values of buffers, and not their names
        return (
            one[0] == other[0]
            and all(map(alike, one[1], other[1]))
            and Alike(owns[i], owns[j])(one[2], other[2])
        )

    return numbered(range(len(blocks)), same)


def kinds_of(
    blocks: Sequence[nn.Module], stacks: Sequence[int], apart: Collection[int] = ()
) -> list[int]:
    """Return the number of each block's kind.

    An attribute of which no value repeats, such as a layer's number, says nothing of its kind.
    apart: blocks that may differ from all others.
    """
    values: list[tuple[int, ...]] = [(stack,) for stack in stacks]
    for stack in dict.fromkeys(stacks):
        layers = [layer for layer, each in enumerate(stacks) if each == stack]
        for differing in differing_attributes([blocks[layer] for layer in layers]).values():
            for column in differing.values():
                others = {n for layer, n in zip(layers, column.numbers) if layer not in apart}
                if len(others) > 1 and max(column.numbers) + 1 < len(layers):
                    for layer, number in zip(layers, column.numbers):
                        values[layer] += (number,)
    return numbered(values, lambda a, b: a == b)


def raise_unlike(blocks: Sequence[nn.Module], what: str) -> NoReturn:
    """Raise ShardingError that names the first difference of blocks that do not repeat."""
    first, *others = map(description, blocks)
    for i, other in enumerate(others, 1):
        if differ := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            raise ShardingError.here(
                f"blocks 0 and {i} of a {what} differ: {differ}",
                why="blocks with the same weights run one program, and no group of blocks repeats",
                fix=f"leave out of the {what} what is before and after the like blocks",
            )
    stacks = stacks_of(blocks)
    raise ShardingError.here(
        f"blocks 0 and {stacks.index(1)} of a {what} have buffers that differ",
        fix="pass what differs as arguments, or make it a parameter",
    )


def raise_additions(what: str, block: nn.Module, other: nn.Module) -> NoReturn:
    """Raise ShardingError for a block that reads modules which those in its slots lack."""
    names = [name for name in description(block) if name not in description(other)]
    raise ShardingError.here(
        f"a block of a {what} has modules that the others lack: {names}",
        why="it reads them in its stage, or computes something else than the others for the same "
        "arguments: each stage would have twice its share of programs",
        fix=f"call without a cache (use_cache=False); fewer stages; leave the block out of the "
        f"{what}",
    )
