"""Causal rings in which late devices, that have more to do, lend queries to early ones.

    step    device 0      device 1      device 2      device 3
    0       q0 k0         q1 k1         q2 k2         q3 k3         queries and keys of a block
    1       q3 k0         q1 k0         q2 k1         q3 k2
    2       half q2 k0    half q3 k1    half q2 k0    half q3 k1

Tokens stay in their order. In step t device i has the keys of device i - t. If i < t, it would see
no keys: it computes with its own keys for the queries of device n + i - t, and returns the results.
All devices have the same work, and keys travel half way round. In the middle step of an even ring
two devices have each pair, so both compute half of the rows. Source: DistFlashAttention
(arXiv 2310.03294).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import AttentionCall, Upstream
from .op import computed, gradients
from .ring_blocks import Arrival, LentRows, Message, packed, size_of, unpacked
from .tiles import empty_results

# Bytes of a logsumexp, at least.
LSE_ITEMSIZE = 4
Lent = tuple[slice, list[Tensor]]  # rows of the own queries, and their results
Exchange = Generator[Message, Arrival, list[Tensor]]


class Lending(NamedTuple):
    """Who computes for whom. rows: queries of a device."""

    n: int
    me: int
    rows: int

    @property
    def steps(self) -> int:
        return self.n // 2

    def lent(self, step: int) -> slice:
        """Return the rows that are lent in a step, of a device that lends."""
        return slice(self.rows // 2 if 2 * step == self.n else 0, self.rows)

    def kept(self, step: int) -> slice:
        """Return the rows that a device computes itself, with the block that it has in a step."""
        return slice(0, self.rows // 2 if 2 * step == self.n else self.rows)

    def helper(self, step: int) -> int | None:
        """Return the device that computes for this one."""
        at = self.me - self.n + step
        return at if 1 <= step <= self.steps and at >= 0 else None

    def owner(self, step: int) -> int | None:
        """Return the device for which this one computes."""
        return self.me - step + self.n if 1 <= step <= self.steps and self.me < step else None


def sent_bytes(n: int, keys: float, lent: float, result: float, is_backward: bool) -> float:
    """Return the bytes that the device sends that sends most.

    keys: those of a block's keys and values. lent, result: those of all rows of a device.
    """
    steps = n // 2

    def shares(first: int) -> float:
        """Return in how many steps from `first` on rows are lent; the middle step has half."""
        count = max(0, steps + 1 - first)
        return count - 0.5 if count and n % 2 == 0 else count

    return max(
        keys * (min(steps, me + 1) if me < n - 1 else 0)
        + keys * (min(steps, me) if is_backward else 0)
        + lent * shares(n - me)
        + result * shares(me + 1)
        for me in range(n)
    )


class Forward:
    """A device's part in the loans: lends queries; computes results and logsumexps."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call

    def lent(self, rows: slice) -> list[Tensor]:
        """Return the operands of the device's rows."""
        return [self.call.q[..., rows, :]]

    def like(self, rows: slice) -> list[Tensor]:
        """Return tensors with the shapes and dtypes of the rows' results."""
        return [*empty_results(self.call.q[..., rows, :], self.call.k, self.call.v)]

    def serve(self, tensors: list[Tensor], region: list[int]) -> list[Tensor]:
        """Compute another device's rows with the own keys. region: as in AttentionCall."""
        (q,) = tensors
        return [*computed(self.call._replace(q=q, region=region))]


class Backward:
    """Lends queries and results' gradients; computes queries' gradients.

    keys: terms of the gradients of the own keys and values, for queries of others.
    """

    def __init__(self, call: AttentionCall, upstream: Upstream) -> None:
        self.call, self.upstream = call, upstream
        self.keys: list[Tensor] = []

    def lent(self, rows: slice) -> list[Tensor]:
        return [self.call.q[..., rows, :], *self.upstream.in_rows(rows)]

    def like(self, rows: slice) -> list[Tensor]:
        return self.lent(rows)[:1]

    def serve(self, tensors: list[Tensor], region: list[int]) -> list[Tensor]:
        q, *upstream = tensors
        q_grad, *terms = gradients(self.call._replace(q=q, region=region), Upstream(*upstream))
        self.keys = [a + b for a, b in zip(self.keys, terms)] if self.keys else terms
        return [q_grad]


