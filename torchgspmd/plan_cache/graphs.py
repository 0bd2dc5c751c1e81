"""A graph as JSON, and back: its nodes with the metadata that later stages and a Plan read."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..fx_nodes import add_node
from .values import Decoder, Encoder

# What only `Plan.explain` reads, or the passes that have run.
_LEFT_OUT = {"rule", "assignment", "operand_specs", "decisions"}


def encode_graph(graph: fx.Graph, encoder: Encoder) -> list[Any]:
    """Return a row for every node: op, name, target, arguments, keyword arguments, metadata."""
    encoder.nodes = {}
    rows = []
    for i, node in enumerate(graph.nodes):
        meta = {key: encoder.encode(v) for key, v in node.meta.items() if key not in _LEFT_OUT}
        args, kwargs = encoder.encode(node.args), encoder.encode(dict(node.kwargs))
        rows.append([node.op, node.name, encoder.encode(node.target), args, kwargs, meta])
        encoder.nodes[node] = i
    return rows


def decode_graph(rows: list[Any], decoder: Decoder) -> fx.Graph:
    """Return the graph of these rows."""
    graph, decode = fx.Graph(), decoder.decode
    decoder.nodes = []
    for op, name, target, args, kwargs, meta in rows:
        node = add_node(graph, op, decode(target), decode(args), decode(kwargs), name)
        if node.name != name:
            node.name = name
        node.meta.update((key, decode(value)) for key, value in meta.items())
        decoder.nodes.append(node)
    return graph
