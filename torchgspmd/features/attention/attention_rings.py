"""Replace gathered keys and values, and the sums over their gradients, by rings.

before   %k_g = all_gather(%k, 2, seq);    %y = attention(%q, %k_g, %v_g)     meta["ring"]
after    %y = ring_attention(%q, %k, %v, (None, (), (), ()), seq, ...)
before   %k_g = all_gather(%k, 2, seq);    %dq, %dk, %dv = attention_backward(..., %k_g, %v_g)
         %dk_rs = reduce_scatter(%dk, sum, 2, seq)
after    %dq, %dk_rs, %dv_rs = ring_attention_backward(..., %k, %v, ..., seq, ...)
needs    ring_keys, the local program, before start_wait
ensures  no device has all keys; one text for any number of devices
source   Ring Attention, arXiv 2310.01889
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from ...compat.fx_nodes import origin_of
from ...compat.operators import aten
from ...fx_passes.schedule.liveness import bytes_of
from .ring_blocks import NO_LOANS
from .ring_keys import RINGS, Ring

# Operations that cut off padding behind a gather.
_TRIMS = (aten.contiguous.default, aten.narrow.default)


def attention_rings(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in list(graph.nodes):
        if (loans := node.meta.pop("ring", None)) and node.target in RINGS:
            _fuse(graph, node, RINGS[node.target], loans)
    return graph


def _fuse(graph: fx.Graph, node: fx.Node, ring: Ring, loans: str) -> None:
    """Fuse an operation with its gathers and the reduce_scatters behind it."""
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
