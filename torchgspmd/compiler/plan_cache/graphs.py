"""A graph as JSON: its nodes with the metadata that later stages and a Plan read."""

from __future__ import annotations

from torch import fx

from ...comm.loop_call import BodyCall, LoopCall
from .values import Encoder

# What only `Plan.explain` reads, or the passes that have run.
COUNTS = "carries", "rows", "others", "stacks", "ahead", "held"  # of a LoopCall
_LEFT_OUT = {"rule", "assignment", "operand_specs", "decisions"}


def encode_graph(graph: fx.Graph, encoder: Encoder) -> list[object]:
    """Return a row for every node: op, name, target, arguments, keyword arguments, metadata."""
    # Node numbers count within one graph: a loop's body has its own.
    outer, encoder.nodes = encoder.nodes, {}
    rows = []
    for i, node in enumerate(graph.nodes):
        meta = {key: encoder.encode(v) for key, v in node.meta.items() if key not in _LEFT_OUT}
        args, kwargs = encoder.encode(node.args), encoder.encode(dict(node.kwargs))
        rows.append([node.op, node.name, _encode_target(node, encoder), args, kwargs, meta])
        encoder.nodes[node] = i
    encoder.nodes = outer
    return rows


def _encode_target(node: fx.Node, encoder: Encoder) -> object:
    """Encode a node's target, with its body for a loop."""
    call = node.target
    if isinstance(call, BodyCall) and not isinstance(call, LoopCall):
        return call.encode(lambda graph: encode_graph(graph, encoder), encoder.encode)
    if not isinstance(call, LoopCall):
        return encoder.encode(call)
    return [
        "loop",
        str(call.loop),
        *map(call.__dict__.get, COUNTS),
        encoder.encode(call.empty),
        encode_graph(call.graph, encoder),
    ]
