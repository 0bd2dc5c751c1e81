"""FLOP formulas for this package's operations, for torch.utils.flop_counter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .nd import split_equation

_OURS = torch.ops.torchgspmd


def einsum_flops(equation: str, a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs in an einsum with two operands, from their shapes."""
    first, second, _out = split_equation(equation)
    # Each pair of entries that meet is multiplied and added: 2 m k n for a matrix product.
    return 2 * math.prod({**dict(zip(first, a)), **dict(zip(second, b))}.values())


register_flop_formula(_OURS.einsum)(einsum_flops)


@register_flop_formula(_OURS.scaled_mm)
def scaled_mm_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs in a product of scaled matrices, from their shapes."""
    return 2 * a[0] * a[1] * b[1]
