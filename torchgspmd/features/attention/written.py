"""Attention that a program writes by hand, as one operation that does not keep its scores.

    scores = q @ k.mT * scale + mask                       marked: what they are computed from
    weights = F.dropout(scores.softmax(-1), p)             marked: the scores, and the seed
    y = weights @ v                                        attention(q, k, v, False, scale, mask)

Nobody needs the scores then. If the program also uses the weights elsewhere, the trace is repeated
and leaves them as they are. The rewriting also skips softmaxes in a dtype other than the scores'
own, or than float32 and float64. It skips scores that are not larger than their operands. A mask
that needs a gradient is a bias of flex_attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import traceback as fx_traceback

from ...capture.rewrites.loop_trace import is_unrolling
from ...capture.stand_in_sizes import same_sizes
from ...capture.trace_context import SITE, current_sites
from ...capture.traced_values import is_transforming, needs_gradient
from ...errors import user_line
from ...rules.custom_ops.nd import einsum, split_equation
from ...rules.custom_ops.random import draw_seed
from ...rules.ops.factory import kept, masked
from ...rules.rewrites import DECLINED, Declined, rewrite
from .flex_op import biased_attention
from .op import attention


class _Scores(NamedTuple):
    """q, k: [*lead, s, d], [*lead, t, d]. masks: boolean, or added."""

    q: Tensor
    k: Tensor
    scale: float
    masks: tuple[Tensor, ...] = ()

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, *self.masks)


class _Weights(NamedTuple):
    """site: the softmax's source line. dropout: the seed and p, if there is any."""

    scores: _Scores
    site: str
    dropout: tuple[Any, ...] = ()

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return self.scores.sources


class _Repeats(NamedTuple):
    """The tensor that another one repeats along a dimension. expanded: it is not merged yet."""

    base: Tensor
    dim: int
    expanded: bool = False

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return (self.base,)


Mark = TypeVar("Mark", _Scores, _Weights, _Repeats)


def _mark(result: Tensor, mark: _Scores | _Weights | _Repeats) -> Tensor:
    """Note how a tensor was computed, in an attribute that lives as long as the tensor."""
    versions = [x._version for x in (result, *mark.sources)]
    setattr(result, f"_torchgspmd{type(mark).__name__}", (mark, versions))
    return result


def _mark_of(x: object, kind: type[Mark]) -> Mark | None:
    """Return a tensor's mark of a kind, if the tensor and those behind it have not changed since.

    A symbolic number has none: looking would read it.
    """
    name = f"_torchgspmd{kind.__name__}"
    if not isinstance(x, Tensor) or not hasattr(x, name):
        return None
    mark, versions = getattr(x, name)
    return mark if versions == [y._version for y in (x, *mark.sources)] else None


# Keys and values that a program repeats for query groups, as attention takes them unrepeated.
#
#     k[:, :, None].expand(b, n, g, s, d).reshape(b, n * g, s, d)         repeat_interleave(k, g, 1)
#
# Such a result remembers its unrepeated value, also behind a transpose. Attention reads that value,
# so the repetition has no user left.


def _repeats_of(x: Tensor) -> _Repeats | None:
    repeats = _mark_of(x, _Repeats)
    return None if repeats is None or repeats.expanded else repeats


