"""The calling convention of a plan: as lines for who reads a file, and checks that its parts fit.

    x: argument float32[6, 4]
    up.weight: parameter float32[8, 6]
    -> output
    -> gradient of up.weight
    results [null, ...]                 containers, leaves, which of them are tensors or numbers
    constant _tensor_constant0: float32[4] 9f86d081...

All of this is in a file once more, for programs. A file in which the two differ is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...capture import (
    ARGUMENT,
    BUFFER,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    PARAMETER,
    TANGENT,
    UNKNOWN,
    Captured,
)
from ...fx_passes.localize.sizes_in_a_run import shard_inputs
from ...fx_passes.program import Boundary
from ...layout.mesh import Mesh
from . import json_text
from .json_text import Stale, Unshareable
from .values import Encoder


def check_signature(captured: Captured, program: fx.Graph, boundary: Boundary, mesh: Mesh) -> None:
    """Raise Stale unless inputs and outputs fit the program, its layouts and their structure."""
    inputs, outputs = captured.inputs, captured.outputs
    _same(len(shard_inputs(program, mesh)), len(inputs), "inputs")
    _same(_results_of(program), len(outputs), "outputs")
    _same(len(boundary.inputs), len(inputs), "layouts of inputs")
    _same(len(boundary.results), len(outputs), "layouts of results")
    _same(len(boundary.shapes), len(outputs), "shapes of results")
    for spec, each in zip(boundary.inputs, inputs):
        _same(spec.rank, len(each.shape), f"dimensions of '{each.name}'")
    values = [each for each in outputs if each.kind == OUTPUT]
    for each in inputs:
        if each.kind not in (PARAMETER, BUFFER, ARGUMENT, TANGENT):
            raise Stale(f"there is a kind of input {each.kind!r}")
        if each.kind == TANGENT and not 0 <= each.output < len(values):
            raise Stale(f"'{each.name}' belongs to no output")
    for kind in {each.kind for each in outputs}:
        if kind not in (OUTPUT, MUTATION, GRADIENT, OBSERVED):
            raise Stale(f"there is a kind of output {kind!r}")
        places = [each.input for each in outputs if each.kind == kind]
        # In ascending order, each input once: two results for one input would overwrite each other.
        if kind in (MUTATION, GRADIENT) and not _is_ascending(places, len(inputs)):
            raise Stale(f"the outputs of kind {kind} are of inputs {places}")
    _check_structure(captured, len(values))


def _check_structure(captured: Captured, values: int) -> None:
    """Check the structure that arguments and results have, if any."""
    arguments: Any = captured.arguments
    if arguments is not None and captured.leaves is not None:
        _same(len(captured.leaves), arguments.num_leaves, "arguments")
    results: Any = captured.results
    if results is None or captured.result_leaves is None or captured.result_slots is None:
        return
    leaves, slots = captured.result_leaves, captured.result_slots
    _same(len(leaves), results.num_leaves, "leaves of the result")
    for places in (slots, captured.number_slots or ()):
        if not _is_ascending(places, len(leaves)):
            raise Stale(f"the result has its tensors at {places}")
    # Slots with tensors hold None among the leaves: rebuild() fills them.
    if len(slots) > values or any(leaves[slot] is not None for slot in slots):
        raise Stale(f"the result has {len(slots)} tensors, and the program {values}")


def signature_of(captured: Captured) -> list[str]:
    """Return the calling convention and the constants as text lines."""
    inputs, encoder = captured.inputs, Encoder()
    lines = [f"{x.name}: {x.kind} {_tensor_text(x.dtype, x.shape)}" for x in inputs]
    lines += [
        f"-> {x.kind}" + (f" of {inputs[x.input].name}" if 0 <= x.input < len(inputs) else "")
        for x in captured.outputs
    ]
    for names in (
        ("arguments", "leaves"),
        ("results", "result_leaves", "result_slots", "number_slots", "has_backward", "opened"),
    ):
        try:
            values = [encoder.encode(getattr(captured, name)) for name in names]
        except Unshareable:  # then nobody can run it
            values = []
        lines.append(f"{names[0]} {json_text.dump(values)}")
    names = {str(node.target) for node in captured.graph.find_nodes(op="get_attr")}
    for name in sorted(names):  # a file has no constants that nothing reads
        x: Any = getattr(captured.constants, name)
        digest = hashlib.sha256(bytes_of(x)).hexdigest()
        lines.append(f"constant {name}: {_tensor_text(x.dtype, x.shape)} {digest}")
    return lines


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _tensor_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


def check_source(captured: Captured, sharded: fx.Graph) -> None:
    """Raise Stale unless the graphs at global shapes have the program's inputs and outputs."""
    shapes = _known_shapes(captured)
    for graph, name in ((captured.graph, "source"), (sharded, "sharded")):
        nodes = graph.find_nodes(op="placeholder")
        _same(len(nodes), len(captured.inputs), f"inputs of {name}")
        _same(_results_of(graph), len(captured.outputs), f"outputs of {name}")
        # Later stages read "val" without asking.
        for node in graph.nodes:
            if node.op != "output" and "val" not in node.meta:
                raise Stale(f"%{node} of {name} has no value")
        for node, each, sizes in zip(nodes, captured.inputs, shapes):
            val = node.meta["val"]
            if not isinstance(val, Tensor) or not _fits(val, sizes, each.dtype):
                raise Stale(f"'{each.name}' has another shape or dtype in {name}")
    output = sharded.output_node()
    _same(len(output.meta.get("specs", ())), len(captured.outputs), "layouts of sharded's outputs")
    for node in sharded.find_nodes(op="placeholder"):
        if "spec" not in node.meta:
            raise Stale(f"%{node} of sharded has no layout")


def _results_of(graph: fx.Graph) -> int:
    values: Any = graph.output_node().args[0]
    return len(values)


def _known_shapes(captured: Captured) -> list[list[int]]:
    """Return the input shapes, with UNKNOWN for sizes that may differ in each run."""
    shapes = [[*each.shape] for each in captured.inputs]
    arguments = [s for s, each in zip(shapes, captured.inputs) if each.kind == ARGUMENT]
    for tensor, dim in captured.dynamic.dims if captured.dynamic else ():
        if not 0 <= tensor < len(arguments) or not 0 <= dim < len(arguments[tensor]):
            raise Stale(f"argument {tensor} has no dimension {dim}")
        arguments[tensor][dim] = UNKNOWN
    return shapes


def _fits(val: Tensor, shape: list[int], dtype: torch.dtype) -> bool:
    """Return whether a value has an input's shape and dtype, as far as these are known."""
    known = all(size in (n, UNKNOWN) for n, size in zip(val.shape, shape))
    return known and val.dim() == len(shape) and val.dtype == dtype


def _same(found: int, expected: int, name: str) -> None:
    if found != expected:
        raise Stale(f"there are {found} {name}, not {expected}")


def _is_ascending(places: Any, end: int) -> bool:
    """Return whether numbers ascend within 0, ..., end - 1."""
    return [*places] == sorted({*places}) and all(0 <= place < end for place in places)
