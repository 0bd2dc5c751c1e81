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
from .fx_passes import Layouts, Rules, expand, partition, propagate
from .fx_passes.expand.split_axes import merge_axes, required_splits
from .fx_passes.expand.split_fused import ops_to_split
from .fx_passes.expand.split_products import split_products
from .fx_passes.partition.partition import Memories
from .fx_passes.partition.verify_partition import verify_partition
from .mesh import Mesh
from .prefix_specs import spread
from .shard_spec import UNCONSTRAINED, ShardSpec
from .without_gc import without_gc

_MARK = mark_sharding_op._opoverload


def _ignore(*_: Any) -> None:
    """In place of a clock or a dump."""


@dataclass
class Annotated:
    """A captured program with a layout for every value: what partition works on, or a partitioner
    that is not ours.
    """

    captured: Captured
    graph: fx.Graph  # operations that have rules, where they can be had; meta["spec"], meta["mark"]
    layouts: Layouts
    given: dict[fx.Node, ShardSpec]  # layouts of inputs that are settled
    results: list[ShardSpec | None]  # those asked for, of the outputs
    # whether products are computed by parts, since they are cut (see
    # fx_passes/expand/split_products.py)
    parted: bool = False
    stored: bool = False  # whether what has a layout leaves the program as DTensors


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
    pieces: bool = False,
    expand: Callable = expand,
    rules: Rules | None = None,
    clock: Callable = _ignore,
    dump: Callable = _ignore,
) -> Annotated:
    """The passes before partition. whole: results without a spec are replicated; parts: layouts may
    use parts of axes, on a mesh that is split for it; pieces: products that are cut may be computed
    by parts; expand: how operations are taken apart.
    """
    rules = rules or Rules()
    graph = expand(captured.graph)
    dump("expand", graph)
    clock("expand")
    results = _result_specs(captured, graph, out_specs, mesh, whole)
    inputs = _input_specs(captured, mesh, arguments, stored or {})
    asked = [out for out in captured.outputs if out.kind == OUTPUT]
    results = [
        inputs[out.input] or spec if out.open and out.input >= 0 else spec
        for spec, out in zip(results, asked)
    ]
    layouts = _propagate(captured, graph, mesh, inputs, results, rules)
    if splitting := ops_to_split(graph, layouts, rules):
        graph = expand(graph, splitting)
        layouts = _propagate(captured, graph, mesh, inputs, results, rules)
    if parted := pieces and split_products(graph, layouts, rules):
        layouts = _propagate(captured, graph, mesh, inputs, results, rules)
    fine = mesh
    while parts and (wanted := required_splits(graph, layouts, rules)):
        fine = fine.split(wanted)
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
    given = {n: layouts.spec[n] for n, spec in zip(placeholders, inputs) if spec is not None}
    for node, inp in zip(placeholders, captured.inputs):
        if (
            inp.kind == TANGENT
            and results[inp.output] is not None
            and not any(results[inp.output].open)
        ):
            given[node] = results[inp.output]
    return Annotated(captured, graph, layouts, given, results, parted, whole)


def decide(
    made: Annotated,
    plain: Sequence[bool] = (),
    rules: Rules | None = None,
    keep_marks: bool = False,
    memories: Memories | None = None,
) -> fx.Graph:
    """Partition: what every device holds of every value, with the collectives between. plain: as in
    compile_plan; memories: as in partition; keep_marks too, for a partitioner that has no way past
    a mark that is as cheap as ours.
    """
    placeholders = [n for n in made.graph.nodes if n.op == "placeholder"]
    wanted = _outputs(made, placeholders, plain)
    mesh = made.layouts.mesh
    leaving = (
        (lambda spec, shape: storable(spec, shape, mesh).map_axes(mesh.whole))
        if made.stored
        else None
    )
    values, cotangents = made.graph.output_node().args[0], {}
    for node, given in zip(placeholders, made.captured.inputs) if made.stored else ():
        spec = made.results[given.output] if given.kind == TANGENT else None
        if spec is not None and any(spec.open):  # it comes as its output has left
            cotangents[node], wanted[given.output] = (values[given.output], spec), node
    sharded = partition(
        made.graph, mesh, made.given, wanted, rules, keep_marks, memories, leaving, cotangents
    )
    return merge_axes(verify_partition(sharded, mesh), mesh)


