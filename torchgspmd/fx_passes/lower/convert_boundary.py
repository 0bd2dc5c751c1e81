"""Convert between the tensors that a caller has and the shards that a program computes on.

before   %x = input;  %y = mm(%x, ...);  return %y
after    %x = input;  %s = take_part(%x, 0, 1, 2);  %y = mm(%s, ...)       # a whole tensor comes in
         %n = narrow(%y, 0, 0, 3);  return contiguous(%n)                 # without the padding
needs    the program of one rank, forward and backward
ensures  inputs and outputs are what DTensors store; gradients have the strides of parameters
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from ...capture import ARGUMENT, GRADIENT, TANGENT
from ...comm.loop_call import LoopCall
from ...compat.fx_nodes import viewed_operands
from ...compat.operators import aten
from ...dtensor.storage import (
    cut_padding,
    local_of,
    memory_format,
    pad_stored,
    slice_global,
    stored_shape,
)
from ..program import Program

# Views of all elements of a vector, or of consecutive ones.
_CONSECUTIVE = (
    operator.getitem,
    aten.contiguous.default,
    aten.reshape.default,
    aten.split_with_sizes.default,
)


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

    Gradients of parameters get the strides of these, as optimizers expect, and memory of their own:
    in eager PyTorch, autograd copies a gradient that somebody else holds.
    """
    graph, mesh, coordinates = program.graph, program.mesh, program.rank.groups.coordinates
    node, boundary = graph.output_node(), program.boundary
    outputs, owned = [], list[_Memory]()
    with graph.inserting_before(node):
        for value, spec, shape, out in zip(
            node.args[0], boundary.results, boundary.shapes, program.captured.outputs
        ):
            if spec is not None and shape is not None:
                meta = value.meta
                stored = stored_shape(spec, shape, mesh, coordinates)
                value = cut_padding(graph, value, stored, spec.local_shape(shape, mesh))
                if out.kind == GRADIENT and out.input in program.rank.parameters:
                    value = _own_gradient(value, program.rank.parameters[out.input], owned)
                value.meta = value.meta or dict(meta)
            outputs.append(value)
    node.args = (tuple(outputs),)
    return graph


class _Memory:
    """The memory of a value. base: the value that allocates it. path: the piece of it, by index."""

    def __init__(self, value: fx.Node) -> None:
        self.path: tuple[int, ...] = ()
        self.is_consecutive = True
        while viewed := viewed_operands(value):
            if value.target is operator.getitem:
                call, index = value.args[0].target, value.args[1]
                if isinstance(call, LoopCall) and index >= call.carries:  # a stack or a total
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
    """Return a gradient in the memory format of its parameter, in memory of its own.

    Fused optimizers assume equal strides without a check. owned: the memory of the gradients
    before, to which that of this one is added.
    """
    memory, order = _Memory(value), memory_format(local_of(parameter))
    if memory.base.op != "call_function" or any(map(memory.overlaps, owned)):
        op = aten.clone.default
    else:
        owned.append(memory)
        op = aten.contiguous.default
        if parameter.dim() < 2 and memory.is_consecutive:
            return value
    return value.graph.call_function(op, (value,), {"memory_format": order})
