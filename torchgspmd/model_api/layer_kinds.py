"""Kinds of layers: which of them one program computes, and which a stage has a slot for.

    Gemma 2     s f s f s f s f      sliding and full attention: a group of two, four times
    Gemma 3     s s s s s f s s ...  a group of six, and a remainder
    DeepSeek    d m m m m m          a dense layer, and five mixtures

Weights of layers with the same modules and shapes are stacked: they have one stack. A kind is a
stack's layers with the same numbers and texts, of those attributes whose values repeat.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, NoReturn

from torch import nn

from ..errors import ShardingError
from .alike import Alike, numbered, own_names
from .block_calls import differing_attributes, hooks_of


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
    described = [(_description(block), [*block.buffers()], hooks_of(block)) for block in blocks]

    def same(i: int, j: int) -> bool:
        one, other = described[i], described[j]
        alike = Alike({}, {})  # the values of buffers, and not their names
        return (
            one[0] == other[0]
            and all(map(alike, one[1], other[1]))
            and Alike(owns[i], owns[j])(one[2], other[2])
        )

    return numbered(range(len(blocks)), same)


def kinds_of(blocks: Sequence[nn.Module], stacks: Sequence[int]) -> list[int]:
    """Return the number of each block's kind.

    An attribute of which no value repeats, such as a layer's number, says nothing of its kind.
    """
    values: list[tuple[int, ...]] = [(stack,) for stack in stacks]
    for stack in dict.fromkeys(stacks):
        layers = [layer for layer, each in enumerate(stacks) if each == stack]
        for differing in differing_attributes([blocks[layer] for layer in layers]).values():
            for column in differing.values():
                if max(column.numbers) + 1 < len(layers):
                    for layer, number in zip(layers, column.numbers):
                        values[layer] += (number,)
    return numbered(values, lambda a, b: a == b)


def raise_unlike(blocks: Sequence[nn.Module], what: str) -> NoReturn:
    """Raise ShardingError that names the first difference of blocks that do not repeat."""
    first, *others = map(_description, blocks)
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


def _description(block: nn.Module) -> dict[str, object]:
    """Return the types of a block's modules, and shapes of its tensors, by their names."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    types = {name or type(m).__name__: type(m) for name, m in block.named_modules()}
    return {**types, **{name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors}}
