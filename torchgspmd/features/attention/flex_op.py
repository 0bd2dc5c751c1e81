"""Attention with a user's functions of positions, as torch's flex_attention has them.

    out, lse = flex_attention(q, k, v, buffers, "aten.ge.Tensor(q, k)", "", "", scale, region)

    mask        from b, h, q, k: whether a score is seen; tiles without seen scores are skipped
    score       from score, b, h, q, k: the new score
    gradient    from grad, score, b, h, q, k: the gradient for the old score; or a list of it and
                of [buffer, [index, ...], gradient] for each entry that needs one

flex_capture.py writes the functions, as expressions with elementwise operations. An empty one
changes nothing. b, h, q and k are positions over all shards; u0, u1, ... are the buffers.
Expressions assign to t0, t1, ... A buffer that only scores read, at the positions b, h or q
themselves, is sharded like the queries there (`shard_dims`). The gradients of n buffers are
further results, of `flex_attention_backward_n`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten, custom_op
from .bounds import Visible, blocks_seen
from .call import AttentionCall, Results, Upstream, backward_schema, forward_schema
from .expressions import compiled, entries_apart, learned_buffers, parsed, reads_of, shard_dims
from .tiles import Place, ScoreChange, Tiles, empty_gradients, empty_results, lse_dtype

_NAMES = {"aten": aten, "torch": torch, "inf": math.inf, "nan": math.nan}
READS_MASKS = (torch.Tag.cudagraph_unsafe,)  # The host asks whether a tile has scores to compute.


@dataclass(frozen=True)
class Flex(ScoreChange):
    """A change by expressions. buffers: the tensors that they read.

    For `blocks` some may be None: not known. shard: the device's place; without one, the shard is
    everything. terms: the gradients of learned buffers, which a backward adds up.
    """

    buffers: Sequence[Any]
    mask: str
    score: str
    gradient: str
    shard: Place | None = None
    terms: Sequence[Tensor] = ()

    @property
    def functions(self) -> tuple[Any, ...]:
        return self.buffers, self.mask, self.score, self.gradient

    def _value(
        self, text: str, place: Place, shape: Sequence[int], device: torch.device, **values: Tensor
    ) -> Tensor:
        """Evaluate an expression at a tile's positions."""
        queries, keys = (
            torch.arange(first, first + size, device=device)
            for first, size in zip(place.first[3:], shape[3:])
        )
        batch, heads = self._lead(place, shape, device)
        names = {f"u{i}": x if x.dim() else x.view(1) for i, x in enumerate(self.buffers)}
        names |= {
            "b": batch.view(-1, 1, 1, 1, 1),
            "h": heads.view(*heads.shape, 1, 1),
            "q": queries.view(-1, 1),
            "k": keys,
            **values,
        }
        local = self._local
        if local and self.shard is not None:
            b, h, g = (torch.arange(n, device=device) for n in shape[:3])
            names |= {
                "b_": b.view(-1, 1, 1, 1, 1),
                "h_": (h.view(-1, 1, 1, 1) * len(g) + g.view(-1, 1, 1)),
                "q_": names["q"] - self.shard.first[3],
            }
        # eval is safe here: compiled accepts elementwise operators and variables alone.
        return eval(compiled(text, local), {**_NAMES, **names})

    @property
    def is_known(self) -> bool:
        """Whether all buffers of the mask are known."""
        return not any(self.buffers[i] is None for i, _ in reads_of(parsed(self.mask)))

    @cached_property
    def _local(self) -> tuple[tuple[int, int], ...]:
        """The (buffer, dimension) pairs that are sharded."""
        if self.shard is None or not self.score:
            return ()
        b, h, g, q, _ = self.shard.whole
        whole = {"b": b, "h": h * g, "q": q}
        dims = shard_dims(self.mask, self.score, self.gradient).items()
        return tuple((i, d) for (i, d), n in dims if self.buffers[i].shape[d] != whole[n])

    def _lead(
        self, place: Place, shape: Sequence[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the positions [b] and [heads of keys, groups] of a shard."""
        batch, heads, groups = (
            torch.arange(first, first + size, device=device)
            for first, size in zip(place.first, shape[:3])
        )
        # Tiles have heads as [heads of keys, groups]; a user's h counts the heads of queries.
        heads = heads.view(-1, 1) * place.whole[2] + groups
        last = place.whole[0] - 1, place.whole[1] * place.whole[2] - 1
        return batch.clamp_max(last[0]), heads.clamp_max(last[1])  # Behind the last is padding.

    def blocks(
        self,
        shape: Sequence[int],
        place: Place,
        queries: Sequence[tuple[int, int]],
        keys: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> Visible | None:
        if not self.mask:
            return None
        compiled(self.mask)  # which checks it
        batch, heads = self._lead(place, shape, device)
        return blocks_seen(self.mask, self.buffers, (batch, heads.flatten()), queries, keys)

    def seen(self, shape: Sequence[int], place: Place, device: torch.device) -> Tensor | bool:
        if not self.mask:
            return True
        seen = self._value(self.mask, place, shape, device)
        # True saves the caller a torch.where over the tile.
        return True if seen.all() else seen

    def scores(self, scores: Tensor, place: Place) -> Tensor:
        if not self.score:
            return scores
        changed = self._value(self.score, place, scores.shape, scores.device, score=scores)
        return changed.to(scores.dtype).expand_as(scores)

    def score_gradient(self, grad: Tensor, scores: Tensor, place: Place) -> Tensor:
        if not self.gradient:
            return grad
        values = {"score": scores, "grad": grad}
        result: Any = self._value(self.gradient, place, scores.shape, scores.device, **values)
        if isinstance(result, list):
            result, *terms = result
            totals = dict(zip(learned_buffers(self.gradient), self.terms))
            lead = zip(place.first, grad.shape[:3], place.whole)
            padded = any(first + size > whole for first, size, whole in lead)
            for (buffer, index, term), apart in zip(
                terms, entries_apart(self.gradient), strict=True
            ):
                _add_entries(totals[buffer], index, term.expand_as(grad), apart and not padded)
        return result.to(grad.dtype).expand_as(grad)


def _add_entries(total: Tensor, index: list[Tensor], terms: Tensor, apart: bool) -> None:
    """Add terms [b, h, g, s, t] to the entries that an index gives them.

    apart: no two positions have one entry, once terms are summed over the other positions.
    """
    sizes = torch.broadcast_shapes(*(x.shape for x in index))
    # Fewer terms to place: first the sums over dimensions in which all of them have one entry.
    dims = [d for d in range(5) if d < 5 - len(sizes) or sizes[d - 5] == 1]
    terms = terms.sum(dims, keepdim=True) if dims else terms
    terms = terms.to(total.dtype).view(sizes)
    if not index:
        total += terms
    elif apart:
        total.index_put_(tuple(index), total[tuple(index)] + terms)
    else:
        total.index_put_(tuple(index), terms, accumulate=True)


def flex_tiles(call: AttentionCall, functions: Sequence[Any], terms: Sequence[Any] = ()) -> Tiles:
    """Return a call's tiles. functions: the buffers and the three expressions."""
    return Tiles(call, Flex(*functions, shard=Place.of(call), terms=terms))


def empty_terms(q: Tensor, functions: Sequence[Any]) -> list[Tensor]:
    """Return zeros for the gradients of learned buffers."""
    buffers, *_, gradient = functions
    dtype = lse_dtype(q)
    return [torch.zeros_like(buffers[i], dtype=dtype) for i in learned_buffers(gradient)]


_REST = (
    "Tensor[] buffers, str mask, str score, str gradient, float scale, float price=1.0, "
    "SymInt[]? region=None"
)


def _call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> AttentionCall:
    return AttentionCall(q, k, v, False, rest[4], region=rest[6] if len(rest) > 6 else None)


@custom_op("flex_attention", schema=forward_schema(_REST), tags=READS_MASKS)
def flex_attention(*args: Any) -> Results:
    """Return softmax(changed scores) v, and the logsumexp of these scores.

    q [b, h g, s, d]   k [b, h, t, d]   v [b, h, t, e]. price: see mask_shares.py. region: as
    `attention` has it with dropout.
    """
    out, lse = flex_tiles(_call(*args), args[3:7]).forward()
    return out.contiguous(), lse


flex_attention.register_fake(empty_results)


def _backward_of(count: int) -> Any:
    """Return the backward for calls with so many learned buffers."""
    name = "flex_attention_backward" + (f"_{count}" if count else "")
    schema = backward_schema(_REST)[:-1] + ", Tensor" * count + ")"

    @custom_op(name, schema=schema, tags=READS_MASKS)
    def backward(*args: Any) -> tuple[Tensor, ...]:
        grad, q, k, v, out, lse, *rest = args
        terms = empty_terms(q, rest[:4])
        tiles = flex_tiles(_call(q, k, v, *rest), rest[:4], terms)
        return *tiles.backward(Upstream(grad, out, lse)), *terms

    @backward.register_fake
    def _(*args: Any) -> tuple[Tensor, ...]:
        return *empty_gradients(*args[:6]), *empty_terms(args[1], args[6:10])

    return backward


# A table has a fixed number of results for each operator.
BACKWARDS = [_backward_of(count) for count in range(5)]


def _context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, buffers, *ctx.options = inputs[:8]  # A program before it is sharded has no regions.
    ctx.save_for_backward(q, k, v, *output, *buffers)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, lse_grad: Tensor | None) -> tuple:
    q, k, v, out, lse, *buffers = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    values = v
    if lse_grad is not None:
        # The gradient of scores is weights * (grad v - sum(grad * out) + lse_grad). One more column
        # adds lse_grad: the sum has it, and the product with v has not.
        grad = torch.cat([grad, -lse_grad.unsqueeze(-1).to(grad.dtype)], -1)
        out = torch.nn.functional.pad(out, (0, 1), value=1.0)
        values = torch.nn.functional.pad(v, (0, 1))
    learned = learned_buffers(ctx.options[2])
    op = BACKWARDS[len(learned)]
    q_grad, k_grad, v_grad, *terms = op(grad, q, k, values, out, lse, buffers, *ctx.options)
    of_buffers: list[Tensor | None] = [None] * len(buffers)
    for i, term in zip(learned, terms, strict=True):
        of_buffers[i] = term.to(buffers[i].dtype)
    v_grad = v_grad[..., : v.shape[-1]] if values is not v else v_grad
    return q_grad, k_grad, v_grad, of_buffers, *(None,) * len(ctx.options)


flex_attention.register_autograd(_backward, setup_context=_context)


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool, scale: float
) -> Tensor | None:
    """Return attention with a bias that needs a gradient, or None for shapes that have no rule.

    bias: added to the scores; its dimensions are the last ones of [b, h, s, t], or 1.
    """
    shape = (*q.shape[:-1], k.shape[-2])
    sizes = (*shape, *q.shape, *k.shape, *v.shape, *bias.shape)
    if q.dim() != 4 or bias.dim() > 4 or not all(type(n) is int for n in sizes):
        return None
    names = list(zip("bhqk", shape))[4 - bias.dim() :]
    if any(size not in (1, n) for size, (_, n) in zip(bias.shape, names)):
        return None
    places = [name for size, (name, _) in zip(bias.shape, names) if size > 1]
    entry = f"aten.index.Tensor(u0, [{', '.join(places)}])" if places else "u0"
    index = [n for n in range(bias.dim()) if bias.shape[n] == 1]
    return flex_attention(
        *(q, k, v, [bias.squeeze(index)]),
        "aten.ge.Tensor(q, k)" if causal else "",
        f"aten.add.Tensor(score, {entry})",
        f"[grad, [0, [{', '.join(places)}], grad]]",
        scale,
    )[0]
