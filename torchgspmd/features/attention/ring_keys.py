"""Mark the attention whose keys and values travel round a ring, and send them twice.

before   %k_g = all_gather(%k, 2, seq);    %y = attention(%q, %k_g, %v_g)
                                           %dq, %dk, %dv = attention_backward(..., %k_g, %v_g)
after    %k_g = all_gather(%k, 2, seq);    %y = attention(%q, %k_g, %v_g)              ring
         %k_g_1 = all_gather(%k, 2, seq);  %dq, ... = attention_backward(..., %k_g_1)  ring
rings    %y = ring_attention(%q, %k, %v, (None, (), (), ()), seq, ...)          after localize
         %dq, %dk_rs, %dv_rs = ring_attention_backward(..., %k, %v, ..., seq, ...)
needs    the partitioned program
ensures  `replace_by_rings` can replace gathers and reduce_scatters by a ring
source   Ring Attention, arXiv 2310.01889

A ring sends as many bytes as the gathers, and keeps at most two blocks. A transfer is hidden if a
device computes with one block for longer than the next block travels. Only then, or to save
memory, keys are sent again in the backward. A loop stacks the shards that its backward gathers. The
table RINGS names the operations that a ring computes, and how.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...comm.kinds import CollectiveKind, FusedKind, reduce_scatter
from ...compat.fx_nodes import origin_of
from ...compat.operators import aten
from ...fx_passes.ir import results_of
from ...fx_passes.schedule.liveness import bytes_of
from ...fx_passes.units import size_text
from ...layout.mesh import Mesh
from ...rules.custom_ops.loops import ROW, STACK, mark_of
from ...shard_spec import Axes, ShardSpec
from .call import AttentionCall, of_backward
from .flex_op import BACKWARDS
from .lending import LSE_ITEMSIZE, sent_bytes
from .mask_shares import Masks
from .ring import ring_attention, ring_attention_backward
from .ring_blocks import LOANS_OF_ROWS, LOANS_OF_STEPS, NO_LOANS, RingOptions, sent_with_rows

Arguments = Callable[[tuple[Any, ...]], tuple[bool, float, RingOptions]]


class Ring(NamedTuple):
    """How a ring computes an operation.

    factor: for the queries, which the ring's axes shard. queries: their index among the operands;
    keys and values follow. scatters: the collective that reduces the gradients of k and v. shards:
    the index of the shard count if tokens are in zigzag order, else None. arguments: returns
    causal, the scale, and the ring's options.
    """

    kind: FusedKind
    factor: str
    queries: int
    scatters: CollectiveKind | None
    shards: int | None
    arguments: Arguments

    def operands(self, args: tuple[object, ...]) -> tuple[Any, ...]:
        """Return a call's tensors, without those in the options."""
        return args[: self.queries + 3 + (2 if self.scatters else 0)]


def _of_call(call: AttentionCall) -> tuple[bool, float, RingOptions]:
    place = tuple(call.region[4:] if call.region else ())
    return call.causal, call.scale, RingOptions(call.mask, place, call.modifiers)


def _zigzag(scale: int) -> Arguments:
    """Return `arguments` for a call in zigzag order. scale: the index of the scale."""
    return lambda args: (True, args[scale], RingOptions())


def _flex(at: int) -> Arguments:
    """Return `arguments` for a call with buffers and functions. at: the index of the buffers."""

    def arguments(args: tuple[Any, ...]) -> tuple[bool, float, RingOptions]:
        buffers, *texts, scale = args[at : at + 5]
        place = tuple(args[at + 6][4:] if len(args) > at + 6 else ())
        return False, scale, RingOptions(place=place, functions=(tuple(buffers), *texts))

    return arguments


_ours = torch.ops.torchgspmd
_forward = partial(Ring, ring_attention, "s", 0, None)
_backward = partial(Ring, ring_attention_backward, "s", 1, reduce_scatter)
RINGS: dict[Any, Ring] = {
    _ours.attention.default: _forward(None, lambda args: _of_call(AttentionCall(*args))),
    _ours.attention_backward.default: _backward(None, lambda args: _of_call(of_backward(*args)[0])),
    _ours.flex_attention.default: _forward(None, _flex(3)),
    **{op._opoverload: _backward(None, _flex(6)) for op in BACKWARDS},
    _ours.zigzag_attention.default: _forward(4, _zigzag(3)),
    _ours.zigzag_attention_backward.default: _backward(7, _zigzag(6)),
}


