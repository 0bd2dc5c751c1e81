"""Decompositions for XLA's partitioner.

It has good rules for einsums, sums, slices and elementwise operations. It gathers whole tensors
for a fused norm, an attention with merged batch dimensions, or a roll.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.operators import aten
from ..compat.private_apis import OpOverload
from .custom_ops.updates import adam_formula
from .decompositions import decomposition_of
from .ops import uneven_reshape  # noqa: F401 (registers its operations)
from .rewrites import DECLINED, Declined, SplitRequest, rewrite, rewrite_of

ours = torch.ops.torchgspmd

NORMS = {
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
}


def unpartitioned_of(op: object, *, splitting: SplitRequest | None = None) -> Callable | None:
    """Return a decomposition as decomposition_of does. XLA draws random numbers itself."""
    function = rewrite_of("xla", op)
    if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
        return function
    # Fused norms are always split: XLA's partitioner would gather their operand.
    in_any_case = SplitRequest() if op in NORMS else None
    return function or decomposition_of(op, splitting=splitting or in_any_case)


@rewrite("xla", ours.adam.default)
def _adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    # By plain operations: XLA does not know ours.
    return adam_formula(p, g, m, v, None, *rest)[:3]


@rewrite("xla", aten.roll.default)
def _roll(x: Tensor, shifts: list[int], dims: Sequence[int] = ()) -> Tensor:
    """Compute roll by two slices and a cat, in which XLA sees a shift between neighbours."""
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims):
        size = x.shape[dim]
        cut = size - shift % size if size else 0
        if cut != size:
            x = torch.cat([x.narrow(dim, cut, size - cut), x.narrow(dim, 0, cut)], dim)
    return x


@rewrite("xla", aten.scatter.src)
def _scatter(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | Declined:
    """Write one element a row by comparison, as in the gradient of a cross entropy.

    XLA's partitioner aborts on a scatter whose rows are sharded unevenly.
    """
    place = _places(x, dim, index, source)
    return DECLINED if place is None else torch.where(place == index, source, x)


@rewrite("xla", aten.scatter_add.default)
def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | Declined:
    place = _places(x, dim, index, source)
    return DECLINED if place is None else x + torch.where(place == index, source, 0)


def _places(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | None:
    """Return 0, 1, ... along dim if index has one element for every row along it, else None."""
    if not x.dim():
        return None
    dim %= x.dim()
    row = [1 if d == dim else size for d, size in enumerate(x.shape)]
    if list(index.shape) != row or list(source.shape) != row:
        return None
    place = torch.arange(x.shape[dim], device=x.device)
    return place.view([-1] + [1] * (x.dim() - 1 - dim))


@rewrite("xla", ours.join_rows.default)
def _join_rows(x: Tensor, dim: int) -> Tensor:
    return x.flatten(dim, dim + 1)


@rewrite("xla", ours.split_rows.default)
def _split_rows(x: Tensor, dim: int, width: int) -> Tensor:
    return x.unflatten(dim, (-1, width))


@rewrite("xla", aten.native_dropout.default)
def _native_dropout(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = aten.bernoulli.p(torch.zeros_like(x), 1 - p)
    return x * (mask / (1 - p)), mask.bool()


for _op, _draw in (
    (aten.rand_like.default, aten.rand.default),
    (aten.randn_like.default, aten.randn.default),
):

    @rewrite("xla", _op)
    def _draw_like(
        x: Tensor, draw: Any = _draw, dtype: Any = None, device: Any = None, **_: object
    ) -> Tensor:
        return draw(list(x.shape), dtype=dtype or x.dtype, device=device or x.device)
