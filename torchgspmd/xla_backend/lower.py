"""An annotated graph as one that runs on lazy XLA tensors.

before   operations at global shapes on the CPU; marks                      %y = mark_sharding(%x, 'data=4,model=2', 'data _')
after    the same on XLA, marks and pinned layouts as annotations           %y = annotate(%x, 'data=4,model=2', 'data _')
needs    a graph expanded by rules.unpartitioned_of; meta["mark"] on marks; to pin every layout, a graph that partition has
         been over: its collectives, identities at global shapes, say where a value changes its layout
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..annotate import mark_sharding_op
from ..compat.operators import aten
from ..compat.private_apis import OpOverload, _dispatch_has_kernel_for_dispatch_key
from ..errors import ShardingError
from ..fx_passes.expand.decompose_ops import decompose_ops
from ..fx_passes.ir import is_operation
from ..mesh import Mesh
from ..rules import unpartitioned_of
from ..shard_spec import ShardSpec
from .sharding import annotate, check, expressible

_MARK = mark_sharding_op._opoverload
_KEYS = (
    "XLA",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
_COLLECTIVES = ("_c10d_functional", "c10d", "c10d_functional", "_c10d_functional_autograd")
_LOST = {"xla::dynamo_mark_sharding"}  # its backward is empty
PINS = (
    "user",
    "all",
    "none",
)  # which layouts are annotated besides those of inputs and results: marks, every one, none


def unpartitioned(
    graph: fx.Graph, splitting: Mapping[fx.Node, int] | frozenset[fx.Node] = frozenset()
) -> fx.Graph:
    """The graph as XLA's partitioner takes it best: operations that torch_xla would run on the host
    are taken apart too.
    """
    graph = decompose_ops(graph, splitting, lookup=unpartitioned_of)
    missing = {
        node: 1 for node in graph.nodes if is_operation(node) and not _has_kernel(node.target)
    }
    return decompose_ops(graph, missing, lookup=unpartitioned_of) if missing else graph


def lower(
    graph: fx.Graph, mesh: Mesh, device: torch.device, pin: str, outputs: Mapping[int, ShardSpec]
) -> fx.Graph:
    """A copy of the graph. outputs: layouts of results by position, which are annotated whatever is
    pinned.
    """
    _refuse(graph)
    made, new = fx.Graph(), {}
    for node in graph.nodes:
        if node.op == "output":
            results = [
                _pinned(made, new[v], mesh, outputs[i])
                if i in outputs and isinstance(v, fx.Node)
                else _value(new, v)
                for i, v in enumerate(node.args[0])
            ]
            made.output(tuple(results))
        else:
            new[node] = _lowered(made, node, new, mesh, device, pin)
    return made


def _value(new: dict[fx.Node, fx.Node], value: Any) -> Any:
    return new[value] if isinstance(value, fx.Node) else value


def _lowered(
    made: fx.Graph,
    node: fx.Node,
    new: dict[fx.Node, fx.Node],
    mesh: Mesh,
    device: torch.device,
    pin: str,
) -> fx.Node:
    if "step" in node.meta:
        source = new[node.args[0]]
        return (
            source if node.meta["spec"].pending else _pinned(made, source, mesh, node.meta["spec"])
        )
    if node.target is _MARK and pin != "all":
        source = new[node.args[0]]
        return (
            source
            if pin == "none"
            else _pinned(
                made, source, mesh, check(node.meta["mark"], mesh, "a mark", node.meta["source"])
            )
        )
    if node.target is _MARK:
        copy = new[node.args[0]]
    else:
        copy = _copied(made, node, new, device)
    known = pin == "all" and node.op == "call_function" and isinstance(node.meta["val"], Tensor)
    return _pinned(made, copy, mesh, node.meta["spec"]) if known else copy


def _copied(
    made: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node], device: torch.device
) -> fx.Node:
    copy = made.node_copy(node, new.__getitem__)
    copy.meta = {
        key: node.meta[key]
        for key in ("val", "source", "backward", "captured", "again")
        if key in node.meta
    }
    if "device" in copy.kwargs:
        copy.kwargs = {**copy.kwargs, "device": device}
    if node.target in _LOWERINGS:
        copy.target, copy.args = _LOWERINGS[node.target](copy.args)
    return copy


def _pinned(made: fx.Graph, value: fx.Node, mesh: Mesh, spec: ShardSpec) -> fx.Node:
    if not expressible(spec):
        return value
    node = made.call_function(annotate, (value, str(mesh), str(spec.plain().closed())))
    node.meta = {key: item for key, item in value.meta.items() if key != "again"}
    value.meta.pop("captured", None)
    return node


def _einsum(args: tuple) -> tuple[Callable, tuple]:
    equation, a, b = args
    return aten.einsum.default, (equation, [a, b])


_LOWERINGS: dict[Any, Callable] = {torch.ops.torchgspmd.einsum.default: _einsum}


def on_device(constants: nn.Module, device: torch.device) -> nn.Module:
    """The tensors that a captured graph holds, on a device."""
    held = nn.Module()
    for name, value in vars(constants).items():
        if isinstance(value, Tensor):
            setattr(held, name, value.to(device))
    for name, value in constants.named_buffers():
        held.register_buffer(name, value.to(device))
    return held


# ------------------------------------------------------------------------------------------- guards


def _has_kernel(op: Any) -> bool:
    """Whether torch_xla runs an operation on the device; without a kernel the host does."""
    if not isinstance(op, OpOverload) or op.namespace == "torchgspmd":
        return True
    return any(_dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in _KEYS)


def _refuse(graph: fx.Graph) -> None:
    """ShardingError for what would silently compute something else on XLA."""
    for node in graph.nodes:
        if not is_operation(node) or node.target is operator.getitem:
            continue
        name = node.target._schema.name if isinstance(node.target, OpOverload) else str(node.target)
        if name.split("::")[0] in _COLLECTIVES:
            raise ShardingError(
                f"the program calls the collective {name}",
                where=node.meta.get("source"),
                why="XLA sees one process, in which it does nothing; the program is partitioned by XLA itself",
                fix="leave it out: marks say how tensors are laid out, and XLA communicates",
            )
        if name in _LOST:
            raise ShardingError(
                f"{name} loses the gradient",
                where=node.meta.get("source"),
                fix="torchgspmd.mark_sharding",
            )
