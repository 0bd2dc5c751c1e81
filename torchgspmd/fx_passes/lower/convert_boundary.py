"""Convert between the tensors that a caller has and the shards that a program computes on.

before   %x = input;  %y = mm(%x, ...);  return %y
after    %x = input;  %s = take_part(%x, 0, 1, 2);  %y = mm(%s, ...)       # a whole tensor comes in
         %n = narrow(%y, 0, 0, 3);  return contiguous(%n)                 # without the padding
needs    the program of one rank, forward and backward
ensures  inputs and outputs are what DTensors store; gradients have the strides of parameters
"""

from __future__ import annotations

from torch import fx

from ...capture import ARGUMENT, GRADIENT, TANGENT
from ...dtensor.storage import cut_padding, pad_stored, slice_global, stored_shape, strided_like
from ..program import Program


def convert_inputs(program: Program) -> fx.Graph:
    """Insert the conversion of the caller's tensors to the shards that the program takes."""
    graph, mesh, coordinates = program.graph, program.mesh, program.rank.groups.coordinates
    plain, boundary = iter(program.request.plain), program.boundary
    for node, inp, spec in zip(program.placeholders, program.captured.inputs, boundary.inputs):
        is_whole = inp.kind == ARGUMENT and next(plain)
        if inp.kind == TANGENT:
            out_spec = boundary.results[inp.output]
            is_whole = out_spec is None or not out_spec.sharding_axes
        if is_whole:
            slice_global(graph, node, spec, mesh, coordinates)
        else:
            pad_stored(
                graph,
                node,
                stored_shape(spec, inp.shape, mesh, coordinates),
                spec.local_shape(inp.shape, mesh),
            )
    return graph


def convert_outputs(program: Program) -> fx.Graph:
    """Remove the padding of results and gradients.

    Gradients of parameters get the strides of these, as optimizers expect.
    """
    graph, mesh, coordinates = program.graph, program.mesh, program.rank.groups.coordinates
    node, boundary = graph.output_node(), program.boundary
    outputs = []
    with graph.inserting_before(node):
        for value, spec, shape, out in zip(
            node.args[0], boundary.results, boundary.shapes, program.captured.outputs
        ):
            if spec is not None and shape is not None:
                meta = value.meta
                stored = stored_shape(spec, shape, mesh, coordinates)
                value = cut_padding(graph, value, stored, spec.local_shape(shape, mesh))
                if out.kind == GRADIENT and out.input in program.rank.parameters:
                    value = strided_like(graph, value, program.rank.parameters[out.input])
                value.meta = value.meta or dict(meta)
            outputs.append(value)
    node.args = (tuple(outputs),)
    return graph
