"""Store an optimizer's states in parts over the batch's axes, where the step sends less so.

before   %m : f32[256, 256]       = input        momentum, whole on every device, as its weight
         all_reduce of the gradient in f32, all_gather of the result in bf16
after    %m : f32[256@data, 256]  = input
         reduce_scatter of the gradient in f32, all_to_all and all_gather in bf16
needs    a propagated graph, rules
source   weight-update sharding (arXiv 2004.13336)

It is for states of whole matrices, which no layout divides, as Muon's. An elementwise update sends
the same bytes both ways. The program is also planned with whole states, and the one that sends less
is taken (compiler/api.py). Weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from ...capture import MUTATION, PARAMETER
from ...dtensor.storage import storable
from ...layout.mark import stored_over
from ...shard_spec import ShardSpec
from ..program import Program
from ..replication_report import data_axes
from .undivided import work_of


def store_states(p: Program) -> fx.Graph | None:
    """Require layouts in parts for states; None if there are none to store so."""
    if not (wanted := _wanted(p)):
        return None
    rows = list(zip(p.placeholders, p.captured.inputs, p.inputs))
    axes = "+".join(dict.fromkeys(a for _, spec in wanted.values() for a in spec))
    names = [inp.name for node, inp, _ in rows if node in wanted]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    line = (
        f"stored in parts over {axes}, to send less: {names[0]}{more} (shard_updates=False: whole)"
    )
    specs: list[ShardSpec | None] = []
    for node, inp, spec in rows:
        if node in wanted:
            node.meta["chosen"], spec = line, wanted[node][0]
        elif inp.kind == PARAMETER and spec is None:
            spec = p.layouts.spec[node].closed()  # weights stay as they are
        specs.append(spec)
    p.inputs = specs
    return p.graph


def _wanted(p: Program) -> dict[fx.Node, tuple[ShardSpec, list[str]]]:
    """Return the layouts in parts of states, each with the axes that it has more."""
    captured, mesh, found = p.captured, p.mesh, dict[fx.Node, tuple[ShardSpec, list[str]]]()
    batch = data_axes(captured, p.request.arguments)
    axes = [a for a in mesh.names if a in batch and mesh.count((a,)) > 1]
    rows = list(zip(p.placeholders, captured.inputs, p.inputs))
    states = [(node, inp, spec) for node, inp, spec in rows if inp.name in p.request.states]
    for node, inp, required in states if axes else ():
        if any(a in p.layouts.spec[node].sharding_axes for a in axes):
            continue
        spec, more = (required or p.layouts.spec[node]).closed(), []
        for axis in axes:
            wider = stored_over(spec, inp.shape, mesh, axis) if inp.shape else spec
            if storable(wider, inp.shape, mesh) == wider and wider != spec:
                spec, more = wider, [*more, axis]
        if more and inp.dtype.is_floating_point:
            found[node] = spec, more
    of_matrices = _of_matrices(p, found) if found else ()
    return {node: each for node, each in found.items() if node in of_matrices}


def _of_matrices(p: Program, states: Collection[fx.Node]) -> set[fx.Node]:
    """Return the states that work on whole matrices reads or writes.

    Work that depends on no state is the model's.
    """
    work, updates = work_of(p), {*states}
    for op in work.ops:
        if not updates.isdisjoint(op.node.all_input_nodes):
            updates.add(op.node)
            updates.update(v for v in op.results if v is not None)
    core = [op for op in work.ops if op.node in updates and work.is_undivided(op)]
    behind = {op.node for op in core}
    before = set(behind)
    for op in work.ops if core else ():
        if not behind.isdisjoint(op.node.all_input_nodes):
            behind.update((op.node, *(v for v in op.results if v is not None)))
    for op in reversed(work.ops if core else []):
        if op.node in before or not before.isdisjoint(v for v in op.results if v is not None):
            before.update((op.node, *op.node.all_input_nodes))
    returned: Any = p.graph.output_node().args[0]
    written = {
        p.placeholders[out.input]
        for value, out in zip(returned, p.captured.outputs)
        if out.kind == MUTATION and value in behind
    }
    return {node for node in states if node in before or node in written}
