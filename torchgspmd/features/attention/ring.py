"""Attention whose keys and values travel round a ring while each device computes with a block.

    forward    In step t device i has keys and values from block i - t, and sends them to i + 1.
               Results for blocks are merged by their logsumexp, in float32.
    backward   Keys and values travel again. From step 1 on device i receives the gradient for
               block i - t from device i - 1, adds its term, and sends it on. The last device sends
               it home, where step 0's term is added.

The ring sends as many bytes as gathers and reduce_scatters, and no device has all keys. Blocks that
only later queries see are not sent to earlier ones. A causal mask leaves all devices the same work
in zigzag order (op.py), or if late devices lend queries to early ones (lending.py). Under
masks of truth values only the rows that are seen travel (ring_rows.py). Source: Ring Attention,
arXiv 2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ...comm.collective import CollectiveBuilder, split_axes
from ...comm.kinds.all_gather import all_gather
from ...comm.kinds.kind import FusedKind
from ...compat.operators import c10d
from ...layout.mesh import Mesh
from ...rules.notation import Ints
from .call import (
    AttentionCall,
    Gradients,
    Results,
    Upstream,
    backward_flops,
    flops,
    of_backward,
)
from .lending import Backward, Forward, Lending, borrow, give_back, lend
from .op import Merged, computed, gradients
from .ring_blocks import (
    LOANS_OF_ROWS,
    LOANS_OF_STEPS,
    Arrival,
    Blocks,
    Joint,
    LentRows,
    Message,
    RingCall,
    RingOptions,
    Steps,
    in_step,
    packed,
    unpacked,
)
from .ring_rows import backward_by_rows, forward_by_rows, sends_rows
from .tiles import lse_dtype


class _Part(NamedTuple):
    rows: slice
    columns: slice
    call: AttentionCall

    def forward(self) -> Results:
        return computed(self.call)

    def backward(self, upstream: Upstream) -> Gradients:
        return gradients(self.call, upstream.in_rows(self.rows))


def _parts(blocks: Blocks, block: int, call: AttentionCall) -> Iterator[_Part]:
    """Yield the parts of a block to compute. call: with all queries and keys on the device."""
    ring = blocks.ring
    options = RingOptions(*ring.options)
    if blocks.has_runs:
        for rows, columns, region in blocks.visible(block):
            some = call.in_block(rows, columns)
            some = some._replace(causal=region is not None, region=region)
            yield _Part(rows, columns, some)
        return
    first = block * blocks.width
    # The mask does not travel: each device has the columns for all keys.
    mask = options.mask
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., first : first + blocks.width]
    rows = slice(None)
    if ring.loans == LOANS_OF_STEPS:
        rows = Lending(blocks.n, blocks.me, blocks.rows).kept(blocks.me - block)
    region = [blocks.me * blocks.rows, first, ring.queries, ring.keys, *options.place]
    changes = dict(zip(("seed", "dropout"), options.dropout))
    some = call._replace(causal=ring.causal, mask=mask, region=region, **changes)
    yield _Part(rows, slice(None), some.in_block(rows, slice(None)))


def _forward(blocks: Blocks, call: AttentionCall) -> Steps:
    merged = Merged(call.q, call.v)
    own = [call.k, call.v]
    block: list[Tensor] | None = own
    size = call.k.numel() + call.v.numel()
    for step in range(blocks.steps + 1):
        # The next block travels while this one is computed.
        arrival = (yield blocks.pass_on(step, block, size)) if step < blocks.steps else None
        if block is not None:
            here = call._replace(k=block[0], v=block[1])
            for part in _parts(blocks, (blocks.me - step) % blocks.n, here):
                merged.add(part.rows, part.forward())
        if arrival is not None:
            came = arrival()
            block = unpacked(came[blocks.before], own) if came else None
    return merged


def _backward(blocks: Blocks, call: AttentionCall, upstream: Upstream) -> Steps:
    q, k, v = call.q, call.k, call.v
    q_grad = torch.zeros_like(q, dtype=lse_dtype(q), memory_format=torch.contiguous_format)
    size = k.numel() + v.numel()
    total: Tensor | None = None
    block: list[Tensor] | None = [k, v]
    handed: Tensor | None = None
    for step in range(blocks.steps + 2):
        # A message has the next block, and the sum for the last one.
        joint = Joint([blocks.pass_on(step, block, size), blocks.hand_over(step - 1, handed, size)])
        arrival = yield joint.message
        term = None
        if block is not None and step <= blocks.steps:
            grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v)]
            here = call._replace(k=block[0], v=block[1])
            for part in _parts(blocks, (blocks.me - step) % blocks.n, here):
                x_grad, *others = part.backward(upstream)
                q_grad[..., part.rows, :] += x_grad
                for each, other in zip(grads, others):
                    each[..., part.columns, :] += other
            term = packed(grads)
        blocks_came, sums = joint.parts(arrival())
        # The own block's term stays, until the other devices' sum comes home.
        if total is None:
            total, term = term, None
        elif (source := (blocks.me + step - 1) % blocks.n) in sums:
            total = total + sums[source]
        if term is not None and blocks.before in sums:
            term += sums[blocks.before]
        handed = term
        block = unpacked(blocks_came[blocks.before], (k, v)) if blocks_came else None
    assert total is not None  # a device has its own block in step 0
    return q_grad, *unpacked(total, (k, v))


# ----------------------------------------------------------------------------- who drives the steps


def _on_rank(steps: Steps, like: Tensor, name: str, ranks: Sequence[int]) -> Any:
    """Run one device's steps over a process group. like: a tensor with the messages' dtype."""
    try:
        message = next(steps)
        while True:
            message = steps.send(_sent(*message, like, name, ranks))
    except StopIteration as done:
        return done.value


def _sent(
    sends: dict[int, Tensor], receives: dict[int, int], like: Tensor, name: str, ranks: Ints
) -> Arrival:
    """Start to send a message. ranks: the process group's rank at each ring position."""
    # all_to_all_single takes pieces by rank, not by position in the ring.
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    pieces = [sends[p] for p in order if p in sends]
    counts = [receives.get(p, 0) for p in order]
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else like.new_empty(0)
    begun = c10d.all_to_all_single(
        flat, counts, [sends[p].numel() if p in sends else 0 for p in order], name
    )

    def arrival() -> dict[int, Tensor]:
        parts = c10d.wait_tensor(begun).split(counts)
        return {p: part for p, part in zip(order, parts) if p in receives}

    return arrival


