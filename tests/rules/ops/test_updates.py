"""Adam's kernel steps tensors however they lie in memory."""

from __future__ import annotations

import pytest
import torch

from torchgspmd.rules.custom_ops.updates import adam_


@pytest.mark.parametrize("strided", [(1,), (0, 2, 3), (0, 1, 2, 3)])
def test_strides_change_no_number(strided: tuple[int, ...]) -> None:
    """In float64 the formula would give others: the kernel has float32 constants."""
    draw = torch.Generator().manual_seed(0)
    dense = [torch.rand(6, 8, generator=draw, dtype=torch.float64) for _ in range(4)]
    other = [t.T.contiguous().T if i in strided else t.clone() for i, t in enumerate(dense)]
    step, lr = torch.tensor(1.0), torch.tensor(0.1, dtype=torch.float64)
    for p, g, m, v in (dense, other):
        adam_([p], [g], [m], [v], step, lr, 0.9, 0.999, 0.01, 1e-8, True, False)
    assert all(a.equal(b) for a, b in zip(dense, other))
    assert [t.is_contiguous() for t in other] == [i not in strided for i in range(4)]
