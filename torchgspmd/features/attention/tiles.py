"""Attention by tiles of its scores, for score changes that no PyTorch kernel takes.

    tile        queries [row, row + TILE_ROWS), keys [column, column + ...): its scores, as products
    dropout     weights are left out by their global positions, so the mesh changes nothing

A tile's scores live as long as the tile. Results for key tiles merge by their logsumexp, which
dropout does not change. So no device ever has the scores or the dropout for all keys.

out = sum_i out_i exp(lse_i - lse), where lse = log sum_i exp(lse_i). Weights are float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...rules.custom_ops.nd import einsum
from ...rules.custom_ops.random import Shard, dropout_mask
from .bounds import Visible
from .call import AttentionCall, Gradients, Results, Upstream

# Score elements that are computed at a time.
TILE = 1 << 22
# Keys in a tile, at most.
TILE_KEYS = 1 << 10


class ScoreChange:
    """A change to a tile's scores. shape: theirs, [*lead, heads of keys, groups, s, t]."""

    def seen(self, shape: Sequence[int], place: Place, device: torch.device) -> Tensor | bool:
        """Return the mask for a tile; True if all scores are seen, False if none are."""
        return True

    def blocks(
        self,
        shape: Sequence[int],
        place: Place,
        queries: Sequence[tuple[int, int]],
        keys: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> Visible | None:
        """Return which blocks are seen, in part or whole; None: any may be.

        queries, keys: the positions [start, stop) of each block.
        """
        return None

    def scores(self, scores: Tensor, place: Place) -> Tensor:
        """Return the changed scores."""
        return scores

    def score_gradient(self, grad: Tensor, scores: Tensor, place: Place) -> Tensor:
        """Return the gradient for the scores, given that for the changed scores."""
        return grad

    def factors(self, weights: Tensor, place: Place) -> Tensor | None:
        """Return factors for the weights, or None."""
        return None


@dataclass(frozen=True)
class Dropout(ScoreChange):
    """Leaves weights out. seed: a number; p: the probability."""

    seed: Tensor
    p: float

    def factors(self, weights: Tensor, place: Place) -> Tensor:
        # By global positions, so that shards drop the same weights as one device would.
        shard = Shard([*weights.shape], *place)
        kept = dropout_mask(self.seed, self.p, shard, weights.device)
        # Scaled, so that the weights keep their expected sum; with p = 1 none is left.
        return kept.to(weights.dtype) * (1 / (1 - self.p) if self.p < 1 else 0.0)


class Place(NamedTuple):
    """Where a shard's queries and keys begin, and the sizes over all shards.

    first, whole: [*lead, heads of keys, groups, queries, keys], as the scores have them.
    """

    first: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, call: AttentionCall) -> Place:
        """Return the place that a region gives; without one, the shard is everything."""
        q, k = call.q, call.k
        lead = (*k.shape[:-2], q.shape[-3] // k.shape[-3])
        if call.region is None:
            return cls((0,) * (len(lead) + 2), (*lead, q.shape[-2], k.shape[-2]))
        query, key, queries, keys, *rest = call.region
        first, whole = rest[: len(lead)] or (0,) * len(lead), rest[len(lead) :] or lead
        return cls((*first, query, key), (*whole, queries, keys))


class _Tile(NamedTuple):
    """Some of a shard's queries and keys, and where their scores begin. whole: all are seen."""

    rows: slice
    columns: slice
    place: Place
    whole: bool


class _Scores(NamedTuple):
    """A tile's scores [*lead, heads of keys, groups, s, t], before and after a change.

    seen: which ones are not -inf, if the change says so.
    """

    raw: Tensor
    changed: Tensor
    seen: Tensor | bool


class Tiles:
    """The tiles in one call: `attention` for a shard's queries and keys, with a change."""

    def __init__(self, call: AttentionCall, change: ScoreChange) -> None:
        self.call, self.change = call, change
        self.place, self.dtype = Place.of(call), lse_dtype(call.q)
        # The last letters, so that `h` always means the heads of keys.
        self.heads = "abcdefh"[-(call.k.dim() - 2) :]
        self.lead = self.heads + "g"

    def _tiles(self) -> Iterator[_Tile]:
        """Yield the tiles that have scores, one query range after the other."""
        (*before, query, key), sizes = self.place
        s, t = (
            min(x.shape[-2], size - first)
            for x, first, size in zip(self.call[:2], (query, key), sizes[-2:])
        )
        wide = max(1, min(t, TILE_KEYS))
        # As many rows as keep a tile within TILE scores, over all its heads.
        tall = max(1, TILE // max(1, self.call.q[..., 0, 0].numel() * wide))
        rows, columns = (
            [slice(i, min(i + size, end)) for i in range(0, end, size)]
            for end, size in ((s, tall), (t, wide))
        )
        queries, keys = (
            [(part.start + first, part.stop + first) for part in parts]
            for parts, first in ((rows, query), (columns, key))
        )
        shape, seen = self._grouped(self.call.q).shape[:-1], None
        if rows and columns:
            seen = self.change.blocks(shape, self.place, queries, keys, self.call.q.device)
        some, every = ([], []) if seen is None else (x.tolist() for x in seen)
        for i, row in enumerate(rows):
            # A causal mask skips the tiles right of the diagonal.
            visible = query + row.stop - key if self.call.causal else t
            for j, column in enumerate(columns):
                if column.start >= visible or some and not some[i][j]:
                    continue
                column = slice(column.start, min(column.stop, visible))
                first = (*before, query + row.start, key + column.start)
                whole = bool(every) and every[i][j]
                yield _Tile(row, column, Place(first, sizes), whole)

    def _grouped(self, x: Tensor) -> Tensor:
        """Split query heads into key heads and groups."""
        return x.unflatten(-3, (self.call.k.shape[-3], -1))

    def _scores(self, tile: _Tile) -> _Scores | None:
        """Return a tile's scores; None if no query sees a key."""
        q, k = self._grouped(self.call.q[..., tile.rows, :]), self.call.k[..., tile.columns, :]
        shape = (*q.shape[:-1], k.shape[-2])
        seen = True if tile.whole else self.change.seen(shape, tile.place, q.device)
        if seen is False or isinstance(seen, Tensor) and not seen.any():
            return None
        raw = einsum(f"{self.lead}sd,{self.heads}td->{self.lead}st", q, k).to(self.dtype)
        raw = raw * self.call.scale
        changed = self.change.scores(raw, tile.place)
        changed = torch.where(seen, changed, -math.inf) if isinstance(seen, Tensor) else changed
        if self.call.causal:
            s, t = (
                torch.arange(first, first + size, device=q.device)
                for first, size in zip(tile.place.first[-2:], raw.shape[-2:])
            )
            changed = torch.where(t <= s.unsqueeze(1), changed, -math.inf)
        if (mask := self._mask(tile)) is None:
            return _Scores(raw, changed, seen)
        boolean = mask.dtype == torch.bool
        changed = torch.where(mask, changed, -math.inf) if boolean else changed + mask
        return _Scores(raw, changed, seen)

    def _mask(self, tile: _Tile) -> Tensor | None:
        """Return a tile's mask, with head groups as a dimension of their own."""
        mask = self.call.in_block(tile.rows, tile.columns).mask
        if mask is None or mask.dim() == 2:
            return mask
        return self._grouped(mask) if mask.shape[-3] > 1 else mask.unsqueeze(-3)

    def forward(self) -> Results:
        q, v, lead, heads = self.call.q, self.call.v, self.lead, self.heads
        out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=self.dtype)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=self.dtype)
        for tile in self._tiles():
            if (scores := self._scores(tile)) is None:
                continue
            total = scores.changed.logsumexp(-1)
            # A row that sees no key has lse = -inf; -inf - -inf would be NaN.
            finite = torch.where(total == -math.inf, 0, total)
            weights = (scores.changed - finite.unsqueeze(-1)).exp()
            factors = self.change.factors(weights, tile.place)
            weights = weights if factors is None else weights * factors
            values = v[..., tile.columns, :]
            part = einsum(f"{lead}st,{heads}te->{lead}se", weights.to(v.dtype), values)
            before = out[..., tile.rows, :], lse[..., tile.rows]
            merged = merge(before, (part.flatten(-4, -3), total.flatten(-3, -2)))
            out[..., tile.rows, :], lse[..., tile.rows] = merged
        return out.to(q.dtype), lse

    def backward(self, upstream: Upstream) -> Gradients:
        grad, out, lse = upstream
        lead, heads, k, v = self.lead, self.heads, self.call.k, self.call.v
        # Many tiles are summed, so in float32 or wider.
        q_grad, k_grad, v_grad = (
            torch.zeros_like(x, dtype=self.dtype, memory_format=torch.contiguous_format)
            for x in (self.call.q, k, v)
        )
        # sum_t weights * grad_weights = sum_e grad * out, which needs no [s, t] (FlashAttention).
        mean = (grad.to(self.dtype) * out.to(self.dtype)).sum(-1, True)  # [.., h g, s, 1]
        # Rows that see no key get the weights exp(scores - inf) = 0.
        lse = torch.where(lse == -math.inf, math.inf, lse).unsqueeze(-1)
        for tile in self._tiles():
            if (scores := self._scores(tile)) is None:
                continue
            rows, columns = (..., tile.rows, slice(None)), (..., tile.columns, slice(None))
            g, q, m, total = (self._grouped(x[rows]) for x in (grad, self.call.q, mean, lse))
            weights = (scores.changed - total).exp()
            factors = self.change.factors(weights, tile.place)
            dropped = (weights if factors is None else weights * factors).to(g.dtype)
            v_grad[columns] += einsum(f"{lead}st,{lead}se->{heads}te", dropped, g)
            g_weights = einsum(f"{lead}se,{heads}te->{lead}st", g, v[columns]).to(self.dtype)
            g_weights = g_weights if factors is None else g_weights * factors
            g_scores = weights * (g_weights - m)
            g_scores = (
                self.change.score_gradient(g_scores, scores.raw, tile.place) * self.call.scale
            )
            if isinstance(scores.seen, Tensor):
                g_scores = torch.where(scores.seen, g_scores, 0)
            g_scores = g_scores.to(q.dtype)
            part = einsum(f"{lead}st,{heads}td->{lead}sd", g_scores, k[columns])
            q_grad[rows] += part.flatten(-4, -3)
            k_grad[columns] += einsum(f"{lead}st,{lead}sd->{heads}td", g_scores, q)
        grads = (x.to(self.call.q.dtype) for x in (q_grad, k_grad, v_grad))
        return cast(Gradients, tuple(grads))


