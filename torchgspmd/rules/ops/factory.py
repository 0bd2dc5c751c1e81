"""Operations that create tensors. Without operands, their result may have any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, make_rule
from ..registry import decomposition, rule_for, shape_argument


def _factory_rule(call: Call, **keywords: Any) -> Rule:
    shape = call.results[0].shape
    return make_rule(
        [],
        [[(f"d{i}",) for i in range(len(shape))]],
        {f"d{i}": n for i, n in enumerate(shape)},
        **keywords,
    )


@rule_for(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def _full(call: Call) -> Rule:
    return _factory_rule(call, local=shape_argument(0))


@rule_for(aten.scalar_tensor.default)
def _scalar(call: Call) -> Rule:
    return _factory_rule(call)


@rule_for(aten.arange.start_step)
def _arange(call: Call) -> Rule:
    return _factory_rule(call, special="d0", emit=_emit_arange)


def _emit_arange(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    start, step = args[0], args[2] if len(args) > 2 else 1
    size = local.size("d0")
    values = local.call(
        aten.arange.start_step, 0, size, 1, **{**kwargs, "dtype": local.results[0].dtype}
    )
    offset = local.index("d0") * size
    scaled = values if step == 1 else local.call(aten.mul.Scalar, values, step)
    return [local.call(aten.add.Scalar, scaled, offset * step + start)]


@decomposition(aten.arange.default)
def _arange_end(end: float, **options: Any) -> Tensor:
    return aten.arange.start_step(0, end, 1, **options)


@decomposition(aten.arange.start)
def _arange_start(start: float, end: float, **options: Any) -> Tensor:
    return aten.arange.start_step(start, end, 1, **options)


def _options(x: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> dict[str, Any]:
    return {
        "dtype": x.dtype if dtype is None else dtype,
        "device": x.device if device is None else device,
    }


@decomposition(aten.zeros_like.default)
def _zeros_like(
    x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return aten.full.default(list(x.shape), 0, **_options(x, dtype, device))


@decomposition(aten.ones_like.default)
def _ones_like(
    x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return aten.full.default(list(x.shape), 1, **_options(x, dtype, device))


@decomposition(aten.full_like.default)
def _full_like(
    x: Tensor,
    value: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return aten.full.default(list(x.shape), value, **_options(x, dtype, device))


@decomposition(aten.empty_like.default)
def _empty_like(
    x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return aten.full.default(list(x.shape), 0, **_options(x, dtype, device))


@decomposition(aten.new_zeros.default)
def _new_zeros(
    x: Tensor,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return aten.full.default(list(size), 0, **_options(x, dtype, device))


@decomposition(aten.new_ones.default)
def _new_ones(
    x: Tensor,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return aten.full.default(list(size), 1, **_options(x, dtype, device))


@decomposition(aten.new_full.default)
def _new_full(
    x: Tensor,
    size: Sequence[int],
    value: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return aten.full.default(list(size), value, **_options(x, dtype, device))


@decomposition(aten.new_empty.default, aten.new_empty_strided.default)
def _new_empty(
    x: Tensor,
    size: Sequence[int],
    *_: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **__: Any,
) -> Tensor:
    return aten.full.default(list(size), 0, **_options(x, dtype, device))


@decomposition(aten.fill.Scalar)
def _fill(x: Tensor, value: float) -> Tensor:
    return aten.full.default(list(x.shape), value, dtype=x.dtype, device=x.device)


@decomposition(aten.fill.Tensor)
def _fill_tensor(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.dtype).expand(x.shape)


@decomposition(aten.copy.default)
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x.dtype).expand(x.shape).clone()
