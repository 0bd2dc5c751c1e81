"""Decompositions for XLA's partitioner.

It has good rules for einsums, sums, slices and elementwise operations. It gathers whole tensors
for a fused norm, an attention with merged batch dimensions, or a roll.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compat.operators import aten
from ..compat.private_apis import OpOverload
from ..custom_ops.nd import attention_backward_by_products, attention_by_products
from .decompositions import decomposition_of
from .ops import uneven_reshape  # noqa: F401 (registers its operations)

ours = torch.ops.torchgspmd

NORMS = {
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
}


def unpartitioned_of(op: Any, *, splitting: int = 0) -> Callable | None:
    """Return a decomposition as decomposition_of does. XLA draws random numbers itself."""
    if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
        return _RANDOM.get(op)
    return _FUNCTIONS.get(op) or decomposition_of(op, splitting=splitting or int(op in NORMS))


def _roll(x: Tensor, shifts: list[int], dims: list[int] = ()) -> Tensor:
    """Compute roll by two slices and a cat, in which XLA sees a shift between neighbours."""
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims):
        size = x.shape[dim]
        cut = size - shift % size if size else 0
        if cut != size:
            x = torch.cat([x.narrow(dim, cut, size - cut), x.narrow(dim, 0, cut)], dim)
    return x


_FUNCTIONS: dict[Any, Callable] = {
    ours.attention.default: attention_by_products,
    ours.attention_backward.default: attention_backward_by_products,
    aten.roll.default: _roll,
    ours.join_rows.default: lambda x, dim: x.flatten(dim, dim + 1),
    ours.split_rows.default: lambda x, dim, width: x.unflatten(dim, (-1, width)),
}


def _native_dropout(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = aten.bernoulli.p(torch.zeros_like(x), 1 - p)
    return x * (mask / (1 - p)), mask.bool()


def _like(draw: Callable) -> Callable:
    def draw_like(
        x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
    ) -> Tensor:
        return draw(list(x.shape), dtype=dtype or x.dtype, device=device or x.device)

    return draw_like


_RANDOM: dict[Any, Callable] = {
    aten.native_dropout.default: _native_dropout,
    aten.rand_like.default: _like(aten.rand.default),
    aten.randn_like.default: _like(aten.randn.default),
}
