"""DeepEP's kernels as the carrier of all_to_all: rows without a value are not sent.

    x [n, rows, m]      row block i goes to member i of the group, as all_to_all_single has it

Experts exchange blocks with room for more rows than they have (moe.dispatch, capacity); the others
are zeros, and so is the result where nothing arrives. DeepEP takes a row's expert, here its rank,
and a weight, here its place in the result. Source: deepseek-ai/DeepEP, `Buffer.dispatch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .process_groups import ProcessGroups

LEAST_BYTES = 1024  # of a row; DeepEP's kernels are for the width of a model
VECTOR = 16  # bytes that they move at a time
MOST_ROWS = 2**24  # whose places float32 counts
A_HOST = 8  # GPUs that NVLink joins


def takes(groups: ProcessGroups, shape: Sequence[int], dtype: torch.dtype) -> bool:
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
            **_without_waiting(buffer, n, len(flat)),
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


def _without_waiting(buffer: Any, ranks: int, rows: int) -> dict[str, int]:
    """Return the option by which the host does not wait for counts, where DeepEP has it."""
    has_option = "num_worst_tokens" in inspect.signature(buffer.dispatch).parameters
    return {"num_worst_tokens": rows} if has_option and ranks <= A_HOST else {}
