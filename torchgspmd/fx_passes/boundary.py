"""The layouts required at a program's boundary, for `propagate` and `partition`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from ..capture import (
    ARGUMENT,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    PARAMETER,
    TANGENT,
    Captured,
    Output,
)
from ..compat.fx_nodes import calls_any
from ..compat.private_apis import _pytree as pytree
from ..dtensor.storage import storable
from ..errors import ShardingError
from ..layout.mark import NAMED, mark_sharding_op
from ..layout.mesh import Mesh
from ..layout.open_sizes import is_whole
from ..layout.prefix_specs import spread
from ..layout.spec_notation import UNCONSTRAINED
from ..rules.custom_ops.loops import APART
from ..shard_spec import ShardSpec
from .ir import count_runs, planned_shape
from .partition.partition_graph import partition_graph
from .program import Program, Request
from .propagate.propagate_layouts import propagate_layouts

_MARK = mark_sharding_op._opoverload


def start_program(request: Request, **state: Any) -> Program:
    """Return the program at stage CAPTURED, with the layouts required at its boundary."""
    captured, mesh = request.captured, request.mesh
    inputs = _input_specs(captured, mesh, request.arguments, request.stored)
    results = _result_specs(captured, inputs, request.out_specs, mesh, request.of_module)
    return Program(request, captured.graph, mesh, inputs=inputs, results=results, **state)


def propagate_program(program: Program) -> fx.Graph:
    """Propagate layouts from inputs, marks and outputs.

    Tied values get equal layouts: gradients and updates with their inputs, cotangents with their
    outputs.
    """
    graph, mesh, captured = program.graph, program.mesh, program.captured
    # Before rules are looked up: an operation's key says how often it runs.
    count_runs(graph)
    placeholders, returned = program.placeholders, graph.output_node().args[0]
    marks = graph.find_nodes(op="call_function", target=_MARK)
    seeds = [
        (
            node,
            spec,
            node.meta.get("chosen") or (f"marked at {inp.source}" if inp.source else "in_specs"),
        )
        for node, inp, spec in zip(placeholders, captured.inputs, program.inputs)
        if spec is not None
    ]
    seeds += [(node, _mark_spec(node, mesh), f"marked at {node.meta['source']}") for node in marks]
    outs = [v for v, out in zip(returned, captured.outputs) if out.kind == OUTPUT]
    seeds += [
        (v, spec, "out_specs")
        for v, spec in zip(outs, program.results)
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
    # Before propagation spreads an impossible seed, far from the line that the user wrote.
    for value, spec, where in seeds:
        _check_sizes(value, spec, where.removeprefix("marked at "))
    stored = _stored_over_batch(program)
    program.layouts = propagate_layouts(
        graph, mesh, seeds, ties, program.rules, program.counts, stored=stored
    )
    # Marks become required layouts only now: propagation may have filled their open dimensions.
    for node in marks:
        node.meta["mark"] = program.layouts.spec[node]
    return graph


def _stored_over_batch(program: Program) -> dict[fx.Node, frozenset[str]]:
    """Return the arguments' axes for each weight, in a program with pipelines.

    The batch reaches a stage's body through views and carries, and weights are nearer. Without a
    round of its own their marks would take its axes for the width.
    """
    if not calls_any(program.graph, APART):
        return {}
    rows = list(zip(program.placeholders, program.captured.inputs, program.inputs))
    batch = {
        axis
        for _, inp, spec in rows
        if spec is not None and inp.kind == ARGUMENT
        for axis in spec.sharding_axes
    }
    return {node: frozenset(batch) for node, inp, _ in rows if batch and inp.kind == PARAMETER}


def partition_program(program: Program) -> fx.Graph:
    """Partition: choose every value's layout and insert the collectives."""
    mesh, results, captured = program.mesh, program.results, program.captured
    placeholders, layouts = program.placeholders, program.layouts.spec
    of_module = program.request.of_module
    fixed = {n: layouts[n] for n, spec in zip(placeholders, program.inputs) if spec is not None}
    outputs = _required_outputs(program)
    values, cotangents = program.graph.output_node().args[0], {}
    for node, inp in zip(placeholders, captured.inputs):
        spec = results[inp.output] if inp.kind == TANGENT else None
        # A cotangent is laid out as its output: users write out_specs, and no layout for gradients.
        if spec is not None and not any(spec.open):
            fixed[node] = spec.with_priorities()
        elif spec is not None and of_module:  # a cotangent has the layout of its output
            cotangents[node], outputs[inp.output] = (values[inp.output], spec), node
    return partition_graph(
        program.graph,
        mesh,
        fixed,
        outputs=outputs,
        rules=program.rules,
        keep_marks=program.request.keep_marks,
        memories=program.memories,
        storable=(lambda spec, shape: storable(spec, shape, mesh).map_axes(mesh.whole))
        if of_module
        else None,
        cotangents=cotangents,
        constants=program.request.constants,
        solutions=program.solutions,
        counts=program.counts,
    )


def _drop_trivial(spec: ShardSpec, mesh: Mesh) -> ShardSpec:
    """Return the spec without size-1 axes, which shard nothing."""
    dims = tuple(tuple(a for a in axes if mesh.count((a,)) > 1) for axes in spec.dims)
    return ShardSpec(dims, spec.open).with_priorities(spec.priorities)


