"""Passes that need more from a program than its graph, as the pipeline's rows call them.

It has the criteria between alternatives, too.
"""

from __future__ import annotations

import copy

import torch
from torch import fx

from ..capture import ARGUMENT, GRADIENT, MUTATION, OBSERVED, PARAMETER, TANGENT
from ..rules.custom_ops.loops import LOOP_MARKS
from ..rules.ops.concat_slice import FEWEST_PARTS, pieces_taken
from .expand import keep_dims as dims
from .expand import reduce_dtype as reductions
from .expand import split_axes as sub_axes
from .expand import split_fused as fused
from .expand import split_products as products
from .expand import store_parts as storage
from .expand.undivided import Work
from .ir import runs, tensors_of
from .localize.localize_graph import localize_graph
from .lower.split_joint import split_joint as split_graph
from .partition import regather_weights as weights
from .partition.hierarchical_sums import hierarchical_sums as hierarchical_sums_of_graph
from .partition.insert_collectives import inserted
from .program import Program
from .replication_report import data_axes
from .schedule.bucket import bucket as bucket_graph
from .schedule.liveness import peak
from .schedule.memory_budget import budget_of
from .schedule.overlap import overlap as overlap_graph


def keep_dims(program: Program) -> fx.Graph | None:
    """Keep the parts of flattened dimensions that layouts need."""
    return dims.keep_dims(program.graph, program.layouts, program.rules)


def keeps_dims(program: Program) -> bool:
    """Return whether `keep_dims` has a reason to change the program."""
    return any(dims.blocked_dims(program.graph, program.layouts, program.rules))


def split_fused(program: Program) -> fx.Graph | None:
    """Decompose operations that are sharded along a dimension which they need whole."""
    splitting = fused.ops_to_split(program.graph, program.layouts, program.rules)
    return program.request.expand(program.graph, splitting) if splitting else None


def split_vectors(program: Program) -> fx.Graph | None:
    """Decompose vector operations that send less in parts, or more, as the partition shows."""
    splitting = fused.ops_to_split(program.graph, program.layouts, program.rules, tried=True)
    return program.request.expand(program.graph, splitting) if splitting else None


def split_products(program: Program) -> fx.Graph | None:
    """Compute products whose result is cut piece by piece."""
    changed = products.split_products(program.graph, program.layouts, program.rules)
    return program.graph if changed else None


def splits_products(program: Program) -> bool:
    """Return whether `split_products` will change the program."""
    return products.splits_products(program.graph, program.layouts, program.rules)


def store_parts(program: Program) -> fx.Graph | None:
    """Store weights by the parts into which their products are cut."""
    changed = storage.store_parts(
        program.graph,
        program.layouts,
        program.rules,
        program.captured,
        program.inputs,
        program.request.stored,
        program.request.arguments,
        program.request.bound,
        data_axes(program.captured, program.request.arguments) | program.request.stored_over,
    )
    return program.graph if changed else None


def has_undivided_twins(program: Program) -> bool:
    """Return whether equal operations are divided by no axis, so that lanes may have them."""
    return work_of(program).has_twins()


def has_sharded_parts(program: Program) -> bool:
    """Return whether operations take several equal parts of a value along a sharded dimension.

    A loop takes its rows one by one.
    """
    for op in program.rules.ops(program.graph):
        if len(op.operands) != 1 or not op.results:
            continue
        dims, shape = program.layouts.spec[op.operands[0]].dims, op.operands[0].meta["val"].shape
        if op.node.target in LOOP_MARKS:
            if dims and dims[0] and {*op.rule.operands[0][0]} & op.rule.replicated:
                return True
            continue
        shapes = [t.shape for t in tensors_of(op.node)]
        pieces = pieces_taken(op.node.target, op.node.args, op.rule, shape, shapes)
        # Fewer are gates of a cell, or queries beside keys.
        if pieces is not None and pieces.count >= FEWEST_PARTS and dims[pieces.dim]:
            return True
    return False


def work_of(program: Program) -> Work:
    """Return who has the work in a propagated program."""
    captured = program.captured
    pairs = enumerate(zip(program.placeholders, captured.inputs))
    kept = {out.input for out in captured.outputs if out.kind == MUTATION}  # as weights are
    batch = {node for i, (node, inp) in pairs if inp.kind in (ARGUMENT, TANGENT) and i not in kept}
    return Work(program.graph, program.layouts, program.rules, batch)


