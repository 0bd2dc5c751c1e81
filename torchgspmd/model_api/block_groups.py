"""Blocks in groups that repeat: one trace for each place of a group, in a loop over the groups.

    slots       0 1 2 3 4 5 6       kinds d m n m n m n: 1 before, a group of 2, 3 times
    places      0 | 1 2             slot 0; slots 1, 3, 5; slots 2, 4, 6

A slot is a block of a stack, or in a pipeline the blocks that the stages have at one point of their
program. A place's row of a weight is [...] outside of the loop, and [groups, ...] in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..capture.rewrites.loop_trace import run_loop
from ..compat.private_apis import _pytree as pytree
from .block_arguments import BlockArguments, PlaceArguments
from .layer_kinds import Repeats, find_repeats


class GroupPlace(NamedTuple):
    """A part of the program that stands for blocks.

    numbers: theirs. slots: those with these blocks, by group. stack: of their weights.
    """

    numbers: tuple[int, ...]
    slots: tuple[int, ...]
    stack: int
    arguments: PlaceArguments


def groups_of(
    kinds: Sequence[int], slots: Sequence[Sequence[int]], arguments: BlockArguments
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
) -> list[GroupPlace]:
    """Return the program's places. slots: each one's block numbers. stacks: by block."""
    found: list[GroupPlace] = []
    groups = [
        tuple(repeats.before + place + repeats.period * i for i in range(repeats.count))
        for place in range(repeats.period)
    ]
    before, after = range(repeats.before), range(repeats.end, len(slots))
    for own in (*((slot,) for slot in before), *groups, *((slot,) for slot in after)):
        numbers = tuple(number for slot in own for number in slots[slot])
        found.append(GroupPlace(numbers, own, stacks[numbers[0]], arguments.of(numbers)))
    return found


def rows_of_places(
    places: Sequence[GroupPlace], repeats: Repeats, weights: Sequence[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Return each place's rows of weights, which are [slots of the stack, ...], by stack."""
    found: list[dict[str, Tensor]] = [{} for _ in places]
    for stack, named in enumerate(weights):
        own = [i for i, place in enumerate(places) if place.stack == stack]
        for name, w in named.items():
            for i, row in zip(own, rows_by_place([places[i] for i in own], repeats, w)):
                found[i][name] = row
    return found


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
