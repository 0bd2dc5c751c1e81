"""The passes before the local program: a layout for every value, then partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .annotate import mark_sharding_op
from .capture import (
    ARGUMENT,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    TANGENT,
    Captured,
    Output,
)
from .compat.private_apis import _pytree as pytree
from .dtensor.storage import storable
from .errors import ShardingError
from .fx_passes import Layouts, Rules, decompose_ops, partition, propagate
from .fx_passes.expand.split_axes import merge_axes, required_splits
from .fx_passes.expand.split_fused import ops_to_split
from .fx_passes.expand.split_products import split_products
from .fx_passes.partition.partition import Memories
from .fx_passes.partition.verify_partition import verify_partition
from .mesh import Mesh
from .prefix_specs import spread
from .shard_spec import ShardSpec
from .spec_notation import UNCONSTRAINED
from .without_gc import without_gc

_MARK = mark_sharding_op._opoverload


def _ignore(*_: Any) -> None:
    """Do nothing: stands for a clock or a dump."""


@dataclass
class Annotated:
    """A captured program with a layout for every value: the input of a partitioner, ours or XLA's.

    graph: the program, with a rule for every operation that can have one; nodes have meta["spec"],
    marks have meta["mark"]. fixed_inputs: layouts of the inputs that partition may not choose.
    results: the layouts asked for, of the outputs. products_cut: some products are computed piece
    by piece (see fx_passes/expand/split_products.py). stored: outputs that have a layout leave the
    program as DTensors.
    """

    captured: Captured
    graph: fx.Graph
    layouts: Layouts
    fixed_inputs: dict[fx.Node, ShardSpec]
    results: list[ShardSpec | None]
    products_cut: bool = False
    stored: bool = False


@without_gc()
def lay_out(
    captured: Captured,
    mesh: Mesh,
    arguments: list[ShardSpec | None],
    out_specs: Any = None,
    stored: Mapping[str, ShardSpec] | None = None,
    *,
    whole: bool = False,
    parts: bool = False,
    cut_products: bool = False,
    expand: Callable = decompose_ops,
    rules: Rules | None = None,
    clock: Callable = _ignore,
    dump: Callable = _ignore,
) -> Annotated:
    """Run the passes before partition: expand and propagate.

    whole: results without a spec are replicated. parts: layouts may use sub-axes such as
    `model:(1)2`, on a mesh that is split for them. cut_products: products whose result is cut may
    be computed piece by piece. expand: the pass that decomposes operations.
    """
    rules = rules or Rules()
    graph = expand(captured.graph)
    dump("expand", graph)
    clock("expand")
    results = _result_specs(captured, graph, out_specs, mesh, whole)
    inputs = _input_specs(captured, mesh, arguments, stored or {})
    outputs = [out for out in captured.outputs if out.kind == OUTPUT]
    results = [
        inputs[out.input] or spec if out.open and out.input >= 0 else spec
        for spec, out in zip(results, outputs)
    ]
    layouts = _propagate(captured, graph, mesh, inputs, results, rules)
    if splitting := ops_to_split(graph, layouts, rules):
        graph = expand(graph, splitting)
        layouts = _propagate(captured, graph, mesh, inputs, results, rules)
    if products_cut := cut_products and split_products(graph, layouts, rules):
        layouts = _propagate(captured, graph, mesh, inputs, results, rules)
    fine = mesh
    while parts and (splits := required_splits(graph, layouts, rules)):
        fine = fine.split(splits)
        inputs, results = (
            [spec and spec.map_axes(fine.refine) for spec in specs] for specs in (inputs, results)
        )
        layouts = _propagate(captured, graph, fine, inputs, results, rules)
    dump("propagate", graph)
    clock("propagate")
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node in graph.nodes:
        if node.target is _MARK:
            node.meta["mark"] = layouts.spec[node]
    fixed_inputs = {n: layouts.spec[n] for n, spec in zip(placeholders, inputs) if spec is not None}
    for node, inp in zip(placeholders, captured.inputs):
        if (
            inp.kind == TANGENT
            and results[inp.output] is not None
            and not any(results[inp.output].open)
        ):
            fixed_inputs[node] = results[inp.output]
    return Annotated(captured, graph, layouts, fixed_inputs, results, products_cut, whole)


def decide(
    annotated: Annotated,
    plain: Sequence[bool] = (),
    rules: Rules | None = None,
    keep_marks: bool = False,
    memories: Memories | None = None,
) -> fx.Graph:
    """Partition: choose the layout of every value and insert the collectives.

    plain: as in compile_plan. memories, keep_marks: as in partition; keep_marks is for XLA, which
    has no cheap way past a mark.
    """
    placeholders = [n for n in annotated.graph.nodes if n.op == "placeholder"]
    outputs = _required_outputs(annotated, placeholders, plain)
    mesh = annotated.layouts.mesh
    leaving = (
        (lambda spec, shape: storable(spec, shape, mesh).map_axes(mesh.whole))
        if annotated.stored
        else None
    )
    values, cotangents = annotated.graph.output_node().args[0], {}
    for node, inp in zip(placeholders, annotated.captured.inputs) if annotated.stored else ():
        spec = annotated.results[inp.output] if inp.kind == TANGENT else None
        if spec is not None and any(spec.open):  # a cotangent has the layout of its output
            cotangents[node], outputs[inp.output] = (values[inp.output], spec), node
    sharded = partition(
        annotated.graph,
        mesh,
        annotated.fixed_inputs,
        outputs,
        rules,
        keep_marks,
        memories,
        leaving,
        cotangents,
    )
    return merge_axes(verify_partition(sharded, mesh), mesh)


def _drop_trivial(spec: ShardSpec, mesh: Mesh) -> ShardSpec:
    """Return the spec without axes of size 1, which shard nothing."""
    return ShardSpec(
        tuple(tuple(a for a in axes if mesh.count((a,)) > 1) for axes in spec.dims), spec.open
    )


def _input_specs(
    captured: Captured,
    mesh: Mesh,
    arguments: list[ShardSpec | None],
    stored: Mapping[str, ShardSpec],
) -> list[ShardSpec | None]:
    """Return the layout that is required of every input of the graph, None if there is none."""
    remaining = iter(arguments)
    specs = []
    for inp in captured.inputs:
        spec = (
            next(remaining)
            if inp.kind == ARGUMENT
            else stored.get(inp.name)
            if inp.kind != TANGENT
            else None
        )
        if spec is None:
            spec = inp.mark
        specs.append(
            _drop_trivial(spec.check(mesh, inp.shape, f"{inp.kind} '{inp.name}'"), mesh)
            if spec is not None
            else None
        )
    return specs


def _result_specs(
    captured: Captured, graph: fx.Graph, out_specs: Any, mesh: Mesh, whole: bool
) -> list[ShardSpec | None]:
    """Return the required spec, or None, of every flat output of the function.

    whole: outputs without a spec are replicated.
    """
    outs = [out for out in captured.outputs if out.kind == OUTPUT]
    values = graph.output_node().args[0][: len(outs)]
    leaves = list(captured.result_leaves)
    for slot, value in zip(captured.result_slots, values):
        leaves[slot] = value.meta["val"]
    tree = pytree.tree_unflatten(leaves, captured.results)
    specs = [
        None if spec is None else _drop_trivial(spec, mesh)
        for spec in spread(out_specs, tree, mesh, "the result")
    ]
    specs += [None] * (len(values) - len(specs))  # outputs put into arguments and attributes
    return (
        [
            _result_on_processes(spec, out, tuple(v.meta["val"].shape), mesh)
            for spec, out, v in zip(specs, outs, values)
        ]
        if whole
        else specs
    )


def _result_on_processes(
    spec: ShardSpec | None, out: Output, shape: tuple[int, ...], mesh: Mesh
) -> ShardSpec:
    """Return the layout of a result on real processes: replicated, unless another is required."""
    if spec is None:
        return _unconstrained(len(shape)) if out.open else ShardSpec.replicated(len(shape))
    return spec if any(spec.open) else storable(spec, shape, mesh)


def _unconstrained(rank: int) -> ShardSpec:
    return ShardSpec.parse((UNCONSTRAINED,) * rank)


def _propagate(
    captured: Captured,
    graph: fx.Graph,
    mesh: Mesh,
    inputs: Sequence[ShardSpec | None],
    results: Sequence[ShardSpec | None],
    rules: Rules,
) -> Layouts:
    """Propagate layouts from inputs, marks and outputs.

    Tied values get equal layouts: gradients and updates with their inputs, cotangents with their
    outputs.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    returned = graph.output_node().args[0]
    seeds = []
    for node, inp, spec in zip(placeholders, captured.inputs, inputs):
        if spec is not None:
            seeds.append((node, spec, f"marked at {inp.source}" if inp.source else "in_specs"))
    for node in graph.nodes:
        if node.target is _MARK:
            seeds.append((node, _mark_spec(node, mesh), f"marked at {node.meta['source']}"))
    outs = [v for v, out in zip(returned, captured.outputs) if out.kind == OUTPUT]
    seeds += [
        (v, spec, "out_specs")
        for v, spec in zip(outs, results)
        if spec is not None and isinstance(v, fx.Node)
    ]
    ties = [
        (placeholders[out.input], value, f"{out.kind} of {captured.inputs[out.input].name}")
        for value, out in zip(returned, captured.outputs)
        if out.kind in (GRADIENT, MUTATION) and isinstance(value, fx.Node)
    ]
    ties += [
        (outs[inp.output], node, "cotangent")
        for node, inp in zip(placeholders, captured.inputs)
        if inp.kind == TANGENT
    ]
    return propagate(graph, mesh, seeds, ties, rules)


