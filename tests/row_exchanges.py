"""A stand-in for the module deep_ep: its Buffer's calls, by all_to_all_single of what is sent.

Names, arguments and results are DeepEP's (deep_ep/buffer.py); only what an exchange needs is there.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SENT: list[int] = []  # rows, by call


class Buffer:
    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group = group

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        assert num_ranks in (2, 4, 8), "Unsupported number of EP ranks"
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes * ranks,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
        )

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple:
        is_sent = topk_idx == torch.arange(num_experts)
        counts = is_sent.sum(0).int()
        return counts, None, counts, is_sent, None

    def dispatch(
        self,
        x: Tensor,
        handle: None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_worst_tokens: int = 0,
    ) -> tuple:
        assert is_token_in_rank is not None and num_tokens_per_rank is not None
        assert topk_idx is not None and topk_weights is not None and num_worst_tokens
        assert x.dtype == torch.bfloat16 and topk_idx.dtype == torch.int64
        rows = is_token_in_rank.t().nonzero()[:, 1]
        SENT.append(len(rows))
        sends = num_tokens_per_rank.long()
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=self.group)

        def moved(t: Tensor) -> Tensor:
            out = t.new_empty(int(receives.sum()), *t.shape[1:])
            parts = receives.tolist(), sends.tolist()
            # As bytes: gloo has no bfloat16.
            words = out.view(torch.uint8), t[rows].view(torch.uint8)
            dist.all_to_all_single(*words, *parts, self.group)
            # Behind what has arrived is anything.
            behind = torch.full((num_worst_tokens - len(out), *t.shape[1:]), 77).to(t.dtype)
            return torch.cat([out, behind])

        chosen = torch.zeros(num_worst_tokens, 1, dtype=torch.int64)
        chosen[int(receives.sum()) :] = -1
        return moved(x), chosen, moved(topk_weights), receives.tolist(), (), None


def module() -> ModuleType:
    """Return the module."""
    stand_in = ModuleType("deep_ep")
    stand_in.__dict__.update(Buffer=Buffer, __spec__=SimpleNamespace(name="deep_ep"))
    return stand_in
