"""Operations that create tensors. Without operands, their result may have any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import rule_for, shape_argument
from ..rewrites import rewrite


@rule_for(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def _full(call: Call) -> FactorRule:
    zeros = call.target is aten.zeros.default or call.argument(1, "fill_value", None) == 0
    # Zeros are a sum of zeros: a device may hold them as its term of a pending sum.
    linear = [[]] if zeros else ()
    result = factors("d", call.results[0].dim())
    return call.rule([], [result], local=shape_argument(0), linear=linear)


@rule_for(aten.scalar_tensor.default)
def _scalar(call: Call) -> FactorRule:
    return call.rule([], [[]])


@rule_for(aten.arange.start_step)
def _arange(call: Call) -> FactorRule:
    start, step = call.args[0], call.argument(2, "step", 1)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        options = {**kwargs, "dtype": local.results[0].dtype}
        # The shard's positions are start + (offset + i) * step; offset may be a graph value.
        values = local.call(aten.arange.start_step, 0, local.size("d0"), 1, **options)
        offset = local.start("d0")
        scaled = values if step == 1 else local.call(aten.mul.Scalar, values, step)
        return local.call(aten.add.Scalar, scaled, offset * step + start)

    return call.rule([], [["d0"]], local=LocalForm(emit, when="d0"))


@rewrite("decompose", aten.arange.default)
def _arange_end(end: float, **options: object) -> Tensor:
    return aten.arange.start_step(0, end, 1, **options)


@rewrite("decompose", aten.arange.start)
def _arange_start(start: float, end: float, **options: object) -> Tensor:
    return aten.arange.start_step(start, end, 1, **options)


def _register_filled(arguments: Callable, *ops: OpOverload) -> None:
    """Decompose operations to `full`. arguments: a call's arguments -> (shape, value)."""

    @rewrite("decompose", *ops)
    def filled(
        x: Tensor,
        *args: object,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: object,
    ) -> Tensor:
        shape, value = arguments(x, *args)
        dtype, device = dtype or x.dtype, x.device if device is None else device
        return aten.full.default(list(shape), value, dtype=dtype, device=device)


# empty_like may hold anything, so it holds zeros: equal on all devices.
_register_filled(lambda x: (x.shape, 0), aten.zeros_like.default, aten.empty_like.default)
_register_filled(lambda x: (x.shape, 1), aten.ones_like.default)
_register_filled(lambda x, value: (x.shape, value), aten.full_like.default, aten.fill.Scalar)
_register_filled(
    lambda x, size, *_: (size, 0),
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_register_filled(lambda x, size: (size, 1), aten.new_ones.default)
_register_filled(lambda x, size, value: (size, value), aten.new_full.default)


@rewrite("decompose", aten.fill.Tensor)
def _fill_tensor(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.dtype).expand(x.shape)


@rewrite("decompose", aten.copy.default)
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    source = source.to(x.dtype)
    return (source if source.shape == x.shape else source.expand(x.shape)).clone()
