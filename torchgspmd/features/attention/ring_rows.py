"""Rings under a mask: a device gets those key rows that its queries see, from the rows' owner.

    forward    In step t device i computes with rows of block i - t. Meanwhile block i - t - 1's
               owner sends the next rows.
    backward   Rows travel again. The gradients of step t's rows go home while step t + 1 computes.

Every device has the expression of flex_attention's mask and all its buffers. So all bound it alike
(bounds.py), and know which rows each one sends. Of a boolean mask a device has its own queries'
rows, so devices first tell each other which keys they see. A step in which nobody needs anything is
left out. What a device needs of a block are runs of rows. Of a boolean mask it is one run, from the
first row to the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .call import AttentionCall, Gradients, Results, Upstream
from .flex_op import Flex, empty_terms, flex_tiles
from .op import Merged, computed, gradients
from .ring_blocks import Joint, Message, RingCall, RingOptions, Steps, packed, unpacked
from .tiles import Place, lse_dtype

# Parts of a device's queries, and of its keys, for which a mask is bounded.
QUERY_PIECES, KEY_PIECES = 8, 32
# Runs of a block's rows, at most: each is computed by itself. The smallest gaps are filled.
MOST_RUNS = 4
Runs = list[slice]


def rows_seen(
    change: Flex, place: Place, shape: Sequence[int], n: int, device: Any
) -> list[list[Runs]]:
    """Return the rows of each block that each device's queries see: [device][block].

    place: the whole sizes, and where dimensions before the queries begin. shape: a device's sizes,
    [b, heads of keys, groups, queries, keys].
    """
    queries, keys = pieces_of(place, shape, n)
    flat = [[piece for pieces in each for piece in pieces] for each in (queries, keys)]
    seen = change.blocks(shape, place, flat[0], flat[1], device) if all(flat) else None
    by_device = torch.ones(n, len(flat[1]), dtype=torch.bool, device=device)
    if seen is not None:
        parts = seen.some.split([len(pieces) for pieces in queries])
        by_device = torch.stack([part.any(0) for part in parts])
    found: list[list[Runs]] = []
    for device, (mine, row) in enumerate(zip(queries, by_device.tolist(), strict=True)):
        found.append([])
        for block, theirs in enumerate(keys):
            here = [x for x, is_seen in zip(theirs, row) if is_seen and mine]
            row, first = row[len(theirs) :], block * shape[-1]
            # A device's own rows need no message.
            runs = _runs([slice(a - first, b - first) for a, b in here], MOST_RUNS)
            found[-1].append(_runs(runs, 1) if device == block else runs)
    return found


def _runs(rows: Runs, most: int) -> Runs:
    """Join adjacent slices, and those with the smallest gaps, until there are no more than most."""
    gaps = sorted(b.start - a.stop for a, b in zip(rows, rows[1:]))
    filled = max(0, gaps[-most] if len(gaps) >= most else 0)
    joined: Runs = []
    for each in rows:
        if joined and each.start - joined[-1].stop <= filled:
            each = slice(joined.pop().start, each.stop)
        joined.append(each)
    return joined


def size_of_runs(runs: Runs) -> int:
    return sum(rows.stop - rows.start for rows in runs)


def pieces_of(place: Place, shape: Sequence[int], n: int) -> list[list[list[tuple[int, int]]]]:
    """Return each device's pieces [start, stop) of queries, and of keys."""
    return [
        [_pieces(i * size, min((i + 1) * size, end), count) for i in range(n)]
        for size, end, count in zip(
            shape[-2:], place.whole[-2:], (QUERY_PIECES, KEY_PIECES), strict=True
        )
    ]


