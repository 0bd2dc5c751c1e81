"""Weights in Fortran order, and arguments whose order differs from call to call, on processes."""

from __future__ import annotations

import copy

import torch
from ranks import distributed
from torch import Tensor, nn

import torchgspmd as gspmd


class Flow(nn.Module):
    """Glow's 1x1 convolution: its weight lies in memory by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).square().mean() + torch.linalg.slogdet(self.w + 0.1)[1]


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.is_contiguous() else x * 3


@distributed("data=2")
def test_a_weight_in_fortran_order(mesh):
    for spec in ("_ _", "data _", "_ data"):
        torch.manual_seed(0)
        model, x = Flow(), torch.randn(8, 4, dtype=torch.float64)
        other = copy.deepcopy(model)
        gspmd.mark_sharding(model.w, mesh, spec)
        wrapped = gspmd.parallelize(model, mesh, in_specs=None)
        for _ in range(2):
            wrapped(x).backward()
            other(x).backward()
        grad = next(wrapped.parameters()).grad
        torch.testing.assert_close(grad.full_tensor(), other.w.grad)


@distributed("data=2")
def test_each_order_that_a_program_asks_for_has_its_own(mesh):
    wrapped = gspmd.parallelize(Asking(), mesh, in_specs=None)
    x = torch.randn(4, 4)
    for given in (x, x.t(), x, x.t()):
        torch.testing.assert_close(wrapped(given), Asking()(given))
