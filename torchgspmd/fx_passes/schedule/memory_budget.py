"""The bytes that the peak of a device may have, and the error of a program that needs more."""

from __future__ import annotations

import math

import torch

from ...capture import PARAMETER
from ...errors import ShardingError
from ..localize.sizes_in_a_run import shard_inputs
from ..program import Program
from ..units import size_text
from .liveness import bytes_of, peak

STATES = 2 * torch.float32.itemsize  # bytes of an optimizer for an element of a parameter


def budget_of(program: Program) -> int:
    """Return the bytes that the peak of a program of one device may have."""
    request = program.request
    if request.memory_budget is not None:
        return request.memory_budget
    memory = program.hardware.memory
    if request.hardware is None and request.device == "cuda" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    parameters = (
        math.prod(node.meta["shape"])
        for node, inp in zip(shard_inputs(program.graph, program.mesh), program.captured.inputs)
        if inp.kind == PARAMETER
    )
    return int(memory) - STATES * sum(parameters)


def check_budget(program: Program) -> None:
    """Raise ShardingError if a program, as it is scheduled, needs more than its budget."""
    least, budget = peak(program.graph), budget_of(program)
    if least <= budget:
        return
    inputs = shard_inputs(program.graph, program.mesh)
    from_outside = sum(map(bytes_of, inputs))
    raise ShardingError.here(
        f"a device needs {size_text(least)}, more than the memory budget of {size_text(budget)}",
        why=f"no choice of recomputed values needs less; of it parameters and arguments are "
        f"{size_text(from_outside)}",
        fix=f"set a budget of {least}, or divide more: docs/out_of_memory.md",
    )