def split_axes(program: Program) -> fx.Graph | None:
    """Continue with a mesh whose axes are split, where an operation can use only a part."""
    splits = sub_axes.required_splits(program.graph, program.layouts, program.rules)
    if not splits:
        return None
    mesh = program.mesh = program.mesh.split(splits)
    # Requirements name axes as the user wrote them, which the finer mesh lacks.
    program.inputs, program.results = (
        [spec and spec.map_axes(mesh.refine) for spec in specs]
        for specs in (program.inputs, program.results)
    )
    return program.graph


def reduce_dtype(program: Program) -> fx.Graph | None:
    """Sum parameter gradients in the requested dtype."""
    captured, dtype = program.captured, program.request.reduce_dtype
    gradients = [
        i
        for i, out in enumerate(captured.outputs)
        if out.kind == GRADIENT and captured.inputs[out.input].kind == PARAMETER
    ]
    assert dtype is not None, "the pipeline asks before"
    changed = reductions.reduce_in(program.graph, gradients, dtype, program.rules)
    return program.graph if changed else None


def merge_axes(program: Program) -> fx.Graph | None:
    """Go back to the mesh that the request has."""
    fine, program.mesh = program.mesh, program.request.mesh
    return None if fine == program.mesh else sub_axes.merge_axes(program.graph, fine)


def regather_weights(program: Program) -> fx.Graph:
    """Gather weights again where they are used again; with "all" other values, too."""
    return weights.regather_weights(program.graph, activations=program.request.regather == "all")


def localize_program(program: Program) -> fx.Graph:
    """Return one device's graph; the partitioned one stays with the program."""
    program.sharded = program.graph
    return localize_graph(program.graph, program.mesh, program.stand_ins)


def bucket(program: Program) -> fx.Graph:
    """Merge collectives."""
    halves = program.captured.has_backward
    return bucket_graph(program.graph, program.mesh, program.hardware, halves)


def overlap(program: Program) -> fx.Graph:
    """Move starts up and waits down, for the reasons that are not skipped."""
    skip, returned = program.request.skip_passes, program.graph.output_node().args[0]
    room = budget_of(program) - peak(program.graph) if program.request.has_budget else None
    kinds = [out.kind for out in program.captured.outputs]
    return overlap_graph(
        program.graph,
        early="overlap" not in skip,
        prefetch="prefetch" not in skip,
        most=None if room is None else max(room, 0),
        updates={v for v, kind in zip(returned, kinds) if kind == MUTATION},
    )


def has_hosts(program: Program) -> bool:
    """Return whether the request names the hardware, or the processes are on several hosts."""
    return program.request.hardware is not None or program.request.hosts > 0


def hierarchical_sums(program: Program) -> fx.Graph | None:
    """Reduce over hosts in steps."""
    return hierarchical_sums_of_graph(program.graph, program.mesh, program.hardware)


def split_joint(program: Program) -> fx.Graph:
    """Return the forward's graph; the backward becomes a program of its own."""
    kinds = [out.kind for out in program.captured.outputs]
    forward, backward = split_graph(
        program.graph,
        sum(inp.kind == TANGENT for inp in program.captured.inputs),
        kinds.count(GRADIENT) + kinds.count(OBSERVED),
    )
    program.backward = copy.copy(program)
    program.backward.graph = backward
    return forward


def sent_bytes(p: Program) -> float:
    """Return the bytes that a device sends in a partitioned program."""
    return sum(node.meta["step"].sent * runs(node) for node in inserted(p.graph))


def work(p: Program) -> float:
    """Return a device's arithmetic and memory traffic, at the partition's prices."""
    decisions = p.graph.output_node().meta["decisions"]
    return sum(strategy.work for strategy in decisions.strategies.values())


def price(p: Program) -> float:
    """Return the bytes that a device sends, and those that a link would send while it works."""
    constants = p.request.constants
    return sent_bytes(p) + work(p) * constants.flops_per_byte / constants.link_flops_per_byte


def fits_device(p: Program) -> bool:
    """Return whether one device's program fits into its budget or GPU; elsewhere it does."""
    if p.request.has_budget:
        return peak(p.graph) <= budget_of(p)
    inputs = p.captured.graph.find_nodes(op="placeholder")
    on_card = any(n.meta["val"].device.type == "cuda" for n in inputs)
    if not on_card or not torch.cuda.is_available():  # asked alone, it forbids forks that use cards
        return True
    card = torch.cuda.get_device_properties(torch.cuda.current_device())  # opens no context
    return peak(p.graph) <= card.total_memory