def _drop_trivial(spec: ShardSpec, mesh: Mesh) -> ShardSpec:
    """Without axes of size 1, which shard nothing."""
    return ShardSpec(
        tuple(tuple(a for a in axes if mesh.count((a,)) > 1) for axes in spec.dims), spec.open
    )


def _input_specs(
    captured: Captured,
    mesh: Mesh,
    arguments: list[ShardSpec | None],
    stored: Mapping[str, ShardSpec],
) -> list[ShardSpec | None]:
    """What is settled about every input of the graph."""
    rest = iter(arguments)
    found = []
    for given in captured.inputs:
        spec = (
            next(rest)
            if given.kind == ARGUMENT
            else stored.get(given.name)
            if given.kind != TANGENT
            else None
        )
        if spec is None:
            spec = given.mark
        found.append(
            _drop_trivial(spec.check(mesh, given.shape, f"{given.kind} '{given.name}'"), mesh)
            if spec is not None
            else None
        )
    return found


def _result_specs(
    captured: Captured, graph: fx.Graph, out_specs: Any, mesh: Mesh, whole: bool
) -> list[ShardSpec | None]:
    """The specs asked for, for every flat output of the function; whole: others are replicated."""
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
    specs += [None] * (len(values) - len(specs))  # what is put into arguments and attributes
    return (
        [
            _returned(spec, out, tuple(v.meta["val"].shape), mesh)
            for spec, out, v in zip(specs, outs, values)
        ]
        if whole
        else specs
    )


def _returned(spec: ShardSpec | None, out: Output, shape: tuple[int, ...], mesh: Mesh) -> ShardSpec:
    """The layout of a result on real processes: a whole tensor, unless another is asked for."""
    if spec is None:
        return _as_laid_out(len(shape)) if out.open else ShardSpec.replicated(len(shape))
    return spec if any(spec.open) else storable(spec, shape, mesh)


def _as_laid_out(rank: int) -> ShardSpec:
    return ShardSpec.parse((UNCONSTRAINED,) * rank)


def _propagate(
    captured: Captured, graph: fx.Graph, mesh: Mesh, inputs, results, rules: Rules
) -> Layouts:
    """Seeds: inputs, marks, outputs. Ties: gradients and updates with their inputs, cotangents with
    their outputs.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    returned = graph.output_node().args[0]
    seeds = []
    for node, given, spec in zip(placeholders, captured.inputs, inputs):
        if spec is not None:
            seeds.append((node, spec, f"marked at {given.source}" if given.source else "in_specs"))
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
        (outs[given.output], node, "cotangent")
        for node, given in zip(placeholders, captured.inputs)
        if given.kind == TANGENT
    ]
    return propagate(graph, mesh, seeds, ties, rules)


def _mark_spec(node: fx.Node, mesh: Mesh) -> ShardSpec:
    marked = Mesh.parse(node.args[1])
    if marked != mesh.unsplit():
        raise ShardingError(
            f"a value is marked on mesh {marked}, but the program runs on mesh {mesh.unsplit()}",
            where=node.meta["source"],
            fix="use one Mesh for all marks of a program",
        )
    return _drop_trivial(ShardSpec.parse(node.args[2]), marked).map_axes(mesh.refine)


def _outputs(
    made: Annotated, placeholders: list[fx.Node], plain: Sequence[bool]
) -> dict[int, ShardSpec | fx.Node]:
    """What partition is to know of the outputs: a layout, or the input whose layout they have."""
    found: dict[int, ShardSpec | fx.Node] = {}
    captured, wanted = made.captured, iter(made.results)
    arguments = [i for i, given in enumerate(captured.inputs) if given.kind == ARGUMENT]
    whole = {i for i, is_plain in zip(arguments, plain) if is_plain}
    for i, out in enumerate(captured.outputs):
        spec = next(wanted) if out.kind == OUTPUT else None
        if out.kind != OUTPUT and out.input in whole:
            found[i] = ShardSpec.replicated(len(captured.inputs[out.input].shape))
        elif out.kind in (GRADIENT, MUTATION):
            found[i] = placeholders[out.input]
        elif out.kind == OBSERVED and made.stored:
            found[i] = _as_laid_out(len(made.graph.output_node().args[0][i].meta["val"].shape))
        elif spec is not None:
            found[i] = spec
    return found
