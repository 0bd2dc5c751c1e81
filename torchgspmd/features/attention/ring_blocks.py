"""Locate the key blocks that travel round a ring, and write the messages that devices exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .op import runs_of_rows


class LentRows(NamedTuple):
    """Which rows a device computes. rows: queries of a device before it lends any."""

    n: int
    me: int
    rows: int

    @property
    def partner(self) -> int:
        """The device that borrows this one's last rows, or lends it its own."""
        return self.n - 1 - self.me

    @property
    def kept(self) -> int:
        """The number of own rows that a device computes itself."""
        return self.rows - lent_by(self.me, self.n, self.rows)

    @property
    def borrowed(self) -> int:
        """The number of rows that a device computes for its partner."""
        return lent_by(self.partner, self.n, self.rows)

    def runs(self, total: int) -> list[tuple[slice, int]]:
        """Return the runs of adjacent rows, each with its first position.

        total: queries over all devices; rows behind the last one are padding.
        """
        own = (0, self.kept, self.me * self.rows)
        others = (self.kept, self.borrowed, (self.partner + 1) * self.rows - self.borrowed)
        return [
            (slice(row, row + valid), first)
            for row, count, first in (own, others)
            if (valid := min(count, total - first)) > 0
        ]


def lent_by(device: int, n: int, rows: int) -> int:
    """Return the number of rows that a device lends."""
    # In blocks: rows up to x see x**2 / 2, so the rows from `device` to x have a fair share, n / 2,
    # at this x.
    end = math.sqrt(device**2 + n)
    return max(0, round((device + 1 - end) * rows))


def sent_with_rows(
    n: int, rows: int, keys: float, lent: float, result: float, is_backward: bool
) -> float:
    """Return the bytes that the device sends that sends most.

    rows: queries of a device. keys: the bytes of a block's keys and values. lent, result: those of
    all rows of a device.
    """
    shares = [lent_by(device, n, rows) / max(rows, 1) for device in range(n)]
    return max(
        keys * blocks_needed((me + 1) % n, n)
        + keys * (blocks_needed(me, n) if is_backward else 0)
        + lent * shares[me]
        + result * shares[n - 1 - me]
        for me in range(n)
    )


def blocks_needed(device: int, n: int) -> int:
    """Return the number of other devices' blocks that a device computes with."""
    return max(device, n - 1 - device)


# Who computes for whom in a ring under a causal mask. NO_LOANS: every device for its own queries.
# LOANS_OF_STEPS: late devices lend all queries for some steps, and keys travel half way
# (lending.py). LOANS_OF_ROWS: they lend their last queries for all steps (LentRows).
NO_LOANS, LOANS_OF_STEPS, LOANS_OF_ROWS = "none", "steps", "rows"

# Position in the ring -> tensor to send; position -> elements to receive.
Message = tuple[dict[int, Tensor], dict[int, int]]
Arrival = Callable[[], dict[int, Tensor]]
Steps = Generator[Message, Arrival, Any]
Rows = tuple[slice, slice, list[int] | None]  # of queries, of keys; their region, if it is cut


class RingOptions(NamedTuple):
    """Operands that do not travel.

    place: for the dimensions before the queries, as in a region. dropout: the seed and the
    probability, or nothing. functions: flex_attention's buffers and expressions, or nothing.
    """

    mask: Tensor | None = None
    place: tuple[int, ...] = ()
    dropout: tuple[Any, ...] = ()
    functions: tuple[Any, ...] = ()


class RingCall(NamedTuple):
    """A ring's arguments behind its tensors, in a graph's order.

    queries, keys: over all devices. shards: how many shards are in zigzag order. loans: who
    computes for whom, e.g. NO_LOANS.
    """

    options: tuple[Any, ...]  # of RingOptions; a graph has plain tuples
    axes: str
    causal: bool
    scale: float
    queries: int
    keys: int
    shards: int | None
    loans: str

    @classmethod
    def of(cls, args: Sequence[Any]) -> RingCall:
        """Return the call in a ring's arguments, whose first ones are tensors."""
        return cls(*args[-len(cls._fields) :])


