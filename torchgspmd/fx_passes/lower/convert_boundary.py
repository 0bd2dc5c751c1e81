"""Convert between the tensors that a caller has and the shards that a program computes on.

before   %x = input;  %y = mm(%x, ...);  return %y
after    %x = input;  %s = take_part(%x, 0, 1, 2);  %y = mm(%s, ...)       # a whole tensor comes in
         %n = narrow(%y, 0, 0, 3);  return contiguous(%n)                 # without the padding
needs    one rank's program, forward and backward
ensures  inputs and outputs are as DTensors store them; gradients have the parameters' strides
"""

from __future__ import annotations

import copy
import operator
from functools import partial
from operator import getitem

from torch import Tensor, fx

from ...capture import ARGUMENT, GRADIENT, OBSERVED, TANGENT
from ...comm.local_ops import cut_shard, pad_rows
from ...compat.fx_nodes import copy_node, drop_unused, reached, viewed_operands
from ...compat.operators import aten
from ...dtensor.storage import (
    cut_padding,
    insert_after,
    local_of,
    memory_format,
    pad_stored,
    slice_global,
    stored_shape,
)
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..localize.sizes_in_a_run import RunSizes, needs_number
from ..loop_call import LoopCall
from ..program import Program


def split_halves(p: Program) -> fx.Graph:
    """Return the forward's graph; the backward becomes a program of its own."""
    kinds = [out.kind for out in p.captured.outputs]
    forward, backward = split_joint(
        p.graph,
        sum(inp.kind == TANGENT for inp in p.captured.inputs),
        kinds.count(GRADIENT) + kinds.count(OBSERVED),
    )
    p.backward = copy.copy(p)
    p.backward.graph = backward
    return forward


def split_joint(graph: fx.Graph, tangents: int, gradients: int) -> tuple[fx.Graph, fx.Graph]:
    """Split a joint program into the forward, and the backward from the values that it saves.

    before   one graph whose nodes say whether they belong to the backward
    after    forward: inputs -> outputs, saved values
             backward: saved values, cotangents -> gradients
    needs    meta["backward"]; the last inputs are `tangents` cotangents, the last outputs
             `gradients` gradients

    A checkpointed region's recomputation is part of the backward already (capture records it so).
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    cotangents = set(placeholders[len(placeholders) - tangents :])
    returned = graph.output_node().args[0]
    outputs, grads = returned[: len(returned) - gradients], returned[len(returned) - gradients :]
    backward_nodes = set(cotangents)
    for node in graph.nodes:
        # A recomputed node depends on no cotangent; its mark says where it belongs.
        if node.op == "call_function" and (
            node.meta.get("backward") or any(n in backward_nodes for n in node.all_input_nodes)
        ):
            backward_nodes.add(node)
    # An output is returned before any backward runs, whatever its mark says.
    _move_to_forward(outputs, backward_nodes)
    for node in graph.nodes:
        # A tuple cannot be saved, only the tensors in it.
        if node.target is getitem and node.args[0] not in backward_nodes:
            backward_nodes.discard(node)
    saved = _saved_values(graph, backward_nodes, grads)
    forward, backward = fx.Graph(), fx.Graph()
    in_forward: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output" and node not in backward_nodes:
            in_forward[node] = copy_node(forward, node, in_forward.__getitem__)
    forward.output(
        (
            *(in_forward[o] if isinstance(o, fx.Node) else o for o in outputs),
            *(in_forward[s] for s in saved),
        )
    )
    in_backward = {}
    for value in (*saved, *placeholders[len(placeholders) - tangents :]):
        in_backward[value] = backward.placeholder(value.name)
        in_backward[value].meta = dict(value.meta)
    for node in graph.nodes:
        # A constant is not saved: each half reads it.
        if node.op == "get_attr" and any(user in backward_nodes for user in node.users):
            in_backward[node] = copy_node(backward, node)
        elif node in backward_nodes and node not in cotangents:
            in_backward[node] = copy_node(backward, node, in_backward.__getitem__)
    backward.output(tuple(in_backward[g] if isinstance(g, fx.Node) else g for g in grads))
    drop_unused(forward)
    drop_unused(backward)
    return forward, backward


def _move_to_forward(outputs: tuple, backward_nodes: set[fx.Node]) -> None:
    """Remove from `backward_nodes` the forward's results, and all their operands."""
    results = (o for o in outputs if isinstance(o, fx.Node))
    for node in reached(results, lambda n: backward_nodes.intersection(n.all_input_nodes)):
        if node.op == "call_function":
            backward_nodes.discard(node)


