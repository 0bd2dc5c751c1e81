"""Rewrite an annotated graph so that it runs on lazy XLA tensors.

before   operations at global shapes on the CPU; marks
             %y = mark_sharding(%x, 'data=4,model=2', 'data _')
after    the same on XLA; marks and pinned layouts are annotations
             %y = annotate(%x, 'data=4,model=2', 'data _')
needs    a graph expanded by rules.unpartitioned_of; meta["mark"] on marks; to pin every layout, a
         partitioned graph, whose collectives (identities at global shapes) show changes of layout
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..compat.fx_nodes import copy_node
from ..compat.operators import aten
from ..compat.private_apis import OpOverload, _dispatch_has_kernel_for_dispatch_key
from ..errors import ShardingError
from ..fx_passes.boundary import start_program
from ..fx_passes.expand.decompose_ops import decompose_ops
from ..fx_passes.ir import Rules, is_operation
from ..fx_passes.pipeline import passes, run
from ..fx_passes.program import Program, Request
from ..layout.mark import mark_sharding_op
from ..layout.mesh import Mesh
from ..rules import SplitRequest, unpartitioned_of
from ..shard_spec import ShardSpec
from .sharding import annotate, check, expressible, operand_specs

_MARK = mark_sharding_op._opoverload
_KEYS = (
    "XLA",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
_COLLECTIVES = ("_c10d_functional", "c10d", "c10d_functional", "_c10d_functional_autograd")
_WITHOUT_GRADIENT = {"xla::dynamo_mark_sharding"}  # the backward is empty


def unpartitioned(
    graph: fx.Graph, splitting: Mapping[fx.Node, SplitRequest] = MappingProxyType({})
) -> fx.Graph:
    """Return the graph with decompositions that suit XLA's partitioner.

    Operations that torch_xla would run on the host are decomposed, too.
    """
    graph = decompose_ops(graph, splitting, lookup=unpartitioned_of)
    missing = {
        node: SplitRequest()
        for node in graph.nodes
        if is_operation(node) and not _has_kernel(node.target)
    }
    return decompose_ops(graph, missing, lookup=unpartitioned_of) if missing else graph


def lower(
    graph: fx.Graph, mesh: Mesh, device: torch.device, pin: str, outputs: Mapping[int, ShardSpec]
) -> fx.Graph:
    """Return a copy of the graph for XLA.

    pin: as in Options. outputs: result layouts by position; they are always annotated.
    """
    _check_supported(graph)
    lowered, new = fx.Graph(), {}
    for node in graph.nodes:
        if node.op == "output":
            results = [
                _annotated(lowered, new[v], mesh, outputs[i])
                if i in outputs and isinstance(v, fx.Node)
                else _value(new, v)
                for i, v in enumerate(node.args[0])
            ]
            lowered.output(tuple(results))
        else:
            new[node] = _lower_node(lowered, node, new, mesh, device, pin)
    return lowered


def _value(new: dict[fx.Node, fx.Node], value: object) -> object:
    return new[value] if isinstance(value, fx.Node) else value


def _lower_node(
    graph: fx.Graph,
    node: fx.Node,
    new: dict[fx.Node, fx.Node],
    mesh: Mesh,
    device: torch.device,
    pin: str,
) -> fx.Node:
    if "step" in node.meta:
        source = new[node.args[0]]
        return (
            source
            # XLA has no pending sums: it reduces where it needs the result.
            if node.meta["spec"].pending
            else _annotated(graph, source, mesh, node.meta["spec"])
        )
    if node.target is _MARK and pin != "all":
        source = new[node.args[0]]
        return (
            source
            if pin == "none"
            else _annotated(
                graph, source, mesh, check(node.meta["mark"], mesh, "a mark", node.meta["source"])
            )
        )
    if node.target is _MARK:
        copy = new[node.args[0]]
    else:
        copy = _copy_node(graph, node, _with_operands(graph, node, new, mesh), device)
    is_pinned = pin == "all" and node.op == "call_function" and isinstance(node.meta["val"], Tensor)
    return _annotated(graph, copy, mesh, node.meta["spec"]) if is_pinned else copy


def _with_operands(
    graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node], mesh: Mesh
) -> dict[fx.Node, fx.Node]:
    """Return the new nodes, with a convolution's operands as XLA needs them."""
    specs = operand_specs(node, mesh)
    return {**new, **{x: _annotated(graph, new[x], mesh, spec) for x, spec in specs.items()}}


def _copy_node(
    graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node], device: torch.device
) -> fx.Node:
    copy = copy_node(graph, node, new.__getitem__)
    copy.meta = {
        key: node.meta[key]
        for key in ("val", "source", "backward", "captured", "again")
        if key in node.meta
    }
    # The program was captured on the CPU.
    if "device" in copy.kwargs:
        copy.kwargs = {**copy.kwargs, "device": device}
    if node.target in _LOWERINGS:
        copy.target, copy.args = _LOWERINGS[node.target](copy.args)
    return copy


def _annotated(graph: fx.Graph, value: fx.Node, mesh: Mesh, spec: ShardSpec) -> fx.Node:
    """Return the value with an annotation, if XLA can express the layout."""
    # Without an annotation XLA chooses the layout, as for any other value.
    if not expressible(spec):
        return value
    node = graph.call_function(annotate, (value, str(mesh), str(spec.plain().closed())))
    # An annotation is new, so it repeats nothing in the forward.
    node.meta = {key: item for key, item in value.meta.items() if key != "again"}
    # The annotated value stands for the captured one from here on.
    value.meta.pop("captured", None)
    return node