def unrepeated(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [..., heads, t, d] before their heads are repeated, if they are."""
    repeats = [_repeats_of(x) for x in (key, value)]
    bases = [
        x if r is None or r.dim != x.dim() - 3 else r.base for x, r in zip((key, value), repeats)
    ]
    return (bases[0], bases[1]) if bases[0].shape[-3] == bases[1].shape[-3] else (key, value)


@rewrite("product", Tensor.expand)
def _expand(input: Tensor, *size: Any) -> Any:
    """Remember the input if one inner dimension expands from size 1."""
    result = input.expand(*size)
    if result.dim() != input.dim():
        return result
    # An expanded dimension 0 has none before it to be merged with.
    pairs = enumerate(zip(input.shape, result.shape))
    changed = [d for d, (a, b) in pairs if not same_sizes([a], [b])]
    if len(changed) == 1 and changed[0] > 0:
        return _mark(result, _Repeats(input, changed[0], expanded=True))
    return result


@rewrite("product", Tensor.reshape)
def _reshape(input: Tensor, *shape: Any) -> object:
    """Remember the input where an expanded dimension is merged with the one before it."""
    repeats = _mark_of(input, _Repeats)
    if repeats is None or not repeats.expanded:
        return DECLINED
    result, d = input.reshape(*shape), repeats.dim
    # [.., n, g, ..] becomes [.., n g, ..]; any other reshape forgets the repetition.
    merged = [*input.shape[: d - 1], input.shape[d - 1] * input.shape[d], *input.shape[d + 1 :]]
    if not same_sizes(result.shape, merged):
        return result
    return _mark(result, _Repeats(repeats.base.squeeze(d), d - 1))


@rewrite("product", torch.repeat_interleave, Tensor.repeat_interleave)
def _repeat_interleave(
    input: Tensor, repeats: object = None, dim: int | None = None, **options: object
) -> object:
    """Remember the input where each row is repeated equally often."""
    if not isinstance(repeats, int) or dim is None or options:
        return DECLINED
    return _mark(input.repeat_interleave(repeats, dim), _Repeats(input, dim % input.dim()))


@rewrite("product", torch.transpose, Tensor.transpose)
def _transpose(input: Tensor, dim0: Any, dim1: Any) -> Any:
    repeats = _repeats_of(input)
    if repeats is None or not isinstance(dim0, int):
        return DECLINED
    dims = [*range(input.dim())]
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    base = repeats.base.transpose(dim0, dim1)
    return _mark(input.transpose(dim0, dim1), _Repeats(base, dims.index(repeats.dim)))


def transposed(x: Tensor) -> Tensor:
    """Return a tensor with its last two dimensions exchanged; the remembered value is passed on."""
    result = _transpose(x, -2, -1)
    return x.transpose(-2, -1) if result is DECLINED else result


# ------------------------------------------------------------------------------------- products


@rewrite("contract", einsum)
def _contract(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Compute weights times values as attention, and mark a product that may be scores."""
    if (result := _attention_of_product(equation, a, b)) is not DECLINED:
        return result
    return _marked_product(einsum(equation, a, b), equation, a, b)


def _marked_product(result: Tensor, equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Return a product, marked if it may be scores: "bshd,bthd->bhst"."""
    left, right, out = split_equation(equation)
    inner = [c for c in left if c in right and c not in out]
    wide = result.dtype in (torch.float32, torch.float64)
    if len(out) < 3 or len(inner) != 1 or not wide or current_sites() is None or is_unrolling():
        return result
    lead, s, t = out[:-2], out[-2], out[-1]
    if {*left} != {*lead, s, *inner} or {*right} != {*lead, t, *inner}:
        return result
    q = _permuted(a, left, lead + s + inner[0])
    k = _permuted(b, right, lead + t + inner[0])
    return _mark(result, _Scores(q, k, 1.0))


def _permuted(x: Tensor, letters: str, order: str) -> Tensor:
    if letters == order:
        return x
    if letters == order[:-2] + order[:-3:-1]:
        return transposed(x)
    return x.permute([letters.index(c) for c in order])


def _attention_of_product(equation: str, a: Tensor, b: Tensor) -> Tensor | Declined:
    """Compute weights times values as attention: "bhst,bthe->bshe"."""
    if (weights := _mark_of(a, _Weights)) is None or (sites := current_sites()) is None:
        return DECLINED
    left, right, out = split_equation(equation)
    lead, s, t = left[:-2], left[-2], left[-1]
    others = [c for c in right if c not in left]
    if len(others) != 1 or {*right} != {*lead, t, *others} or {*out} != {*lead, s, *others}:
        return DECLINED
    q, k, scale, masks = weights.scores
    v = _permuted(b, right, lead + t + others[0])
    if weights.site in sites.kept or v.dtype != q.dtype or not _pays(q, k, v):
        return DECLINED
    k, v = unrepeated(k, v)
    mask = _joined(masks, q.dtype)
    if mask is not None and needs_gradient(mask):
        plain = not (weights.dropout or is_transforming())
        result = biased_attention(q, k, v, mask, False, scale) if plain else None
        if result is None:
            return DECLINED
    else:
        options = () if mask is None else (mask,)
        if weights.dropout:
            options = (mask, None, *weights.dropout)
        result = attention(q, k, v, False, scale, *options)[0]
    # After the trace, this shows whether the weights are also used elsewhere.
    sites.rewritten.add(weights.site)
    return _permuted(result, lead + s + others[0], out)


def _pays(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether there are more scores than queries, keys, values and results together."""
    (s, d), (t, e) = q.shape[-2:], v.shape[-2:]
    sizes = (*q.shape, *k.shape, *v.shape)
    return all(type(n) is int for n in sizes) and s * t > (s + t) * (d + e)


def _joined(masks: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Join masks into one with at least two dimensions."""
    if not masks:
        return None
    # Boolean masks stay boolean; beside an added mask they become -inf.
    if all(m.dtype == torch.bool for m in masks):
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
    else:
        mask = sum(
            torch.zeros_like(m, dtype=dtype).masked_fill(~m, -math.inf)
            if m.dtype == torch.bool
            else m.to(dtype)
            for m in masks
        )
    assert isinstance(mask, Tensor)
    return mask[(None,) * (2 - mask.dim())]


# --------------------------------------------------------------------- from scores to the weights


def _is_number(x: object) -> bool:
    return type(x) in (int, float)


def _scaled(result: Tensor, scores: _Scores, factor: float) -> Tensor:
    # A factor behind a mask would scale the mask, too.
    if scores.masks or not math.isfinite(factor):
        return result
    return _mark(result, scores._replace(scale=scores.scale * factor))


def _masked(result: Tensor, x: Tensor, scores: _Scores, mask: Tensor) -> Tensor:
    """Return masked scores, marked if the mask changes no shape."""
    if result.shape != x.shape or result.dtype != x.dtype:
        return result
    return _mark(result, scores._replace(masks=(*scores.masks, mask)))


@rewrite("product", torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
def _mul(input: Any, other: Any) -> Tensor | Declined:
    scores = _mark_of(input, _Scores)
    if scores is None or not _is_number(other):
        return DECLINED
    return _scaled(input * other, scores, other)


@rewrite("product", torch.div, Tensor.div, Tensor.__truediv__)
def _div(input: Any, other: Any) -> Tensor | Declined:
    scores = _mark_of(input, _Scores)
    if scores is None or not _is_number(other) or other == 0:
        return DECLINED
    return _scaled(input / other, scores, 1 / other)


@rewrite("product", torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def _add(input: Any, other: Any, *rest: Any) -> Tensor | Declined:
    if (scores := _mark_of(input, _Scores)) is None:
        input, other, scores = other, input, _mark_of(other, _Scores)
    if scores is None or rest or not isinstance(other, Tensor) or not other.is_floating_point():
        return DECLINED
    return _masked(input + other, input, scores, other)


@rewrite("product", torch.masked_fill, Tensor.masked_fill)
def _masked_fill(input: Any, mask: Any, value: Any) -> Tensor | Declined:
    scores = _mark_of(input, _Scores)
    if scores is None or not _is_number(value) or value != -math.inf:
        return DECLINED
    # masked_fill hides where its mask is True; ours shows there.
    return _masked(input.masked_fill(mask, value), input, scores, ~mask)


@rewrite("product", torch.where)
def _where(condition: Any, input: Any = None, other: Any = None) -> Tensor | Declined:
    scores = _mark_of(input, _Scores)
    if scores is None or not _is_number(other) or other != -math.inf:
        return DECLINED
    return _masked(torch.where(condition, input, other), input, scores, condition)


@rewrite("product", torch.softmax, Tensor.softmax, F.softmax)
def _softmax(input: Any, dim: Any = None, dtype: Any = None, _stacklevel: int = 3) -> object:
    scores, sites = _mark_of(input, _Scores), current_sites()
    if scores is None or sites is None or dim not in (-1, input.dim() - 1):
        return DECLINED
    if dtype not in (None, input.dtype):
        return DECLINED
    meta = fx_traceback.get_current_meta()
    site = str(user_line())
    # The softmax carries its line: if its result is used elsewhere, the trace is repeated.
    before = meta.get("custom")
    meta["custom"] = {**(before or {}), SITE: site}
    result = input.softmax(-1)
    meta["custom"] = before
    return _mark(result, _Weights(scores, site))


@rewrite("product", F.dropout)
def _dropout(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | Declined:
    """Draw dropout as the decomposed `native_dropout` does, from a seed that attention shares."""
    weights = _mark_of(input, _Weights)
    if weights is None or inplace or weights.dropout or not 0 <= p < 1:
        return DECLINED
    if not training or p == 0:
        return input
    seed = draw_seed()
    result = masked(input, kept(seed, p, input), p)
    return _mark(result, weights._replace(dropout=(seed, p)))