def _saved_values(graph: fx.Graph, backward_nodes: set[fx.Node], grads: tuple) -> list[fx.Node]:
    """Return the forward values that the backward uses, in program order."""
    returned = {g for g in grads if isinstance(g, fx.Node)}
    return [
        n
        for n in graph.nodes
        if n.op in ("placeholder", "call_function")
        and n not in backward_nodes
        and (n in returned or any(user in backward_nodes for user in n.users))
    ]


# Views of all elements of a vector, or of consecutive ones.
_CONSECUTIVE = (
    operator.getitem,
    aten.contiguous.default,
    aten.reshape.default,
    aten.split_with_sizes.default,
)


def convert_inputs(program: Program) -> fx.Graph:
    """Insert the conversion from the caller's tensors to the shards that the program takes."""
    graph, mesh, coordinates = program.graph, program.mesh, program.rank.groups.coordinates
    plain, boundary = iter(program.request.plain), program.boundary
    for node, inp, spec in zip(program.placeholders, program.captured.inputs, boundary.inputs):
        is_whole = inp.kind == ARGUMENT and next(plain)
        # A cotangent comes from the caller's autograd, in the layout that its output went out in.
        if inp.kind == TANGENT:
            out_spec = boundary.results[inp.output]
            is_whole = out_spec is None or not out_spec.sharding_axes
        if is_whole:
            groups = partial(_group, graph, node, mesh, spec=spec)
            slice_global(graph, node, spec, mesh, coordinates, groups)
        else:
            spec = _pad_open_dims(graph, node, spec, mesh)
            pad_stored(
                graph,
                node,
                stored_shape(spec, inp.shape, mesh, coordinates),
                spec.local_shape(inp.shape, mesh),
            )
    return graph


def _group(graph: fx.Graph, node: fx.Node, mesh: Mesh, dim: int, spec: ShardSpec) -> int | fx.Node:
    """Return how many rows in an input's dimension stay together on one device."""
    other = node.meta.get("unknown") or node.meta["shape"]
    rows, second = node.meta["shape"][dim], other[dim]
    if rows == second:
        return 1
    count = mesh.count(spec.dims[dim])
    group = RunSizes.of_rank(graph, mesh).group(rows * count, second * count)
    assert group is not None, f"%{node} has shards of a size that no input says"
    return group


def _pad_open_dims(graph: fx.Graph, node: fx.Node, spec: ShardSpec, mesh: Mesh) -> ShardSpec:
    """Pad sharded dimensions whose sizes a run knows. Return the other dimensions' layout."""
    other = node.meta.get("unknown") or node.meta["shape"]
    for d, (rows, second, axes) in enumerate(zip(node.meta["shape"], other, spec.dims)):
        if not axes or rows == second:
            continue
        count = mesh.count(axes)
        if _group(graph, node, mesh, d, spec) != 1:  # a DTensor has other rows
            raise needs_number(node.name, node.meta.get("source"))

        def padded(d: int = d, sizes: tuple = (rows * count, second * count, axes)) -> fx.Node:
            rows_of_run = RunSizes.of_rank(graph, mesh).shard(*sizes)
            assert rows_of_run is not None, f"%{node} has shards of a size that no input says"
            return graph.call_function(pad_rows, (node, d, rows_of_run))

        insert_after(graph, node, padded)
        spec = spec.with_dim(d, ())
    return spec