@dataclass(frozen=True)
class Blocks:
    """Where a ring's blocks are, and who needs them.

    n, me: the number of devices, and this one's position. rows, width: queries and keys on one
    device.
    """

    n: int
    me: int
    rows: int
    width: int
    ring: RingCall

    @property
    def steps(self) -> int:
        """The number of times that a block is passed on."""
        return self.n // 2 if self.ring.loans == LOANS_OF_STEPS else self.n - 1

    @property
    def after(self) -> int:
        return (self.me + 1) % self.n

    @property
    def before(self) -> int:
        return (self.me - 1) % self.n

    def needed(self, block: int, device: int) -> bool:
        """Return whether a device computes with a block, and not for a single step's loan."""
        if self.ring.loans == LOANS_OF_STEPS:
            return 0 <= device - block <= self.steps
        if self.ring.loans == LOANS_OF_ROWS:
            # Its partner may have later queries.
            return block <= max(device, self.n - 1 - device)
        # In zigzag order each device has late queries; other lengths have no common diagonal.
        return (
            bool(self.ring.shards)
            or not self.ring.causal
            or self.ring.queries != self.ring.keys
            or block <= device
        )

    @property
    def has_runs(self) -> bool:
        """Whether a device's queries lie apart from each other in the sequence."""
        return bool(self.ring.shards) or self.ring.loans == LOANS_OF_ROWS

    def visible(self, block: int) -> list[Rows]:
        """Return the rows to compute between this device and a block, where queries lie apart.

        Adjacent rows that see the same keys are joined.
        """
        theirs = self._runs(block, self.width)
        if self.ring.loans == LOANS_OF_ROWS:
            mine = LentRows(self.n, self.me, self.rows).runs(self.ring.queries)
        else:
            mine = self._runs(self.me, self.rows)
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
                    cut.append((rows, columns, [first, start, self.ring.queries, self.ring.keys]))
            for columns in _joined(seen):
                whole.setdefault((columns.start, columns.stop), []).append(rows)
        return cut + [
            (some, slice(*columns), None)
            for columns, rows in whole.items()
            for some in _joined(rows)
        ]

    def _runs(self, device: int, rows: int) -> list[tuple[slice, int]]:
        """Return a device's runs of adjacent rows, with their first positions."""
        first, total = device * rows, self.ring.queries
        if not self.ring.shards:
            return [(slice(0, min(rows, total - first)), first)] if first < total else []
        return [*runs_of_rows(first, rows, self.ring.shards, total)]

    def pass_on(self, step: int, block: list[Tensor] | None, size: int) -> Message:
        """Return the message that passes keys and values on to the next device."""
        if step >= self.steps:
            return {}, {}
        mine, coming = (self.me - step) % self.n, (self.before - step) % self.n
        sends = self.needed(mine, self.after)
        return (
            {self.after: packed(block)} if sends and block is not None else {},
            {self.before: size} if self.needed(coming, self.me) else {},
        )

    def hand_over(self, step: int, term: Tensor | None, size: int) -> Message:
        """Return the message that hands a gradient on, or home from the last device."""
        if not 1 <= step <= self.steps:
            return {}, {}  # the own block's term stays
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
    result: list[slice] = []
    for each in slices:
        if result and result[-1].stop == each.start:
            each = slice(result.pop().start, each.stop)
        result.append(each)
    return result


def packed(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return the elements of all tensors, as bits of a dtype."""
    return torch.cat([x.reshape(-1).view(dtype or x.dtype) for x in tensors])


def unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [size_of([x], flat.dtype) for x in like])
    # A copy, since a wider type needs aligned bits.
    return [
        (p if x.dtype == p.dtype else p.clone().view(x.dtype)).view(x.shape)
        for p, x in zip(pieces, like)
    ]


def size_of(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    """Return the number of elements of a dtype that have the tensors' bits."""
    return sum(x.numel() * x.itemsize for x in tensors) // dtype.itemsize


class Joint:
    """Several messages that travel as one."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages

    @property
    def message(self) -> Message:
        sends: dict[int, list[Tensor]] = {}
        receives: dict[int, int] = {}
        for each, counts in self.messages:
            for place, tensor in each.items():
                sends.setdefault(place, []).append(tensor)
            for place, count in counts.items():
                receives[place] = receives.get(place, 0) + count
        return {
            place: each[0] if len(each) == 1 else packed(each) for place, each in sends.items()
        }, receives

    def parts(self, came: dict[int, Tensor]) -> list[dict[int, Tensor]]:
        begin = dict.fromkeys(came, 0)
        parts: list[dict[int, Tensor]] = []
        for _, counts in self.messages:
            parts.append({p: came[p][begin[p] : begin[p] + n] for p, n in counts.items()})
            begin |= {p: begin[p] + n for p, n in counts.items()}
        return parts


def in_step(*all_steps: Steps) -> Generator[Message, Arrival, list[Any]]:
    """Run several computations of a device at once, whose messages travel together.

    Each computes while all messages of a step are on their way.
    """
    results: dict[int, Any] = {}
    arrivals: dict[int, Any] = dict.fromkeys(range(len(all_steps)))
    while True:
        messages: dict[int, Message] = {}
        for i in [i for i in arrivals if i not in results]:
            try:
                messages[i] = all_steps[i].send(arrivals[i])
            except StopIteration as done:
                results[i] = done.value
        if not messages:
            return [results[i] for i in arrivals]
        joint = Joint([*messages.values()])
        arrival = yield joint.message
        arrived = cache(lambda joint=joint, arrival=arrival: joint.parts(arrival()))
        for at, i in enumerate(messages):
            arrivals[i] = lambda arrived=arrived, at=at: arrived()[at]
