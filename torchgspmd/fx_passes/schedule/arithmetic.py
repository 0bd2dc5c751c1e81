"""Floating-point operations and memory traffic for a program's nodes.

Products, convolutions and attention are counted by the formulas in torch.utils.flop_counter; all
else reads and writes memory. A causal mask does not halve the count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ...comm.collective import start, wait
from ...comm.hardware import Hardware
from ...comm.kinds import FusedKind, Step
from ...compat.private_apis import OpOverload
from ...layout.mesh import Mesh
from ...rules.custom_ops.loops import nests, runs_of
from ..loop_call import BodyCall, loop_calls
from .liveness import bytes_of

# How many operands' rows are computed once between them, by operation: rows of the features.
SHARED_ROWS: dict[OpOverload, Callable[[fx.Node], int]] = {}


def flops(node: fx.Node, mesh: Mesh | None = None) -> int:
    """Return the FLOPs of the products that a node computes; 0 for other nodes."""
    kind = node.target
    if isinstance(kind, FusedKind):
        assert mesh is not None
        shapes = fx.map_arg(node.args, _shape)
        return kind.flops(mesh.count(node.meta["step"].axes), *shapes)
    formula = flop_registry.get(getattr(kind, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), meta_example)
    count = int(formula(*args, **kwargs, out_val=meta_example(node)))
    return count // SHARED_ROWS[kind](node) if kind in SHARED_ROWS else count


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """Return a value's shape; None for a number, such as a device's first row."""
    return tuple(node.meta["shape"]) if "shape" in node.meta else None


def meta_example(node: fx.Node) -> object:
    """Return a node's own value in a global program, a meta tensor like it in a local one.

    Several results are a list, without those that nobody uses. A node without a shape is computed.
    """
    if "val" in node.meta:
        return node.meta["val"]
    shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
    if shape is not None and dtype is not None:
        return torch.empty(shape, dtype=dtype, device="meta")
    read = [u for u in node.users if u.target is operator.getitem and u.users]
    results = {u.args[1]: meta_example(u) for u in read}
    if results:
        return [results.get(i) for i in range(max(results) + 1)]
    if node.op == "placeholder":  # a coordinate of the device, or a size of an argument
        return node.meta.get("size", (0, 0))[1]
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), meta_example)
    return node.target(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})


def is_attention(node: fx.Node) -> bool:
    """Return True for a node that computes attention, forward or backward."""
    return "attention" in str(node.target) and not is_view(node)


def is_view(node: fx.Node) -> bool:
    """Return True for a node that computes nothing: a view, or one result picked from several."""
    if not isinstance(node.target, OpOverload):
        return True
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def traffic(node: fx.Node) -> int:
    """Return the bytes that a node of one device's program reads and writes."""
    if node.op != "call_function" or is_view(node):
        return 0
    results = bytes_of(node) or sum(map(bytes_of, node.users))
    return results + sum(map(bytes_of, node.all_input_nodes))


def op_seconds(node: fx.Node, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds of an operation of one device's program; it is no collective."""
    count, moved = flops(node, mesh), traffic(node)
    if not count and not moved:
        return hardware.view if isinstance(node.target, OpOverload) else 0.0
    if hardware.attention is not None and is_attention(node):
        # A measured attention has a start and a rate of its own.
        begin, rate = hardware.attention
        return begin + count / rate
    dtypes = (each.meta.get("dtype") for each in (node, *node.all_input_nodes))
    itemsize = next((dtype.itemsize for dtype in dtypes if dtype), 4)
    product = hardware.product_seconds(count, itemsize)
    return hardware.launch + max(product, moved / hardware.memory_bandwidth)


def step_seconds(steps: Sequence[Step], mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds of collectives that are sent as one."""
    first, sent = steps[0], sum(step.sent for step in steps)
    kind = first.target
    return hardware.transfer_seconds(mesh, first.axes, kind.name, kind.relays, sent)


def stream_seconds(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds of a scheduled program of one device, on the streams of `estimate`.

    Loops and pipelines count nothing: this compares two schedules around them.
    """
    now = free = 0.0
    arrival: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if node.target is start:
            steps = [user.meta["step"] for user in node.users]
            free = arrival[node] = max(now, free) + step_seconds(steps, mesh, hardware)
        elif node.target is wait:
            now = max(now, arrival[node.args[0]])
        elif node.op == "call_function" and not isinstance(node.target, BodyCall):
            now += op_seconds(node, mesh, hardware)
    return max(now, free)


def graph_flops(graph: fx.Graph, mesh: Mesh) -> int:
    """Return the FLOPs of all products in a graph, with all iterations of its loops."""
    within = sum(
        call.runs_of(body) * graph_flops(body.graph, mesh)
        for _, call in loop_calls(graph)
        for body in call.bodies
    )
    return within + sum(flops(node, mesh) * runs_of(nest) for node, nest in nests(graph).items())
