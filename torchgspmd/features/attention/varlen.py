"""torch's varlen_attn as flex_attention: each query sees one range of keys.

    varlen_attn(q, k, v, cu_seq_q, cu_seq_k, ...)     q [s, h g, d]   k, v [t, h, d]
    ->  flex_attention(q, k, v, [first, last], "first[q] <= k <= last[q]")

The borders of documents and a window give the range. So varlen_attn has flex_attention's layouts:
sharded heads need no gather, and keys travel round a ring of queries. It also runs on CPUs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import ShardingError
from ...rules.rewrites import DECLINED, rewrite
from .flex_op import flex_attention

SEEN = (
    "aten.bitwise_and.Tensor(aten.ge.Tensor(k, aten.index.Tensor(u0, [q])), "
    "aten.le.Tensor(k, aten.index.Tensor(u1, [q])))"
)


@rewrite("product", "torch_attn::_varlen_attn")
def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Return the result, the logsumexp, and a random state that nothing reads.

    A query behind the last document sees no key: its result is 0.
    """
    if block_table is not None or cu_seq_k is None:
        raise ShardingError.here(
            "varlen_attn reads its keys from pages",
            why="a page may lie on any device, and only a run knows on which",
            fix="leave block_table out, with keys [tokens, heads, width] and cu_seq_k",
        )
    if query.dim() != 3 or query.shape[1] % key.shape[1] or query.shape[-1] != key.shape[-1]:
        return DECLINED  # a mistake that PyTorch will explain
    left, right = (-1, -1) if window_size is None else window_size
    right = 0 if is_causal else right
    first, last = _ranges(query.shape[0], cu_seq_q, cu_seq_k, left, right, seqused_k)
    mask = SEEN
    if cu_seq_q is cu_seq_k and seqused_k is None and type(max_q) is type(max_k) is int:
        longest = max(max_q, max_k)
        mask = _within(_within(mask, "q, k", left, longest), "k, q", right, longest)
    scale = 1 / math.sqrt(query.shape[-1] or 1) if scale is None else scale
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out, lse = flex_attention(q, k, v, [first, last], mask, "", "", scale)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0), torch.zeros(2, dtype=torch.uint64)


def _within(mask: str, places: str, limit: int, longest: int) -> str:
    """Add to a mask how far a query looks to one side, at most.

    The ranges say it, too. But planning knows the length of the longest document, and seldom the
    ranges, so it knows which devices need nothing from each other.
    """
    limit = longest - 1 if limit < 0 else min(limit, longest - 1)
    near = f"aten.le.Scalar(aten.sub.Tensor({places}), {limit})"
    return f"aten.bitwise_and.Tensor({mask}, {near})"


def _ranges(
    queries: int, cu_q: Tensor, cu_k: Tensor, left: int, right: int, used: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each query sees; first > last if it sees none.

    cu_q, cu_k: where documents begin, and the end. left, right: keys of a window beside the query;
    -1: all. used: how many of each document's keys count.
    """
    place = torch.arange(queries, device=cu_q.device, dtype=cu_q.dtype)
    # A place on a border belongs to the document that begins there, behind all empty ones.
    document = torch.searchsorted(cu_q, place, right=True) - 1
    beyond = document >= cu_q.shape[0] - 1
    document = document.clamp(0, cu_q.shape[0] - 2)
    begin = cu_k[document]
    end = cu_k[document + 1] if used is None else begin + used[document].to(begin.dtype)
    first, last = begin, end - 1
    # The last query of a document stands beside its last key.
    beside = place if used is None and cu_q is cu_k else place + end - cu_q[document + 1]
    if left >= 0:
        first = torch.maximum(first, beside - left)
    if right >= 0:
        last = torch.minimum(last, beside + right)
    return first, torch.where(beyond, first - 1, last)
