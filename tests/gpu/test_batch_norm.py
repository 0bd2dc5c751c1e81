"""Batch normalization on a card: running statistics change once, and no certificate fails."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchgspmd as gspmd


@pytest.mark.parametrize("dynamic", [False, True])
def test_running_statistics(dynamic: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.InstanceNorm2d(8))
    plain = norm.double().to(device)
    model, x = copy.deepcopy(plain), torch.randn(8, 3, 6, 6, device=device).double()
    mesh = gspmd.Mesh(data=2, model=2)
    options = {"dynamic": {"input": {0: "rows"}}} if dynamic else {}
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="data _ model _", grad=True, **options)
    assert "cudnn_batch_norm" not in str(plan.captured.graph)
    for rows in (8, 6) if dynamic else (8,):
        out, gradients = plan.simulate(x[:rows])
        expected = plain(x[:rows])
        expected.sum().backward()
        torch.testing.assert_close(out, expected)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9)
        plain.zero_grad()
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(dict(model.named_buffers())[name], buffer)
    assert plan.verify().results, plan.verify()
