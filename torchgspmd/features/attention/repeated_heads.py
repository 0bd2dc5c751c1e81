"""Keys and values that a program repeats for query groups, as attention takes them unrepeated.

    k[:, :, None].expand(b, n, g, s, d).reshape(b, n * g, s, d)         repeat_interleave(k, g, 1)

Such a result remembers its unrepeated value, also behind a transpose. Attention reads that value,
so the repetition has no user left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...rules.rewrites import DECLINED, rewrite

_NAME = "_torchgspmd_repeats"


class _Repeats(NamedTuple):
    """The tensor that another one repeats along a dimension.

    expanded: the dimension is not merged yet. versions: the tensor's and its base's, which a change
    in place raises.
    """

    base: Tensor
    dim: int
    expanded: bool
    versions: tuple[int, int]


def _mark(result: Tensor, base: Tensor, dim: int, expanded: bool = False) -> Tensor:
    # An attribute lives as long as the tensor, and no table has to be cleared.
    setattr(result, _NAME, _Repeats(base, dim, expanded, (result._version, base._version)))
    return result


def _repeats_of(x: Tensor, expanded: bool = False) -> _Repeats | None:
    """Return the repetition behind a tensor, if neither has changed since."""
    repeats: _Repeats | None = getattr(x, _NAME, None)
    if repeats is None or repeats.expanded != expanded:
        return None
    return repeats if repeats.versions == (x._version, repeats.base._version) else None


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
    changed = [d for d, (a, b) in enumerate(zip(input.shape, result.shape)) if a != b]
    if len(changed) == 1 and changed[0] > 0:
        return _mark(result, input, changed[0], expanded=True)
    return result


@rewrite("product", Tensor.reshape)
def _reshape(input: Tensor, *shape: Any) -> object:
    """Remember the input where an expanded dimension is merged with the one before it."""
    repeats = _repeats_of(input, expanded=True)
    if repeats is None:
        return DECLINED
    result, d = input.reshape(*shape), repeats.dim
    # [.., n, g, ..] becomes [.., n g, ..]; any other reshape forgets the repetition.
    merged = [*input.shape[: d - 1], input.shape[d - 1] * input.shape[d], *input.shape[d + 1 :]]
    return _mark(result, repeats.base.squeeze(d), d - 1) if [*result.shape] == merged else result


@rewrite("product", torch.repeat_interleave, Tensor.repeat_interleave)
def _repeat_interleave(
    input: Tensor, repeats: object = None, dim: int | None = None, **options: object
) -> object:
    """Remember the input where each row is repeated equally often."""
    if not isinstance(repeats, int) or dim is None or options:
        return DECLINED
    return _mark(input.repeat_interleave(repeats, dim), input, dim % input.dim())


@rewrite("product", torch.transpose, Tensor.transpose)
def _transpose(input: Tensor, dim0: Any, dim1: Any) -> Any:
    """Pass on the remembered value."""
    repeats = _repeats_of(input)
    if repeats is None or not isinstance(dim0, int):
        return DECLINED
    dims = [*range(input.dim())]
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _mark(
        input.transpose(dim0, dim1), repeats.base.transpose(dim0, dim1), dims.index(repeats.dim)
    )


def transposed(x: Tensor) -> Tensor:
    """Return a tensor with its last two dimensions exchanged; the remembered value is passed on."""
    result = _transpose(x, -2, -1)
    return x.transpose(-2, -1) if result is DECLINED else result
