"""Where the blocks of keys are that travel round a ring, and the messages that devices exchange."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...custom_ops.attention_zigzag import chunks_of

# Position in the ring -> what is sent to it; position -> how many elements are received from it.
Message = tuple[dict[int, Tensor], dict[int, int]]
Arrival = Callable[[], dict[int, Tensor]]
Steps = Generator[Message, Arrival, Any]
Rows = tuple[slice, slice, bool]  # of queries, of keys, whether causal


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a ring are, and who needs them.

    n, me: devices, and the position of this one. queries, keys: of all devices together.
    rows, width: queries and keys of one device. balanced: they are in zigzag order.
    """

    n: int
    me: int
    causal: bool
    balanced: bool
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
        """Return whether queries of a device see keys of a block."""
        return self.balanced or not self.causal or self.queries != self.keys or block <= device

    def visible(self, block: int) -> list[Rows]:
        """Return the rows of this device and of a block to compute, in zigzag order."""
        half = self.rows // 2
        mine, theirs = chunks_of(self.me, self.n), chunks_of(block, self.n)
        places = [slice(0, half), slice(half, self.rows)]
        everything = slice(0, self.rows)
        low, high = (places[mine.index(f(mine))] for f in (min, max))
        if block == self.me:
            return [(low, low, True), (high, low, False), (high, high, True)]
        if min(theirs) < min(mine):
            return [(everything, places[theirs.index(min(theirs))], False)]
        return [(high, everything, False)]

    def pass_on(self, step: int, block: list[Tensor] | None, size: int) -> Message:
        """Return the message that takes blocks of keys and values to their next devices."""
        mine, coming = (self.me - step) % self.n, (self.before - step) % self.n
        sends = self.needed(mine, self.after)
        return (
            {self.after: packed(block)} if sends and block is not None else {},
            {self.before: size} if self.needed(coming, self.me) else {},
        )

    def hand_over(self, step: int, term: Tensor | None, size: int) -> Message:
        """Return the message that takes sums of gradients on, or home after the last device."""
        block, coming = (self.me - step) % self.n, (self.before - step) % self.n
        on = self.after == block or self.needed(block, self.after)
        receives: dict[int, int] = {}
        if self.needed(coming, self.before) and self.needed(coming, self.me):
            receives[self.before] = size
        last = (self.me + step) % self.n  # the device that has this one's block now
        next_one = (last + 1) % self.n
        if self.needed(self.me, last) and (
            next_one == self.me or not self.needed(self.me, next_one)
        ):
            receives[last] = size
        return ({} if term is None else {self.after if on else block: term}), receives


def packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [x.numel() for x in like])
    return [piece.view(x.shape) for piece, x in zip(pieces, like)]