def convert_outputs(program: Program) -> fx.Graph:
    """Remove padding from results and gradients.

    Parameter gradients get the parameters' strides, as optimizers expect, and memory of their own:
    in eager PyTorch, autograd copies a gradient that somebody else holds.
    """
    graph, mesh, coordinates = program.graph, program.mesh, program.rank.groups.coordinates
    node, boundary = graph.output_node(), program.boundary
    outputs, owned = [], list[_Memory]()
    with graph.inserting_before(node):
        for value, spec, shape, other, out in zip(
            node.args[0],
            boundary.results,
            boundary.shapes,
            boundary.other,
            program.captured.outputs,
        ):
            if spec is not None and shape is not None and other is not None:
                meta = value.meta
                value, spec = _cut_open_dims(program, value, spec, (shape, other))
                stored = stored_shape(spec, shape, mesh, coordinates)
                value = cut_padding(graph, value, stored, spec.local_shape(shape, mesh))
                if out.kind == GRADIENT and out.input in program.rank.parameters:
                    value = _own_gradient(value, program.rank.parameters[out.input], owned)
                value.meta = value.meta or dict(meta)
            outputs.append(value)
    node.args = (tuple(outputs),)
    return graph


def _cut_open_dims(
    program: Program, value: fx.Node, spec: ShardSpec, shapes: tuple[tuple[int, ...], ...]
) -> tuple[fx.Node, ShardSpec]:
    """Cut sharded dimensions whose sizes a run knows. Return the other dimensions' layout, too."""
    graph, mesh, coordinates = program.graph, program.mesh, program.rank.groups.coordinates
    for d, (size, other, axes) in enumerate(zip(*shapes, spec.dims)):
        if not axes or size == other:
            continue
        sizes = RunSizes.of_rank(graph, mesh)
        rows = sizes.whole(size, other) if sizes.group(size, other) == 1 else None
        if rows is None:
            raise needs_number(value.name, value.meta.get("source"))
        value = graph.call_function(cut_shard, (value, d, mesh.index(axes, coordinates), rows))
        spec = spec.with_dim(d, ())
    return value, spec


class _Memory:
    """A value's memory. base: the value that allocates it. path: the piece of it, by index."""

    def __init__(self, value: fx.Node) -> None:
        self.path: tuple[int, ...] = ()
        self.is_consecutive = True
        while viewed := viewed_operands(value):
            if value.target is operator.getitem:
                call, index = value.args[0].target, value.args[1]
                # A loop's results beside its carries are new tensors, not pieces of one.
                if isinstance(call, LoopCall) and not call.is_carry(index):
                    break
                self.path = (index, *self.path)
            self.is_consecutive &= value.target in _CONSECUTIVE
            value = viewed[0]
        self.base = value

    def overlaps(self, other: _Memory) -> bool:
        """Return whether both may have elements in common."""
        n = min(len(self.path), len(other.path))
        return self.base is other.base and self.path[:n] == other.path[:n]


def _own_gradient(value: fx.Node, parameter: Tensor, owned: list[_Memory]) -> fx.Node:
    """Return a gradient in its parameter's memory format, in memory of its own.

    Fused optimizers assume equal strides without a check. owned: the memory that earlier gradients
    have, to which this one's is added.
    """
    memory, order = _Memory(value), memory_format(local_of(parameter))
    # `contiguous` returns its operand if that is in order: only fresh memory may be given away.
    if memory.base.op != "call_function" or any(map(memory.overlaps, owned)):
        op = aten.clone.default
    else:
        owned.append(memory)
        op = aten.contiguous.default
        if parameter.dim() < 2 and memory.is_consecutive:
            return value
    return value.graph.call_function(op, (value,), {"memory_format": order})