def _pieces(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Split a range into pieces of one size, but for the last."""
    step = max(1, -(-(stop - start) // count))
    return [(i, min(i + step, stop)) for i in range(start, stop, step)]


class _Rows(NamedTuple):
    """One device's part of a ring. seen: see `rows_seen`; me: its position."""

    seen: list[list[Runs]]
    me: int
    ring: RingCall
    call: AttentionCall

    @property
    def n(self) -> int:
        return len(self.seen)

    def step(self, device: int, step: int) -> Runs:
        """Return the rows with which a device computes in a step."""
        return self.seen[device][(device - step) % self.n]

    def travels(self, step: int) -> bool:
        """Return whether any device needs another one's rows in a step."""
        steps = (self.step(i, step) for i in range(self.n))
        return 0 < step < self.n and any(map(size_of_runs, steps))

    def keys(self, step: int) -> Message:
        """Return the message that brings the rows for a step."""
        if not self.travels(step):
            return {}, {}
        there, owner = (self.me + step) % self.n, (self.me - step) % self.n
        sent = self.own(self.step(there, step))
        return (
            {there: packed(sent)} if sent[0].shape[-2] else {},
            self._received(owner, self.step(self.me, step)),
        )

    def terms(self, step: int, grads: Sequence[Tensor] | None) -> Message:
        """Return the message that brings a step's gradients home."""
        if not self.travels(step):
            return {}, {}
        there, owner = (self.me + step) % self.n, (self.me - step) % self.n
        return (
            {} if grads is None else {owner: packed(grads)},
            self._received(there, self.step(there, step)),
        )

    def _received(self, source: int, runs: Runs) -> dict[int, int]:
        count = sum(x.numel() for x in self.like(runs))
        return {source: count} if count else {}

    def own(self, runs: Runs) -> list[Tensor]:
        """Return some rows of the own keys and values."""
        whole = self.call.k, self.call.v
        if len(runs) == 1:
            return [x[..., runs[0], :] for x in whole]
        return [torch.cat([x[..., :0, :], *(x[..., r, :] for r in runs)], -2) for x in whole]

    def like(self, runs: Runs) -> list[Tensor]:
        """Return keys and values of the shapes that so many rows of any block have."""
        return [x[..., : size_of_runs(runs), :] for x in (self.call.k, self.call.v)]

    def _parts(self, step: int, keys: Sequence[Tensor]) -> Iterator[AttentionCall]:
        """Yield the calls between the own queries and each run of a step's rows."""
        block, ring, options = (self.me - step) % self.n, self.ring, RingOptions(*self.ring.options)
        query, at = self.me * self.call.q.shape[-2], 0
        for rows in self.step(self.me, step):
            first, count = block * self.call.k.shape[-2] + rows.start, rows.stop - rows.start
            region = [query, first, ring.queries, ring.keys, *options.place]
            mask = options.mask
            if mask is not None and mask.shape[-1] > 1:
                mask = mask[..., first : first + count]
            k, v = (x[..., at : at + count, :] for x in keys)
            call = self.call._replace(causal=False, k=k, v=v, mask=mask, region=region)
            yield call._replace(**dict(zip(("seed", "dropout"), options.dropout)))
            at += count

    def forward(self, step: int, keys: Sequence[Tensor]) -> Iterator[Results]:
        functions = RingOptions(*self.ring.options).functions
        for call in self._parts(step, keys):
            yield flex_tiles(call, functions).forward() if functions else computed(call)

    def backward(
        self, step: int, keys: Sequence[Tensor], upstream: Upstream, terms: Sequence[Tensor]
    ) -> Gradients:
        functions, found = RingOptions(*self.ring.options).functions, list[Gradients]()
        for call in self._parts(step, keys):
            tiles = flex_tiles(call, functions, terms) if functions else None
            found.append(tiles.backward(upstream) if tiles else gradients(call, upstream))
        q_grads, k_grads, v_grads = zip(*found)
        return cast(Tensor, sum(q_grads)), torch.cat(k_grads, -2), torch.cat(v_grads, -2)


def sends_rows(ring: RingCall) -> bool:
    """Return whether a mask may leave keys that a device does not need."""
    options = RingOptions(*ring.options)
    mask = options.mask
    return bool(options.functions) or (
        mask is not None and mask.dtype == torch.bool and mask.shape[-1] > 1
    )


def _rows_of(n: int, me: int, ring: RingCall, call: AttentionCall) -> Steps:
    options = RingOptions(*ring.options)
    region = [0, 0, ring.queries, ring.keys, *options.place]
    place = Place.of(call._replace(region=region))
    q, k = call.q, call.k
    shape = (*k.shape[:-2], q.shape[-3] // k.shape[-3], q.shape[-2], k.shape[-2])
    if options.functions:
        seen = rows_seen(Flex(*options.functions), place, shape, n, q.device)
        return _Rows(seen, me, ring, call)
    ends = _ends_seen(cast(Tensor, options.mask), n, k.shape[-2]).to(q.device)
    others = [i for i in range(n) if i != me]
    bits = packed([ends], k.dtype)
    arrival = yield dict.fromkeys(others, bits), dict.fromkeys(others, bits.numel())
    came = arrival() if others else {}
    tables = [unpacked(came[i], [ends])[0] if i in came else ends for i in range(n)]
    seen = [[[slice(*pair)] for pair in table] for table in torch.stack(tables).tolist()]
    return _Rows(seen, me, ring, call)


def _ends_seen(mask: Tensor, n: int, width: int) -> Tensor:
    """Return the first row of each block that any query sees, and the one behind the last [n, 2].

    mask: of the own queries, and all keys.
    """
    columns = mask.flatten(0, -2).any(0)
    blocks = torch.nn.functional.pad(columns, (0, n * width - columns.numel())).view(n, width)
    at = torch.arange(width, device=mask.device)
    first = torch.where(blocks, at, width).amin(1)
    stop = torch.where(blocks, at + 1, 0).amax(1)
    return torch.stack([first.minimum(stop), stop], 1)


def forward_by_rows(n: int, me: int, ring: RingCall, call: AttentionCall) -> Steps:
    """Run one device's steps; return the result and the logsumexp."""
    rows = yield from _rows_of(n, me, ring, call)
    merged, keys = Merged(call.q, call.v), rows.own(rows.step(me, 0))
    for step in range(n):
        # The next rows travel while these are computed.
        arrival = (yield rows.keys(step + 1)) if rows.travels(step + 1) else None
        if keys[0].shape[-2]:
            for results in rows.forward(step, keys):
                merged.add(slice(None), results)
        keys = _arrived(rows, step + 1, arrival() if arrival else {})
    return merged.result()


def backward_by_rows(
    n: int, me: int, ring: RingCall, call: AttentionCall, upstream: Upstream
) -> Steps:
    """Run one device's steps; return the gradients of its queries, keys, values and buffers."""
    rows = yield from _rows_of(n, me, ring, call)
    functions = RingOptions(*ring.options).functions
    terms_of_buffers = empty_terms(call.q, functions) if functions else []
    totals = [
        torch.zeros_like(x, dtype=lse_dtype(x), memory_format=torch.contiguous_format)
        for x in call[:3]
    ]
    keys, grads = rows.own(rows.step(me, 0)), None
    for step in range(n + 1):
        joint = Joint([rows.keys(step + 1), rows.terms(step - 1, grads)])
        travels = rows.travels(step + 1) or rows.travels(step - 1)
        arrival = (yield joint.message) if travels else None
        grads = None
        if step < n and keys[0].shape[-2]:
            q_grad, *grads = rows.backward(step, keys, upstream, terms_of_buffers)
            totals[0] += q_grad
            if step == 0:
                _add(totals[1:], rows.step(me, 0), grads)
        came, terms = joint.parts(arrival()) if arrival else ({}, {})
        keys = _arrived(rows, step + 1, came)
        there = (me + step - 1) % n
        if there in terms:
            home = rows.step(there, step - 1)
            _add(totals[1:], home, unpacked(terms[there], rows.like(home)))
    return *(x.to(y.dtype) for x, y in zip(totals, call[:3])), *terms_of_buffers


def _arrived(rows: _Rows, step: int, came: dict[int, Tensor]) -> list[Tensor]:
    like, owner = rows.like(rows.step(rows.me, step)), (rows.me - step) % rows.n
    return unpacked(came[owner], like) if owner in came else rows.like([])


def _add(totals: Sequence[Tensor], runs: Runs, terms: Sequence[Tensor]) -> None:
    for total, term in zip(totals, terms, strict=True):
        parts = term.split([rows.stop - rows.start for rows in runs], -2)
        for rows, part in zip(runs, parts, strict=True):
            total[..., rows, :] += part