def _forward_steps(n: int, me: int, *args: Any) -> Steps:
    ring, (q, k, v) = RingCall.of(args), args[:3]
    call = AttentionCall(q, k, v, ring.causal, ring.scale)
    if sends_rows(ring):
        return (yield from forward_by_rows(n, me, ring, call))
    blocks = Blocks(n, me, call.q.shape[-2], call.k.shape[-2], ring)
    if ring.loans == LOANS_OF_ROWS:
        lent = LentRows(n, me, blocks.rows)
        (q,) = yield from borrow(lent, [call.q])
        merged = yield from _forward(blocks, call._replace(q=q))
        out, lse = merged.result()
        out, lse = yield from give_back(lent, [out, lse.unsqueeze(-1)])
        return out, lse.squeeze(-1)
    steps = _forward(blocks, call)
    if ring.loans != LOANS_OF_STEPS:
        return (yield from steps).result()
    loans = lend(Lending(n, me, blocks.rows), Forward(call), (ring.queries, ring.keys))
    returned, merged = yield from in_step(loans, steps)
    for rows, results in returned:
        merged.add(rows, results)
    return merged.result()


def _backward_steps(n: int, me: int, *args: object) -> Steps:
    ring = RingCall.of(args)
    call, upstream = of_backward(*args[:6], ring.causal, ring.scale)
    if sends_rows(ring):
        return (yield from backward_by_rows(n, me, ring, call, upstream))
    blocks = Blocks(n, me, call.q.shape[-2], call.k.shape[-2], ring)
    if ring.loans == LOANS_OF_ROWS:
        lent, (grad, out, lse) = LentRows(n, me, blocks.rows), upstream
        operands = [call.q, grad, out, lse.unsqueeze(-1)]
        q, grad, out, lse = yield from borrow(lent, operands)
        upstream = Upstream(grad, out, lse.squeeze(-1))
        q_grad, *others = yield from _backward(blocks, call._replace(q=q), upstream)
        (q_grad,) = yield from give_back(lent, [q_grad.to(call.q.dtype)])
        return q_grad, *others
    steps = _backward(blocks, call, upstream)
    if ring.loans != LOANS_OF_STEPS:
        q_grad, *others = yield from steps
        return q_grad.to(call.q.dtype), *others
    job = Backward(call, upstream)
    loans = lend(Lending(n, me, blocks.rows), job, (ring.queries, ring.keys))
    returned, (q_grad, *others) = yield from in_step(loans, steps)
    for rows, (grad,) in returned:
        q_grad[..., rows, :] += grad
    for total, term in zip(others, job.keys):
        total += term
    return q_grad.to(call.q.dtype), *others