# ------------------------------------------------- merging


def merge_parts(out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge the results for all key ranges, which are the first dimension."""
    top = lse.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (lse - top).exp()
    total = weights.sum(0)
    merged = (out.to(lse.dtype) * weights.unsqueeze(-1)).sum(0)
    merged = merged / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return merged.to(dtype), top + total.log()


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the results for two key ranges. Weights are float32 or wider."""
    lse = torch.logaddexp(first[1], second[1])
    finite = torch.where(lse == -math.inf, 0, lse)
    out = sum(o.to(x.dtype) * (x - finite).exp().unsqueeze(-1) for o, x in (first, second))
    return out.to(first[0].dtype), lse  # pyright: ignore[reportAttributeAccessIssue]


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype


def empty_results(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty([*q.shape[:-1], v.shape[-1]]), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))


def empty_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


# ------------------------------------------------- by products, for calls that no kernel takes


# Score elements that are computed at a time.
SCORES = 1 << 24


def added_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a 4-d mask that is added to scores."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)


def in_rows(call: AttentionCall) -> Results:
    out, lse = zip(*(attention_by_products(piece) for _, piece in _pieces(call)))
    return torch.cat(out, 2), torch.cat(lse, 2)


def backward_in_rows(call: AttentionCall, upstream: Upstream) -> Gradients:
    results = [
        gradients_by_products(piece, upstream.in_rows(rows)) for rows, piece in _pieces(call)
    ]
    q_grad, k_grad, v_grad = zip(*results)
    return torch.cat(q_grad, 2), cast(Tensor, sum(k_grad)), cast(Tensor, sum(v_grad))