Job = Forward | Backward


def lend(lending: Lending, job: Job, whole: Sequence[int]) -> Generator[Message, Arrival, Any]:
    """Lend and serve queries; return each loan's rows and results.

    whole: the numbers of queries and keys over all devices. A message has queries for the next
    step, and the results of the last one.
    """
    pending: Arrival | None = None
    results: list[Tensor] = []
    returned: list[Lent] = []
    for step in range(lending.steps + 3):
        if step < lending.steps + 2:
            arrival = yield _message(lending, job, step, results)
        came = pending() if pending else {}
        if (owner := lending.owner(step)) is not None:
            rows = lending.lent(step)
            region = [owner * lending.rows + rows.start, lending.me * lending.rows, *whole]
            results = job.serve(unpacked(came[owner], job.lent(rows)), region)
        if (helper := lending.helper(step - 2)) is not None:
            rows = lending.lent(step - 2)
            returned.append((rows, unpacked(came[helper], job.like(rows))))
        pending = arrival
    return returned


def _message(lending: Lending, job: Job, step: int, results: list[Tensor]) -> Message:
    sends: dict[int, Tensor] = {}
    receives: dict[int, int] = {}
    like = job.lent(slice(0))[0].dtype
    # Queries for the next step.
    ahead = lending.lent(step + 1)
    if (helper := lending.helper(step + 1)) is not None:
        sends[helper] = packed(job.lent(ahead), like)
    if (owner := lending.owner(step + 1)) is not None:
        receives[owner] = size_of(job.lent(ahead), like)
    # Results of the last step.
    if (owner := lending.owner(step - 1)) is not None:
        sends[owner] = packed(results, like)
    if (helper := lending.helper(step - 1)) is not None:
        receives[helper] = size_of(job.like(lending.lent(step - 1)), like)
    return sends, receives


# ------------------------------------------------------------------------- rows lent for all steps


def borrow(lent: LentRows, tensors: Sequence[Tensor]) -> Exchange:
    """Send the rows that are lent; return those that a device computes: own, then borrowed ones.

    tensors: [..., rows, width].
    """
    like = [x[..., :1, :].expand(*x.shape[:-2], lent.borrowed, -1) for x in tensors]
    came = yield from _exchange(lent, [x[..., lent.kept :, :] for x in tensors], like)
    return [torch.cat([x[..., : lent.kept, :], y], -2) for x, y in zip(tensors, came)]


def give_back(lent: LentRows, tensors: Sequence[Tensor]) -> Exchange:
    """Send borrowed rows back; return a device's own ones. tensors: as `borrow` returns them."""
    count = lent.rows - lent.kept
    like = [x[..., :1, :].expand(*x.shape[:-2], count, -1) for x in tensors]
    came = yield from _exchange(lent, [x[..., lent.kept :, :] for x in tensors], like)
    return [torch.cat([x[..., : lent.kept, :], y], -2) for x, y in zip(tensors, came)]


def _exchange(lent: LentRows, mine: Sequence[Tensor], like: Sequence[Tensor]) -> Exchange:
    """Send rows to the partner, and return rows from it, which have the shapes of `like`."""
    dtype = mine[0].dtype
    # A wider type's bits have to lie next to each other.
    sent = [x.contiguous() for x in mine]
    arrival = yield (
        {lent.partner: packed(sent, dtype)} if mine[0].numel() else {},
        {lent.partner: size_of(like, dtype)} if like[0].numel() else {},
    )
    came = arrival()
    return unpacked(came[lent.partner], like) if came else [*like]