def _input_specs(
    captured: Captured,
    mesh: Mesh,
    arguments: Sequence[ShardSpec | None],
    stored: Mapping[str, ShardSpec],
) -> list[ShardSpec | None]:
    """Return the layout required for every graph input, None if there is none."""
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
        # A spec says how, a mark in the model says when: its priorities stay.
        else:
            spec = spec.plain() if spec.parts else spec  # store_parts reads the parts
            spec = spec.with_priorities(inp.mark.priorities) if inp.mark is not None else spec
        specs.append(
            _drop_trivial(spec.check(mesh, inp.shape, f"{inp.kind} '{inp.name}'"), mesh)
            if spec is not None
            else None
        )
    return specs


def _result_specs(
    captured: Captured, inputs: list[ShardSpec | None], out_specs: object, mesh: Mesh, whole: bool
) -> list[ShardSpec | None]:
    """Return the required spec, or None, for every flat output.

    An output that takes the place of an input has its layout. whole: others without one are
    replicated.
    """
    outs = [out for out in captured.outputs if out.kind == OUTPUT]
    values = captured.graph.output_node().args[0][: len(outs)]
    leaves = list(captured.result_leaves)
    # `spread` needs the user's structure, with tensors where the results have some.
    for slot, value in zip(captured.result_slots, values):
        leaves[slot] = value.meta["val"]
    tree = pytree.tree_unflatten(leaves, captured.results)
    specs = [
        None if spec is None else _drop_trivial(spec, mesh)
        for spec in spread(out_specs, tree, mesh, "the result")
    ]
    specs += [None] * (len(values) - len(specs))  # outputs put into arguments and attributes
    specs = [
        inputs[out.input] if spec is None and out.input >= 0 else spec
        for spec, out in zip(specs, outs)
    ]
    return (
        [
            _result_of_module(spec, out, planned_shape(v), mesh)
            for spec, out, v in zip(specs, outs, values)
        ]
        if whole
        else specs
    )


def _result_of_module(
    spec: ShardSpec | None, out: Output, shape: tuple[int, ...], mesh: Mesh
) -> ShardSpec:
    """Return a module's result's layout: replicated, unless another is required."""
    if spec is None:
        return _unconstrained(len(shape)) if out.open else ShardSpec.replicated(len(shape))
    return spec if any(spec.open) else storable(spec, shape, mesh)


def _unconstrained(rank: int) -> ShardSpec:
    return ShardSpec.parse((UNCONSTRAINED,) * rank)


def _mark_spec(node: fx.Node, mesh: Mesh) -> ShardSpec:
    """Return a mark's layout. Raise if it was made for another mesh."""
    # A named exchange is on the program's mesh.
    marked = mesh.unsplit() if node.args[1] == NAMED else Mesh.parse(node.args[1])
    # unsplit(): a mark names the user's axes, while the passes may have split some.
    if marked != mesh.unsplit():
        raise ShardingError(
            f"a value is marked on mesh {marked}, but the program runs on mesh {mesh.unsplit()}",
            where=node.meta["source"],
            fix="use one Mesh for all marks of a program",
        )
    spec = ShardSpec.parse(node.args[2])
    if node.args[1] == NAMED:
        try:
            spec.check(marked, node.meta["val"].shape)
        except ShardingError as error:
            where = node.meta["source"]
            raise ShardingError(error.what, where=where, why=error.why, fix=error.fix) from None
    spec = _drop_trivial(spec, marked).map_axes(mesh.refine)
    _check_sizes(node, spec, node.meta["source"])
    return spec


def _check_sizes(value: fx.Node, spec: ShardSpec, where: str | None) -> None:
    """Raise if a layout shards a dimension whose size depends on values."""
    for d, size in enumerate(planned_shape(value)):
        if spec.dims[d] and is_whole(size):
            raise ShardingError(
                f"dimension {d} of a value with layout '{spec}' has a size that depends on values",
                where=where,
                why="a device knows the rows of its shard only if the size is a whole number times "
                "sizes of arguments",
                fix=f"use the layout '{spec.with_dim(d, ())}', or pad it to a size that is known",
            )


def _required_outputs(program: Program) -> dict[int, ShardSpec | fx.Node]:
    """Return, by output position, its required layout or the input whose layout it has."""
    required: dict[int, ShardSpec | fx.Node] = {}
    captured, specs, placeholders = program.captured, iter(program.results), program.placeholders
    arguments = [i for i, inp in enumerate(captured.inputs) if inp.kind == ARGUMENT]
    whole = {i for i, is_plain in zip(arguments, program.request.plain) if is_plain}
    for i, out in enumerate(captured.outputs):
        spec = next(specs) if out.kind == OUTPUT else None
        # A plain argument is a whole tensor on every rank, so its gradient and update are whole.
        if out.kind != OUTPUT and out.input in whole:
            required[i] = ShardSpec.replicated(len(captured.inputs[out.input].shape))
        elif out.kind in (GRADIENT, MUTATION):
            required[i] = placeholders[out.input]
        elif out.kind == OBSERVED and program.request.of_module:
            required[i] = _unconstrained(program.graph.output_node().args[0][i].meta["val"].dim())
        elif spec is not None:
            required[i] = spec.with_priorities()
    return required