def _einsum(args: tuple) -> tuple[Callable, tuple]:
    equation, a, b = args
    return aten.einsum.default, (equation, [a, b])


_LOWERINGS: dict[Any, Callable] = {torch.ops.torchgspmd.einsum.default: _einsum}


def on_device(constants: nn.Module, device: torch.device) -> nn.Module:
    moved = nn.Module()
    for name, value in vars(constants).items():
        if isinstance(value, Tensor):
            setattr(moved, name, value.to(device))
    for name, value in constants.named_buffers():
        moved.register_buffer(name, value.to(device))
    return moved


# ------------------------------------------------------------------------------------------- guards


def _has_kernel(op: object) -> bool:
    """True if torch_xla has a kernel for an operation; else the host runs it."""
    if not isinstance(op, OpOverload) or op.namespace == "torchgspmd":
        return True
    return any(_dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in _KEYS)


def _check_supported(graph: fx.Graph) -> None:
    """Raise a ShardingError for operations that would silently give other numbers on XLA."""
    for node in graph.nodes:
        if not is_operation(node) or node.target is operator.getitem:
            continue
        name = node.target._schema.name if isinstance(node.target, OpOverload) else str(node.target)
        if name.split("::")[0] in _COLLECTIVES:
            raise ShardingError(
                f"the program calls the collective {name}",
                where=node.meta.get("source"),
                why="XLA sees one process, in which it does nothing; "
                "the program is partitioned by XLA itself",
                fix="leave it out: marks say how tensors are laid out, and XLA communicates",
            )
        if name in _WITHOUT_GRADIENT:
            raise ShardingError(
                f"{name} loses the gradient",
                where=node.meta.get("source"),
                fix="use torchgspmd.mark_sharding",
            )


def annotate_for_xla(request: Request, pin: str) -> Program:
    """Return the program that XLA partitions. pin="all": our partitioner chooses all layouts."""
    names = {"decompose_ops", "propagate", "split_fused"}
    if pin == "all":
        names |= {"split_axes", "partition", "merge_axes"}
    request = replace(request, expand=unpartitioned, keep_marks=True)
    return run(start_program(request), steps=[each for each in passes() if each.name in names])


# Keep XLA from merging a checkpoint's recomputation with the first computation.
#
# Merged, the value would stay in memory from the forward to the backward.
#
# before   forward   %y = einsum(.., %x, %w)
#          backward  %y_1 = einsum(.., %x, %w)           equal to %y: XLA would compute one of them
# after    backward  %b = barrier([%x, %w, %grad]); %y_1 = einsum(.., %b[0], %b[1])
#
# XLA does not look through a barrier. The gradient among its operands keeps the recomputation out
# of the forward.


def mark_repeated(graph: fx.Graph) -> None:
    """Set meta["again"] on backward nodes that repeat a forward node.

    They repeat it if they compute the same from equal inputs. Only regions with a contraction are
    marked: others cost little.
    """
    rules = Rules()
    twin: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    again = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        key = (
            node.target,
            # Inputs are equal if they are one node, or a repetition of one.
            repr(fx.map_arg((node.args, dict(node.kwargs)), lambda n: id(twin.get(n, n)))),
        )
        original = first.setdefault(key, node)
        if original is not node and node.meta.get("backward") and not original.meta.get("backward"):
            twin[node] = original
            again.append(node)
    for region in _runs(graph, set(again)):
        if any(is_operation(n) and rules.op(n).rule.contraction for n in region):
            for node in region:
                node.meta["again"] = True


def separate(graph: fx.Graph) -> fx.Graph:
    """Insert a barrier before every backward region that mark_repeated has marked."""
    # A list: the loop inserts nodes into the graph that `_runs` walks.
    for region in list(_runs(graph, {n for n in graph.nodes if n.meta.get("again")})):
        inside = set(region)
        inputs = list(
            dict.fromkeys(
                n
                for node in region
                for n in node.all_input_nodes
                if n not in inside and n.op != "get_attr"
            )
        )
        gradient = _latest_value(region[0], inputs)
        with graph.inserting_before(region[0]):
            group = graph.call_function(barrier, ([*inputs, *gradient],))
            copies = {
                n: graph.call_function(operator.getitem, (group, i)) for i, n in enumerate(inputs)
            }
        for node in region:
            for n in set(node.all_input_nodes) & copies.keys():
                node.replace_input_with(n, copies[n])
    return graph


def _latest_value(node: fx.Node, excluded: list[fx.Node]) -> list[fx.Node]:
    """Return the last value computed before a node, if there is one."""
    before = node.prev
    while before.op == "call_function":
        if isinstance(before.meta.get("val"), Tensor) and before not in excluded:
            return [before]
        before = before.prev
    return []


def _runs(graph: fx.Graph, chosen: set[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield the longest runs in which chosen nodes follow one another."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node in chosen:
            run.append(node)
        elif run:
            yield run
            run = []


def barrier(values: list[Tensor]) -> list[Tensor]:
    """Return the same values; no user runs before all are computed."""
    import torch_xla.core.xla_model as xm

    # optimization_barrier_ writes to its operands.
    copies = [v.clone() for v in values]
    xm.optimization_barrier_(copies)
    return copies
