"""Attention whose keys and values travel round a ring, while each device computes with a block.

    forward    In step t device i has block i - t of keys and values, and sends it to device i + 1.
               Results for blocks are merged by their logsumexp, in float32.
    backward   Keys and values travel again. From step 1 on device i adds its term to the gradient
               of block i - t, which came from device i - 1, and sends it on. The last one sends it
               home, where the term of step 0 is added.

The bytes of gathers and reduce_scatters are sent, and nobody has all keys. Blocks that only later
queries see stay away from earlier ones. In zigzag order (zigzag.py) a causal
mask leaves all devices the same work.
Source: Ring Attention, arXiv 2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...comm.collective import split_axes
from ...comm.collective_builder import CollectiveBuilder
from ...comm.kinds.all_gather import all_gather
from ...comm.kinds.kind import FusedKind
from ...compat.operators import c10d
from ...layout.mesh import Mesh
from .flex_op import flex_tiles
from .op import attention_backward_in_blocks, attention_in_blocks
from .ring_blocks import Arrival, Blocks, Message, Steps, packed, unpacked
from .tiles import lse_dtype
from .zigzag import Merged

Options = tuple[Tensor | None, tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]
"""The mask, the place of the dimensions before the queries, the seed and p of dropout, and the
functions of flex_attention."""


def _calls(blocks: Blocks, block: int, options: Options) -> list[tuple[slice, slice, bool, Any]]:
    """Return the rows of queries and keys, and the last arguments, of calls for a block."""
    if blocks.shards:
        return [
            (rows, columns, region is not None, (None, region))
            for rows, columns, region in blocks.visible(block)
        ]
    first = block * blocks.width
    mask, place, dropout, _ = options
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., first : first + blocks.width]
    region = [blocks.me * blocks.rows, first, blocks.queries, blocks.keys, *place]
    return [(slice(None), slice(None), blocks.causal, (mask, region, *dropout))]


def _forward(
    blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, options: Options, scale: float
) -> Steps:
    """Compute the result and its logsumexp of one device."""
    merged = Merged(q, v)
    block: list[Tensor] | None = [k, v]
    size = k.numel() + v.numel()
    for step in range(blocks.n):
        arrival = (yield blocks.pass_on(step, block, size)) if step < blocks.n - 1 else None
        if block is not None:
            keys, values = block
            for rows, columns, causal, rest in _calls(
                blocks, (blocks.me - step) % blocks.n, options
            ):
                x, y, z = q[..., rows, :], keys[..., columns, :], values[..., columns, :]
                if functions := options[3]:
                    merged.add(rows, *flex_tiles(x, y, z, functions, scale, rest[1]).forward())
                else:
                    merged.add(rows, *attention_in_blocks(x, y, z, causal, scale, *rest))
        if arrival is not None:
            came = arrival()
            block = unpacked(came[blocks.before], (k, v)) if came else None
    return merged.result()


def _backward(
    blocks: Blocks,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    scale: float,
) -> Steps:
    """Compute the gradients of q, of k and of v of one device."""
    q_grad = torch.zeros_like(q, dtype=lse_dtype(q), memory_format=torch.contiguous_format)
    size = k.numel() + v.numel()
    own: Tensor | None = None
    home: Tensor | None = None
    block: list[Tensor] | None = [k, v]
    handed: tuple[int, Arrival] | None = None
    for step in range(blocks.n):
        arrival = (yield blocks.pass_on(step, block, size)) if step < blocks.n - 1 else None
        term = None
        if block is not None:
            grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v)]
            keys, values = block
            for rows, columns, causal, rest in _calls(
                blocks, (blocks.me - step) % blocks.n, options
            ):
                g, x, o = (t[..., rows, :] for t in (grad, q, out))
                y, z, total_lse = keys[..., columns, :], values[..., columns, :], lse[..., rows]
                if functions := options[3]:
                    tiles = flex_tiles(x, y, z, functions, scale, rest[1])
                    x_grad, *others = tiles.backward(g, o, total_lse)
                else:
                    x_grad, *others = attention_backward_in_blocks(
                        g, x, y, z, o, total_lse, causal, scale, *rest
                    )
                q_grad[..., rows, :] += x_grad
                for total, other in zip(grads, others):
                    total[..., columns, :] += other
            term = packed(grads)
        if handed is not None:
            came = handed[1]()
            if (source := (blocks.me + handed[0]) % blocks.n) in came:
                home = came[source]
            if term is not None and blocks.before in came:
                term += came[blocks.before]
        if step == 0:
            own = term
        else:
            handed = step, (yield blocks.hand_over(step, term, size))
        if arrival is not None:
            came = arrival()
            block = unpacked(came[blocks.before], (k, v)) if came else None
    if handed is not None:
        came = handed[1]()
        if (source := (blocks.me + handed[0]) % blocks.n) in came:
            home = came[source]
    assert own is not None  # a device has its own block in step 0
    total = own if home is None else own + home
    return q_grad.to(q.dtype), *unpacked(total, (k, v))


# ----------------------------------------------------------------------------- who drives the steps


def _on_rank(steps: Steps, like: Tensor, name: str, ranks: Sequence[int]) -> Any:
    """Run the steps of one device, whose messages go to a process group. like: has their dtype."""
    try:
        message = next(steps)
        while True:
            message = steps.send(_sent(*message, like, name, ranks))
    except StopIteration as done:
        return done.value


def _sent(
    sends: dict[int, Tensor],
    receives: dict[int, int],
    like: Tensor,
    name: str,
    ranks: Sequence[int],
) -> Arrival:
    """Start to send a message. ranks: of positions in the ring, in the process group."""
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


def _simulated(mesh: Mesh, axes: str, steps: Sequence[Steps]) -> list[Any]:
    """Run the steps of all devices in lockstep."""
    results: list[Any] = [None] * mesh.size
    for group in mesh.groups(split_axes(axes)):
        arrivals: list[Any] = [None] * len(group)
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


def _forward_steps(
    n: int,
    me: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    axes: str,
    causal: bool,
    scale: float,
    queries: int,
    keys: int,
    shards: int | None,
) -> Steps:
    blocks = Blocks(n, me, causal, shards, queries, keys, q.shape[-2], k.shape[-2])
    return (yield from _forward(blocks, q, k, v, options, scale))


def _backward_steps(
    n: int,
    me: int,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    axes: str,
    causal: bool,
    scale: float,
    queries: int,
    keys: int,
    shards: int | None,
) -> Steps:
    blocks = Blocks(n, me, causal, shards, queries, keys, q.shape[-2], k.shape[-2])
    return (yield from _backward(blocks, grad, q, k, v, out, lse, options, scale))


def ring_forward(*args: Any) -> Any:
    """Compute ring_attention on one device."""
    *inputs, name, ranks, me = args
    return _on_rank(_forward_steps(len(ranks), me, *inputs), inputs[1], name, ranks)


def ring_backward(*args: Any) -> Any:
    """Compute ring_attention_backward on one device."""
    *inputs, name, ranks, me = args
    return _on_rank(_backward_steps(len(ranks), me, *inputs), inputs[2], name, ranks)


def _simulate(steps: Callable[..., Steps], mesh: Mesh, *args: Any) -> list[Any]:
    axes: str = args[-6]
    names = split_axes(axes)
    return _simulated(
        mesh,
        axes,
        [
            steps(
                mesh.count(names),
                mesh.index(names, mesh.coordinates(rank)),
                *(_of_device(a, rank) for a in args),
            )
            for rank in range(mesh.size)
        ],
    )


def _of_device(argument: Any, rank: int) -> Any:
    """Return what a device has of an argument, which may be a tuple of such."""
    if isinstance(argument, tuple):
        return tuple(_of_device(a, rank) for a in cast("tuple[Any, ...]", argument))
    return cast("list[Any]", argument)[rank] if isinstance(argument, list) else argument


def _lower(runs: Callable[..., Any], build: CollectiveBuilder, *args: Any) -> fx.Node:
    return build.call(runs, *args, *build.ring_position(args[-6]))


def _flops(n: int, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any) -> int:
    return 2 * math.prod(q[:-1]) * n * k[-2] * (q[-1] + v[-1])


def _backward_flops(n: int, grad: Any, *shapes: Any) -> int:
    q, k, v = shapes[:3]
    return 2 * math.prod(q[:-1]) * n * k[-2] * (3 * q[-1] + 2 * v[-1])


_PICTURE = """
        device 0   q0 k0 v0   ->   attention of q0 to k0 and k1
        device 1   q1 k1 v1   ->   attention of q1 to k0 and k1
    """
ring_attention = FusedKind(
    feature="attention",
    name="ring_attention",
    signature="ring_attention(q, k, v, options, axes, causal, scale, queries, keys, shards)",
    meaning="""Return attention of the device's queries to all keys, and the logsumexp.
        Keys and values travel over `axes`. shards: for which tokens are in zigzag order.""",
    picture=_PICTURE,
    replaces=all_gather,
    simulate=partial(_simulate, _forward_steps),
    flops=_flops,
    lower=partial(_lower, ring_forward),
    runs=ring_forward,
)
ring_attention_backward = FusedKind(
    feature="attention",
    name="ring_attention_backward",
    signature="ring_attention_backward(grad, q, k, v, out, lse, options, axes, causal, ...)",
    meaning="Return the gradients of the device's queries, keys and values.",
    picture=_PICTURE,
    replaces=all_gather,
    simulate=partial(_simulate, _backward_steps),
    flops=_backward_flops,
    lower=partial(_lower, ring_backward),
    runs=ring_backward,
)