def _pieces(call: AttentionCall) -> Iterator[tuple[slice, AttentionCall]]:
    """Yield calls for some queries each, with the causal mask as part of their mask."""
    (b, h, s), t = call.q.shape[:3], call.k.shape[2]
    # As many rows as keep all heads' scores within SCORES.
    step = max(1, SCORES // max(1, b * h * t))
    for row in range(0, s, step):
        rows, device = slice(row, row + step), call.k.device
        piece = call.in_block(rows, slice(None))
        if call.causal:
            query = torch.arange(row, min(s, row + step), device=device).unsqueeze(1)
            seen = torch.arange(t, device=device) <= query
            allowed = added_mask(piece.mask, call.k)
            cut = seen if allowed is None else torch.where(seen, allowed, -math.inf)
            piece = piece._replace(causal=False, mask=cut)
        yield rows, piece


def attention_by_products(call: AttentionCall) -> Results:
    """Compute `attention` by two einsums. Its statistics are float32 or wider."""
    q, k, v = call.q, call.k, call.v
    lead, heads = _letters(q, k)
    scores = _product_scores(call, _in_groups(q, k, 3), lead)
    lse = scores.logsumexp(-1)
    # A row that sees no key has lse = -inf; -inf - -inf would be NaN.
    finite = lse if call.mask is None else torch.where(lse == -math.inf, 0, lse)
    weights = (scores - finite.unsqueeze(-1)).exp()
    out = einsum(f"{lead}st,{heads}te->{lead}se", weights.to(v.dtype), v)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def gradients_by_products(call: AttentionCall, upstream: Upstream) -> Gradients:
    """Compute `attention_backward` by einsums. The logsumexp gives the weights again."""
    k, v = call.k, call.v
    lead, heads = _letters(call.q, k)
    q, grad, out = (_in_groups(x, k, 3) for x in (call.q, upstream.grad, upstream.out))
    lse = _in_groups(upstream.lse, k, 2)
    scores = _product_scores(call, q, lead)
    if call.mask is not None:
        # Rows that see no key get the weights exp(scores - inf) = 0.
        lse = torch.where(lse == -math.inf, math.inf, lse)
    weights = (scores - lse.unsqueeze(-1)).exp()  # [b, h, s, t]
    grad_v = einsum(f"{lead}st,{lead}se->{heads}te", weights.to(grad.dtype), grad)
    grad_weights = einsum(f"{lead}se,{heads}te->{lead}st", grad, v).to(weights.dtype)
    # sum_t weights * grad_weights = sum_e grad * out, which needs no [s, t] (FlashAttention).
    mean = (grad * out).to(weights.dtype).sum(-1, True)  # [b, h, s, 1]
    grad_scores = (weights * (grad_weights - mean) * call.scale).to(q.dtype)
    return (
        einsum(f"{lead}st,{heads}td->{lead}sd", grad_scores, k).reshape(call.q.shape),
        einsum(f"{lead}st,{lead}sd->{heads}td", grad_scores, q),
        grad_v,
    )


def _letters(q: Tensor, k: Tensor) -> tuple[str, str]:
    """Return the letters for q's dimensions before its rows, and for those of k."""
    heads = "abchijkl"[: k.dim() - 2]
    return heads + ("g" if q.shape[-3] != k.shape[-3] else ""), heads


def _in_groups(x: Tensor, k: Tensor, dims: int) -> Tensor:
    heads = x.shape[-dims]
    if heads == k.shape[-3]:
        return x
    at = x.dim() - dims
    return x.reshape(*x.shape[:at], k.shape[-3], heads // k.shape[-3], *x.shape[at + 1 :])


def _product_scores(call: AttentionCall, q: Tensor, lead: str) -> Tensor:
    """Return masked scores, with head groups as a dimension of their own.

    q: with such a dimension. lead: the letters of q's dimensions before its rows.
    """
    k, mask = call.k, call.mask
    heads = _letters(call.q, k)[1]
    scores = einsum(f"{lead}sd,{heads}td->{lead}st", q, k)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * call.scale
    if call.causal:
        s, t = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = torch.where(t <= s.unsqueeze(1), scores, float("-inf"))
    if mask is None:
        return scores
    if scores.dim() > k.dim() and mask.dim() > 2:  # a dimension for groups in the mask
        mask = _in_groups(mask, k, 3) if mask.shape[-3] > 1 else mask.unsqueeze(-3)
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, float("-inf"))
    return scores + mask
