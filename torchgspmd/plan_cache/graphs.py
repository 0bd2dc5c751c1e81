"""A graph as JSON, and back: its nodes with the metadata that later stages and a Plan read."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..comm.loop_call import LoopCall
from ..comm.stage_call import Link, StageBody, StageCall
from ..comm.stage_order import Order
from ..custom_ops.loops import Loop
from ..fx_nodes import add_node
from .values import Decoder, Encoder

# What only `Plan.explain` reads, or the passes that have run.
_COUNTS = "carries", "rows", "others", "stacks", "ahead", "held"  # of a LoopCall
_LINK = "kind", "round", "leaf", "sent", "carries"  # of a StageCall
_LEFT_OUT = {"rule", "assignment", "operand_specs", "decisions"}


def encode_graph(graph: fx.Graph, encoder: Encoder) -> list[Any]:
    """Return a row for every node: op, name, target, arguments, keyword arguments, metadata."""
    outer, encoder.nodes = encoder.nodes, {}
    rows = []
    for i, node in enumerate(graph.nodes):
        meta = {key: encoder.encode(v) for key, v in node.meta.items() if key not in _LEFT_OUT}
        args, kwargs = encoder.encode(node.args), encoder.encode(dict(node.kwargs))
        rows.append([node.op, node.name, _encode_target(node, encoder), args, kwargs, meta])
        encoder.nodes[node] = i
    encoder.nodes = outer
    return rows


def _encode_target(node: fx.Node, encoder: Encoder) -> Any:
    """Return the target of a node, with the body of a loop."""
    call = node.target
    if isinstance(call, StageCall):
        pieces = [
            [
                body.kind,
                body.round,
                encode_graph(body.graph, encoder),
                body.inputs,
                body.outputs,
            ]
            for body in call.pieces
        ]
        links = [
            [*map(link.__dict__.get, _LINK), encoder.encode(link.message)] for link in call.links
        ]
        names = [call.carries, call.rows, call.others, call.stacks, call.totals]
        return [
            "stages",
            str(call.loop),
            call.axis,
            str(call.order),
            pieces,
            links,
            names,
            call.kept_bytes,
        ]
    if not isinstance(call, LoopCall):
        return encoder.encode(call)
    return [
        "loop",
        str(call.loop),
        *map(call.__dict__.get, _COUNTS),
        encoder.encode(call.empty),
        encode_graph(call.graph, encoder),
    ]


def decode_graph(rows: list[Any], decoder: Decoder) -> fx.Graph:
    """Return the graph of these rows."""
    graph, decode = fx.Graph(), decoder.decode
    outer, decoder.nodes = decoder.nodes, []
    for op, name, target, args, kwargs, meta in rows:
        node = add_node(
            graph, op, _decode_target(target, decoder), decode(args), decode(kwargs), name
        )
        if node.name != name:
            node.name = name
        node.meta.update((key, decode(value)) for key, value in meta.items())
        decoder.nodes.append(node)
    decoder.nodes = outer
    return graph


def _decode_target(target: Any, decoder: Decoder) -> Any:
    if type(target) is list and target[0] == "stages":
        return _decode_stages(target, decoder)
    if type(target) is not list or target[0] != "loop":
        return decoder.decode(target)
    _, loop, *counts, empty, rows = target
    graph, others = decode_graph(rows, decoder), dict(zip(_COUNTS, counts))
    return LoopCall(Loop.parse(loop), graph, **others, empty=decoder.decode(empty))


def _decode_stages(target: list[Any], decoder: Decoder) -> StageCall:
    """Return the pipeline of a row."""
    _, loop, axis, order, pieces, links, names, kept_bytes = target
    bodies = (
        StageBody(kind, number, decode_graph(rows, decoder), tuple(inputs), tuple(outputs))
        for kind, number, rows, inputs, outputs in pieces
    )
    carries, rows, others, stacks, totals = map(tuple, names)
    return StageCall(
        loop=Loop.parse(loop),
        axis=axis,
        order=Order.parse(order),
        pieces=tuple(bodies),
        links=tuple(
            Link(a, b, c, sent, tuple(to), decoder.decode(message))
            for a, b, c, sent, to, message in links
        ),
        carries=carries,
        rows=rows,
        others=others,
        stacks=stacks,
        totals=totals,
        kept_bytes=kept_bytes,
    )
