"""Libraries that carry collectives of GPUs, each where it can: DeepEP, PyTorch's symmetric memory.

    all_to_all  DeepEP sends no rows without a value: of x [n, rows, m], block i goes to member i
    gather      fused_all_gather_matmul: a device multiplies shards that it copies from the others
    scatter     fused_matmul_reduce_scatter: it writes each term where it is summed

Experts exchange blocks with room for more rows than they have (moe.dispatch, capacity); the others
are zeros, and so is the result where nothing arrives. DeepEP takes a row's expert, here its rank,
and a weight, here its place in the result. Source: deepseek-ai/DeepEP, `Buffer.dispatch`.

The GPUs of a host read each other's memory over NVLink, so no kernel of NCCL takes part in a fused
product. Elsewhere the products travel round a ring (kinds/ring_einsum.py). Source: PyTorch's async
tensor parallelism, torch.distributed._symmetric_memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.private_apis import _symmetric_memory, is_missing
from .process_groups import ProcessGroups

_LEAST = (9, 0)  # Hopper; PyTorch's kernels are tuned for it
LEAST_BYTES = 1024  # of a row; DeepEP's kernels are for the width of a model
VECTOR = 16  # bytes that they move at a time
MOST_ROWS = 2**24  # whose places float32 counts
A_HOST = 8  # GPUs that NVLink joins


def takes_rows(groups: ProcessGroups, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether DeepEP is there for these GPUs and carries [n, ..., m] in a dtype."""
    row = shape[-1] * dtype.itemsize
    return (
        on_gpus(groups)
        and dtype == torch.bfloat16
        and len(shape) > 2
        and row >= LEAST_BYTES
        and row % VECTOR == 0
        and math.prod(shape[:-1]) < MOST_ROWS
        and importlib.util.find_spec("deep_ep") is not None
        and _has_sizes_for(shape[0])
    )


def on_gpus(groups: ProcessGroups) -> bool:
    return groups.device.type == "cuda" and not groups.is_fake


def _has_sizes_for(ranks: int) -> bool:
    try:
        _library().Buffer.get_dispatch_config(ranks)
    except AssertionError:
        return False
    return True


def _library() -> Any:
    return importlib.import_module("deep_ep")


class RowExchange:
    """An all_to_all in one group, which waits. Its buffer is created at the first call."""

    sends = True
    __name__ = "deep_ep_exchange"

    def __init__(self, groups: ProcessGroups, name: str) -> None:
        self.groups = groups
        found: Any = next(g for g in groups.created if g is not None and g.group_name == name)
        self.group = found

    def __call__(self, x: Tensor) -> Tensor:
        """Return [n, ..., m]: block i from member i."""
        n, m = x.shape[0], x.shape[-1]
        flat = x.reshape(-1, m).contiguous()
        rows = len(flat) // n
        buffer = self._buffer(m * x.itemsize)
        # With this option the host does not wait for counts.
        has_option = "num_worst_tokens" in inspect.signature(buffer.dispatch).parameters
        most = {"num_worst_tokens": len(flat)} if has_option and n <= A_HOST else {}
        # By its bits: -0.0 is a value.
        is_used = (flat.view(torch.int16) != 0).any(1)
        to = torch.arange(n, device=x.device).repeat_interleave(rows).where(is_used, -1)
        spots = torch.arange(rows, device=x.device, dtype=torch.float32)
        places = (spots + self.group.rank() * rows).repeat(n).unsqueeze(1)
        to = to.unsqueeze(1)
        by_rank, by_host, by_expert, is_sent, _ = buffer.get_dispatch_layout(to, n)
        received, chosen, weights, *_ = buffer.dispatch(
            flat,
            topk_idx=to,
            topk_weights=places,
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_host,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=by_expert,
            **most,
        )
        # A last row takes what is no row: DeepEP may return more than have arrived.
        out = x.new_zeros(len(flat) + 1, m)
        index = weights[:, 0].long().where(chosen[:, 0] >= 0, len(flat))
        return out.index_copy_(0, index, received)[:-1].view(x.shape)

    def _buffer(self, row: int) -> Any:
        """Return the group's buffer, for rows of so many bytes."""
        known = self.groups.buffers.get(self.group.group_name)
        if known is not None and known[0] >= row:
            return known[1]
        library, n = _library(), self.group.size()
        config = library.Buffer.get_dispatch_config(n)
        sizes = config.get_nvl_buffer_size_hint(row, n), config.get_rdma_buffer_size_hint(row, n)
        buffer = library.Buffer(self.group, *sizes)
        self.groups.buffers[self.group.group_name] = row, buffer
        return buffer


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
