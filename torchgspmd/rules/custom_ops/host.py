"""Functions of other packages that a run computes on the host, from values of all devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...compat.operators import custom_op


@custom_op("linear_sum_assignment", tags=(torch.Tag.cudagraph_unsafe,))
def linear_sum_assignment(cost: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    """Return SciPy's rows and columns [min(m, n)], int64, for costs [m, n]."""
    from scipy.optimize import linear_sum_assignment as assign

    pairs = assign(cost.detach().cpu().numpy(), maximize)
    rows, columns = (torch.from_numpy(numbers).to(cost.device) for numbers in pairs)
    return rows, columns


@linear_sum_assignment.register_fake
def _(cost: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    count: Any = torch.sym_min(*cost.shape)
    rows, columns = (cost.new_empty(count, dtype=torch.int64) for _ in range(2))
    return rows, columns