def ring_forward(*args: Any) -> Any:
    *inputs, name, ranks, me = args
    return _on_rank(_forward_steps(len(ranks), me, *inputs), inputs[1], name, ranks)


def ring_backward(*args: Any) -> Any:
    *inputs, name, ranks, me = args
    return _on_rank(_backward_steps(len(ranks), me, *inputs), inputs[2], name, ranks)


def _simulate(run: Callable[..., Steps], mesh: Mesh, *args: object) -> list[Any]:
    """Run all devices' steps in lockstep."""
    axes = split_axes(RingCall.of(args).axes)
    steps: list[Steps] = []
    for rank in range(mesh.size):
        me = mesh.index(axes, mesh.coordinates(rank))
        steps.append(run(mesh.count(axes), me, *(_of_device(a, rank) for a in args)))
    results: list[Any] = [None] * mesh.size
    for group in mesh.groups(axes):
        arrivals: list[Any] = [None] * len(group)
        # Every round collects one message from each device, then delivers them all.
        while any(results[rank] is None for rank in group):
            messages: list[Message] = []
            for rank, arrival in zip(group, arrivals):
                try:
                    messages.append(steps[rank].send(arrival))
                except StopIteration as done:
                    results[rank] = done.value
            arrivals = [
                partial(dict, {source: messages[source][0][i] for source in receives})
                for i, (_, receives) in enumerate(messages)
            ]
    return results


def _of_device(argument: Any, rank: int) -> Any:
    if isinstance(argument, tuple):
        return tuple(_of_device(a, rank) for a in cast("tuple[Any, ...]", argument))
    return cast("list[Any]", argument)[rank] if isinstance(argument, list) else argument


def _lower(runs: Callable[..., object], build: CollectiveBuilder, *args: object) -> fx.Node:
    return build.call(runs, *args, *build.ring_position(RingCall.of(args).axes))


_PICTURE = """
        device 0   q0 k0 v0   ->   attention of q0 to k0 and k1
        device 1   q1 k1 v1   ->   attention of q1 to k0 and k1
    """
ring_attention = FusedKind(
    feature="attention",
    name="ring_attention",
    signature="ring_attention(q, k, v, options, axes, causal, scale, queries, keys, shards, loans)",
    meaning="""Return attention of the device's queries to all keys, and the logsumexp.
        Keys and values travel over `axes`. shards: for which tokens are in zigzag order. loans:
        whether devices compute for others.""",
    picture=_PICTURE,
    replaces=all_gather,
    simulate=partial(_simulate, _forward_steps),
    # Each device computes with n blocks; k is one of them.
    flops=lambda n, *shapes: n * flops(*shapes),
    lower=partial(_lower, ring_forward),
    runs=(ring_forward,),
)
ring_attention_backward = FusedKind(
    feature="attention",
    name="ring_attention_backward",
    signature="ring_attention_backward(grad, q, k, v, out, lse, options, axes, causal, ...)",
    meaning="Return the gradients of the device's queries, keys and values.",
    picture=_PICTURE,
    replaces=all_gather,
    simulate=partial(_simulate, _backward_steps),
    flops=lambda n, *shapes: n * backward_flops(*shapes),
    lower=partial(_lower, ring_backward),
    runs=(ring_backward,),
)
