"""Floating-point operations of the operations of this package, for torch.utils.flop_counter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import attention_zigzag as _zigzag  # noqa: F401
from . import flex_attention as _flex  # noqa: F401
from .nd import split_equation

_OURS = torch.ops.torchgspmd


def einsum_flops(equation: str, a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the operations of an einsum of two tensors, from their shapes."""
    first, second, _out = split_equation(equation)
    return 2 * math.prod({**dict(zip(first, a)), **dict(zip(second, b))}.values())


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


register_flop_formula(_OURS.einsum)(einsum_flops)
register_flop_formula([_OURS.attention, _OURS.attention_parts, _OURS.zigzag_attention])(
    _attention_flops
)
register_flop_formula(_OURS.flex_attention)(_attention_flops)
register_flop_formula(_OURS.flex_attention_backward)(_attention_backward_flops)
register_flop_formula([_OURS.attention_backward, _OURS.zigzag_attention_backward])(
    _attention_backward_flops
)