def mark_rings(
    graph: fx.Graph,
    mesh: Mesh,
    masks: Masks,
    *,
    memory: bool = False,
    lends: bool = True,
) -> bool:
    """Rewrite the graph in place; return whether anything changed.

    masks: what planning knows of them. memory: it counts, not time. lends: late devices may lend
    queries to early ones.
    """
    changed, flops_per_byte = False, masks.flops_per_byte
    for node in list(graph.nodes):
        ring = RINGS.get(node.target)
        if ring is None:
            continue
        axes = _axes(node, ring)
        share, masked = masks.share(node, mesh.count(axes)), masks.ring(node, mesh.count(axes))
        if masked is not None and ring.scatters is None:
            _note(node, axes, mesh, masked.described())
        if node.meta.get("ring") or not _fits(node, ring):
            continue
        gathers = _gathers(node, ring)
        # All users of the gathers have to go round, else the gathers stay and nothing is saved.
        users = list(dict.fromkeys(user for gather in gathers for user in gather.users))
        stacks = [user for user in users if user.target is STACK]
        users = [user for user in users if user.target is not STACK]
        if (
            all(u.target in RINGS and _fits(u, RINGS[u.target]) for u in users)
            and all(map(_returns, stacks))
            and (memory or share < 1 or _is_hidden(node, ring, mesh, flops_per_byte))
        ):
            for stack in stacks:
                # Stack key shards in a loop, and gather them where its backward takes a row.
                gather: Any = mark_of(stack).value
                shard = gather.args[0]
                spec: ShardSpec = shard.meta["spec"]
                # The iterations come first in a stack, and no axis shards them.
                rows = ShardSpec(((), *spec.dims))
                stack.replace_input_with(gather, shard)
                _lay_out(stack, spec, rows)
                for row in list(stack.users):
                    _lay_out(row, rows, spec)
                    with graph.inserting_after(row):
                        own = graph.node_copy(gather)
                    row.replace_all_uses_with(own)
                    own.args = (row, *gather.args[1:])
                    own.meta = {**gather.meta, "backward": row.meta["backward"]}
            _mark(graph, users, gathers)
            for user in users:
                ours = masks.share(user, mesh.count(_axes(user, RINGS[user.target])))
                _send_shares(user, RINGS[user.target], ours)
                offer = _offer(user, RINGS[user.target], mesh) if lends else None
                if offer and offer.more * flops_per_byte < offer.saved:
                    _lend(user, RINGS[user.target], offer)
            changed = True
        if lends and ring.scatters is None and (offer := _offer(node, ring, mesh)):
            taken = node.meta.get("ring", NO_LOANS) != NO_LOANS
            _note(node, axes, mesh, offer.text(taken, flops_per_byte))
    return changed


def _send_shares(node: fx.Node, ring: Ring, share: float) -> None:
    """Count the bytes that a mask leaves to send."""
    for move in (*_gathers(node, ring), *_scattered(node, ring)):
        if move is not None:
            move.meta["step"] = replace(move.meta["step"], sent=share * move.meta["step"].sent)


def _gathers(node: fx.Node, ring: Ring) -> tuple[Any, ...]:
    return node.args[ring.queries + 1 : ring.queries + 3]


def _axes(node: fx.Node, ring: Ring) -> Axes:
    """Return the axes that shard the queries."""
    return node.meta["assignment"].get(ring.factor, ())


def _note(node: fx.Node, axes: Axes, mesh: Mesh, choice: str) -> None:
    node.meta["chosen"] = f"attention over {'+'.join(mesh.merge(axes))}: {choice}"


def _fits(node: fx.Node, ring: Ring) -> bool:
    """Return whether a node gathers, and reduces, only along its queries' axes."""
    axes, gathers = "+".join(_axes(node, ring)), _gathers(node, ring)
    # Keys and values [..., t, d] have to be gathered along t.
    rows = gathers[0].meta["val"].dim() - 2
    if any(g.target is not ring.kind.replaces or g.args[1:] != (rows, axes) for g in gathers):
        return False
    # Keys that are the values would travel twice.
    if gathers[0] is gathers[1]:
        return False
    return all(step is not None for step in _scattered(node, ring))


