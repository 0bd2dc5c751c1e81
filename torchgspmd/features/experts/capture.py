"""PyTorch's grouped products, as operations for all types."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capture.rewrites.products import matmul
from ...compat.private_apis import _grouped_mm
from ...rules.rewrites import DECLINED, rewrite
from .op import grouped_mm, grouped_outer


@rewrite("vmap", _grouped_mm, getattr(F, "grouped_mm", _grouped_mm))
@rewrite("product", _grouped_mm, getattr(F, "grouped_mm", _grouped_mm))
def _groups(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Run grouped_mm for all types. PyTorch's own takes only bfloat16 in aligned rows."""
    if bias is not None or mat_a.dtype != mat_b.dtype:
        return DECLINED
    if offs is None:
        out = matmul(mat_a, mat_b)
    elif mat_a.dim() == mat_b.dim() == 2:
        out = grouped_outer(mat_a.t(), mat_b, offs)
    elif mat_a.dim() == 2:
        out = grouped_mm(mat_a, mat_b, offs)
    else:
        # The groups are columns of mat_b: transposed, they are rows.
        out = grouped_mm(mat_b.t(), mat_a.mT, offs).t()
    return out if out is DECLINED or out_dtype is None else out.to(out_dtype)
