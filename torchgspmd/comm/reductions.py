"""The reductions that a sum, maximum, ... that is pending can be finished by."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat.operators import aten


@dataclass(frozen=True)
class Reduction:
    """One reduction. c10d: its name in torch.distributed. The operators do the same locally."""

    c10d: str
    combine: Callable[[Tensor, Tensor], Tensor]
    of_two: Any
    of_two_in_place: Any
    over_dim: Any


REDUCTIONS = {
    "sum": Reduction("sum", operator.add, aten.add.Tensor, aten.add_.Tensor, aten.sum.dim_IntList),
    # maximum has no in-place form.
    "max": Reduction(
        "max", torch.maximum, aten.maximum.default, aten.maximum.default, aten.amax.default
    ),
    "min": Reduction(
        "min", torch.minimum, aten.minimum.default, aten.minimum.default, aten.amin.default
    ),
    "prod": Reduction(
        "product", operator.mul, aten.mul.Tensor, aten.mul_.Tensor, aten.prod.dim_int
    ),
}
# Lowered calls have torch's name for a reduction.
BY_C10D_NAME = {reduction.c10d: reduction for reduction in REDUCTIONS.values()}