def _scattered(node: fx.Node, ring: Ring) -> list[fx.Node | None]:
    """Return the gradients' reduce_scatters; None for another step."""
    if ring.scatters is None:
        return []
    axes, steps = "+".join(_axes(node, ring)), []
    for gradient in results_of(node)[1:]:
        users = list(gradient.users) if gradient is not None else []
        rows = gradient.meta["val"].dim() - 2 if gradient is not None else 0
        # A second reader would need the sum itself, which a ring does not leave there.
        step = users[0] if len(users) == 1 else None
        expected = ring.scatters, ("sum", rows, axes)
        fits = step is not None and (step.target, step.args[1:]) == expected
        steps.append(step if fits else None)
    return steps


def _is_hidden(node: fx.Node, ring: Ring, mesh: Mesh, flops_per_byte: float) -> bool:
    q, k, v = (x.meta["val"] for x in (node.args[ring.queries], *_gathers(node, ring)))
    n, causal = mesh.count(_axes(node, ring)), ring.arguments(node.args)[0]
    return is_hidden(q, k, v, n, causal, flops_per_byte)


def is_hidden(q: Tensor, k: Tensor, v: Tensor, n: int, causal: bool, flops_per_byte: float) -> bool:
    """Return whether n devices compute with one block for longer than the next one travels."""
    # Two products, each a multiplication and an addition for each score and channel. A causal mask
    # leaves half.
    flops = 4 * q.numel() / n * k.shape[-2] / n / (2 if causal else 1)
    return flops >= flops_per_byte * (k.nbytes + v.nbytes) / n


class _Offer(NamedTuple):
    """Loans that balance a causal ring. more: bytes; saved: FLOPs of the last device."""

    loans: str
    more: float
    saved: float

    def text(self, taken: bool, flops_per_byte: float) -> str:
        sent, than = size_text(self.more), "less" if taken else "more"
        choice = (
            f"late devices lend queries, {sent} more" if taken else f"not balanced, {sent} less"
        )
        why = f"the last device computes {self.saved:.1e} FLOPs {than}"
        return f"{choice}; {why}, at {flops_per_byte:,.0f} FLOPs while a byte is sent"


def _offer(node: fx.Node, ring: Ring, mesh: Mesh) -> _Offer | None:
    """Return the loans that balance a causal ring for the fewest bytes."""
    causal, _, options = ring.arguments(node.args)
    values = [x.meta["val"] for x in ring.operands(node.args)][ring.queries :][:3]
    plain = ring.shards is None and options == RingOptions()
    n = mesh.count(_axes(node, ring))
    if n == 1 or not (causal and plain) or values[0].shape[-2] != values[1].shape[-2]:
        return None
    specs = node.meta["operand_specs"][ring.queries :]
    parts = [mesh.count(s.sharding_axes) for s in specs[:3]]
    # A block of keys is a part of those that were gathered.
    local = [x.nbytes / count for x, count in zip(values, (parts[0], n * parts[1], n * parts[2]))]
    more, loans = cheapest_loans(ring, values, local, n)
    # The last device has all scores of its rows, an even share is about half of that.
    saved = 2 * values[0].numel() / parts[0] * values[1].shape[-2] * (1 - 1 / n)
    return _Offer(loans, more, saved)


def _lend(node: fx.Node, ring: Ring, offer: _Offer) -> None:
    """Mark a ring in which late devices lend queries."""
    node.meta["ring"] = offer.loans
    moves = [x for x in (*_gathers(node, ring), *_scattered(node, ring)) if x is not None]
    for move in moves:
        step = move.meta["step"]
        move.meta["step"] = replace(step, sent=step.sent + offer.more / len(moves))


