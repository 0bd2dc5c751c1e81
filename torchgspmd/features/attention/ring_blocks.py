"""Locate the key blocks that travel round a ring, and write the messages that devices exchange."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .zigzag import runs_of_rows

# Position in the ring -> tensor to send; position -> elements to receive.
Message = tuple[dict[int, Tensor], dict[int, int]]
Arrival = Callable[[], dict[int, Tensor]]
Steps = Generator[Message, Arrival, Any]
Rows = tuple[slice, slice, list[int] | None]  # of queries, of keys; their region, if it is cut


@dataclass(frozen=True)
class Blocks:
    """Where a ring's blocks are, and who needs them.

    n, me: the number of devices, and this one's position. queries, keys: over all devices.
    rows, width: queries and keys on one device. shards: how many are in zigzag order.
    """

    n: int
    me: int
    causal: bool
    shards: int | None
    queries: int
    keys: int
    rows: int
    width: int

    @property
    def after(self) -> int:
        return (self.me + 1) % self.n

    @property
    def before(self) -> int:
        return (self.me - 1) % self.n

    def needed(self, block: int, device: int) -> bool:
        """Return whether a device's queries see any key in a block."""
        # In zigzag order each device has late queries; other lengths have no common diagonal.
        return bool(self.shards) or not self.causal or self.queries != self.keys or block <= device

    def visible(self, block: int) -> list[Rows]:
        """Return the rows to compute between this device and a block, in zigzag order.

        Adjacent rows that see the same keys are joined.
        """
        mine, theirs = self._runs(self.me, self.rows), self._runs(block, self.width)
        cut: list[Rows] = []
        whole: dict[tuple[int, int], list[slice]] = {}
        for rows, first in mine:
            last = first + rows.stop - rows.start - 1
            seen: list[slice] = []
            for columns, start in theirs:
                # Keys that end at the first query are seen whole; the diagonal cuts the next ones.
                if start + columns.stop - columns.start - 1 <= first:
                    seen.append(columns)
                elif start <= last:
                    cut.append((rows, columns, [first, start, self.queries, self.keys]))
            for columns in _joined(seen):
                whole.setdefault((columns.start, columns.stop), []).append(rows)
        return cut + [
            (some, slice(*columns), None)
            for columns, rows in whole.items()
            for some in _joined(rows)
        ]

    def _runs(self, device: int, rows: int) -> list[tuple[slice, int]]:
        """Return a device's runs of adjacent rows, with their first positions."""
        return [*runs_of_rows(device * rows, rows, self.shards or 1, self.queries)]

    def pass_on(self, step: int, block: list[Tensor] | None, size: int) -> Message:
        """Return the message that passes keys and values on to the next device."""
        mine, coming = (self.me - step) % self.n, (self.before - step) % self.n
        sends = self.needed(mine, self.after)
        return (
            {self.after: packed(block)} if sends and block is not None else {},
            {self.before: size} if self.needed(coming, self.me) else {},
        )

    def hand_over(self, step: int, term: Tensor | None, size: int) -> Message:
        """Return the message that hands a gradient on, or home from the last device."""
        block, coming = (self.me - step) % self.n, (self.before - step) % self.n
        # To the next device while it has a term to add, else straight home.
        on = self.after == block or self.needed(block, self.after)
        receives: dict[int, int] = {}
        # A sum comes on only between devices that both have a term.
        if self.needed(coming, self.before) and self.needed(coming, self.me):
            receives[self.before] = size
        # The device that has this one's block now.
        last = (self.me + step) % self.n
        next_one = (last + 1) % self.n
        if self.needed(self.me, last) and (
            next_one == self.me or not self.needed(self.me, next_one)
        ):
            receives[last] = size
        return ({} if term is None else {self.after if on else block: term}), receives


def _joined(slices: Sequence[slice]) -> list[slice]:
    """Join adjacent slices."""
    result: list[slice] = []
    for each in slices:
        if result and result[-1].stop == each.start:
            each = slice(result.pop().start, each.stop)
        result.append(each)
    return result


def packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [x.numel() for x in like])
    return [piece.view(x.shape) for piece, x in zip(pieces, like)]
