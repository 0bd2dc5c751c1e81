"""Products with a gathered operand, or a scattered result, by PyTorch's symmetric memory.

    gather    fused_all_gather_matmul: a device multiplies shards that it copies from the others
    scatter   fused_matmul_reduce_scatter: it writes each term where it is summed

The GPUs of a host read each other's memory over NVLink, so no kernel of NCCL takes part. Elsewhere
the products travel round a ring (kinds/ring_einsum.py). Source: PyTorch's async tensor parallelism,
torch.distributed._symmetric_memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ..compat.private_apis import _symmetric_memory, is_missing
from .process_groups import ProcessGroups

_LEAST = (9, 0)  # Hopper; PyTorch's kernels are tuned for it


def is_connected(groups: ProcessGroups, axes: tuple[str, ...]) -> bool:
    """Return whether the GPUs of this rank's group over `axes` share memory. All its ranks agree.

    They are on one host: each has as many processes as torchrun says, or as it has GPUs.
    """
    if groups.device_type != "cuda" or groups.is_assumed or groups.is_fake:
        return False
    if is_missing(_symmetric_memory) or torch.cuda.get_device_capability() < _LEAST:
        return False
    a_host = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    ranks = next(g for g in groups.mesh.groups(axes) if groups.rank in g)
    return len({groups.processes[rank] // a_host for rank in ranks}) == 1


def is_turned(equation: str, side: int) -> bool | None:
    """Return whether an einsum is `x @ m.t()` (True) or `x @ m` (False), with x operand `side`.

    None: it is no product of rows with a matrix.
    """
    operands, _, result = equation.partition("->")
    rows, matrix = operands.split(",")[side], operands.split(",")[1 - side]
    if len(rows) < 2 or not result or result[:-1] != rows[:-1]:
        return None
    return {rows[-1] + result[-1]: False, result[-1] + rows[-1]: True}.get(matrix)


def fused_gather_einsum(
    x: Tensor, others: Sequence[Tensor], dim: int, turned: Sequence[bool], keep: bool, name: str
) -> tuple[Tensor, ...]:
    """Compute gather_einsum on one device. turned: as is_turned says, for each product."""
    matrices = [other.t() if turn else other for other, turn in zip(others, turned)]
    gathered, results = torch.ops.symm_mem.fused_all_gather_matmul(
        x, matrices, dim, name, return_A=keep
    )
    return (*results, gathered) if keep else tuple(results)


def fused_einsum_scatter(x: Tensor, other: Tensor, dim: int, turned: bool, name: str) -> Tensor:
    """Compute einsum_scatter on one device."""
    matrix = other.t() if turned else other
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, name)