def _mark_spec(node: fx.Node, mesh: Mesh) -> ShardSpec:
    """Return the layout of a mark. Raise if it was made for another mesh."""
    marked = Mesh.parse(node.args[1])
    if marked != mesh.unsplit():
        raise ShardingError(
            f"a value is marked on mesh {marked}, but the program runs on mesh {mesh.unsplit()}",
            where=node.meta["source"],
            fix="use one Mesh for all marks of a program",
        )
    return _drop_trivial(ShardSpec.parse(node.args[2]), marked).map_axes(mesh.refine)


def _required_outputs(
    annotated: Annotated, placeholders: list[fx.Node], plain: Sequence[bool]
) -> dict[int, ShardSpec | fx.Node]:
    """Return, by position of an output, its required layout or the input whose layout it has."""
    required: dict[int, ShardSpec | fx.Node] = {}
    captured, specs = annotated.captured, iter(annotated.results)
    arguments = [i for i, inp in enumerate(captured.inputs) if inp.kind == ARGUMENT]
    whole = {i for i, is_plain in zip(arguments, plain) if is_plain}
    for i, out in enumerate(captured.outputs):
        spec = next(specs) if out.kind == OUTPUT else None
        if out.kind != OUTPUT and out.input in whole:
            required[i] = ShardSpec.replicated(len(captured.inputs[out.input].shape))
        elif out.kind in (GRADIENT, MUTATION):
            required[i] = placeholders[out.input]
        elif out.kind == OBSERVED and annotated.stored:
            required[i] = _unconstrained(
                len(annotated.graph.output_node().args[0][i].meta["val"].shape)
            )
        elif spec is not None:
            required[i] = spec
    return required