def cheapest_loans(
    ring: Ring, values: Sequence[Tensor], local: Sequence[float], n: int
) -> tuple[float, str]:
    """Return the bytes that a device sends beyond a ring's, and the loans that send least.

    values: queries, keys and values. local: the bytes of a device's part of each.
    """
    (q, _, v), backward = values, ring.scatters is not None
    numbers = local[0] / (q.shape[-1] * q.itemsize)
    out, lse = numbers * v.shape[-1] * q.itemsize, numbers * max(LSE_ITEMSIZE, q.itemsize)
    lent = local[0] + (2 * out + lse if backward else 0)
    keys, result = local[1] + local[2], local[0] if backward else out + lse
    sent = {
        LOANS_OF_STEPS: sent_bytes(n, keys, lent, result, backward),
        LOANS_OF_ROWS: sent_with_rows(n, -(-q.shape[-2] // n), keys, lent, result, backward),
    }
    loans = min(sent, key=sent.__getitem__)
    return sent[loans] - (n - 1) * keys * (1 + backward), loans


def _mark(graph: fx.Graph, users: list[fx.Node], gathers: tuple[Any, ...]) -> None:
    for i, user in enumerate(users):
        user.meta["ring"] = NO_LOANS
        with graph.inserting_before(user):
            # A ring takes its gathers into itself, so users cannot share them.
            own = [graph.node_copy(g) if i else g for g in gathers]
        for before, gather in zip(gathers, own):
            gather.meta = {**before.meta, "backward": user.meta["backward"]}
            user.replace_input_with(before, gather)


def _returns(stack: fx.Node) -> bool:
    """Return whether the loop's backward passes stacked keys to attention alone."""
    users = [(row, user) for row in stack.users for user in row.users]
    return all(row.target is ROW for row in stack.users) and all(
        user.target in RINGS and row in _gathers(user, RINGS[user.target]) for row, user in users
    )


def _lay_out(node: fx.Node, operand: ShardSpec, result: ShardSpec) -> None:
    """Set the layouts around an operation with one operand, whose factors are its dimensions."""
    dims = node.meta["rule"].operands[0]
    node.meta |= {
        "operand_specs": (operand,),
        "result_specs": (result,),
        "spec": result,
        "assignment": {f: axes for d, axes in enumerate(operand.dims) for f in dims[d] if axes},
    }


# Operations that cut off padding behind a gather.
_TRIMS = (aten.contiguous.default, aten.narrow.default)


def replace_by_rings(graph: fx.Graph) -> fx.Graph:
    """Replace gathered keys and values, and the sums over their gradients, by rings, in place."""
    for node in list(graph.nodes):
        if (loans := node.meta.pop("ring", None)) and node.target in RINGS:
            _fuse(graph, node, RINGS[node.target], loans)
    return graph


def _fuse(graph: fx.Graph, node: fx.Node, ring: Ring, loans: str) -> None:
    # Keys and values follow the queries among the operands.
    place = ring.queries + 1
    chains = [_chain(x, ring) for x in node.args[place : place + 2]]
    gathers = [chain[-1] for chain in chains]
    q, (k, v) = node.args[ring.queries], (gather.args[0] for gather in gathers)
    operands = list(ring.operands(node.args))
    operands[place : place + 2] = [k, v]
    causal, scale, options = ring.arguments(node.args)
    # The region is the last list: flex_attention has a list of buffers before it.
    region = next(a for a in reversed(node.args) if isinstance(a, list))
    axes = gathers[0].args[-1]
    results = {u.args[1]: u for u in node.users}
    scattered = [next(iter(results[i].users)) for i in (1, 2)] if ring.scatters else []
    with graph.inserting_before(node):
        fused = graph.create_node(
            "call_function",
            ring.kind,
            args=(
                *operands,
                tuple(options),
                axes,
                causal,
                scale,
                *region[2:4],
                None if ring.shards is None else node.args[ring.shards],
                loans,
            ),
            name=f"{node.name}_ring",
        )
    # The ring is one step, with the bytes of all the collectives that it replaces.
    steps = [x.meta["step"] for x in (*gathers, *scattered)]
    moved = bytes_of(k) + bytes_of(v)
    fused.meta = {
        **origin_of(node),
        "dtype": node.meta["dtype"],
        "step": replace(
            steps[0], payload=sum(s.payload for s in steps), sent=sum(s.sent for s in steps)
        ),
        # The float32 result, or the gradient of q, has 4 bytes an element. Lent queries come with
        # the tensors that their results, or gradients, need.
        "bytes": (5 if ring.scatters else 2) * moved
        + 4 * bytes_of(q) // q.meta["dtype"].itemsize
        + (loans != NO_LOANS) * (5 if ring.scatters else 2) * bytes_of(q),
    }
    # The ring sums the gradients itself, so each reduce_scatter becomes one of its results.
    for i, step in enumerate(scattered, start=1):
        step.target, step.args = operator.getitem, (fused, i)
        fused.append(step)
        graph.erase_node(results.pop(i))
    for i, result in results.items():
        result.args = (fused, i)
    graph.erase_node(node)
    for chain in chains:
        for each in chain:
            graph.erase_node(each)


def _chain(x: Any, ring: Ring) -> list[fx.Node]:
    """Return a gathered value and its operands, up to the gather."""
    chain = [x]
    while chain[-1].target is not ring.kind.replaces:
        assert chain[-1].target in _TRIMS, chain[-1]
        chain.append(chain[-1].args[0])
    return chain
