"""A recurrence along a sharded sequence beside one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh


def sent(
    model: nn.Module,
    args: Sequence[Tensor],
    specs: Sequence[str],
    mesh: Mesh,
    certify: bool = False,
) -> float:
    """Compare loss and gradients with one device; return the bytes that a device sends."""
    plan = gspmd.plan(model, *args, mesh=mesh, in_specs=(*specs,), grad=True)
    loss, gradients = plan.simulate(*args, _poison=True)
    model.zero_grad()
    expected = model(*args)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-11 * scale)
    if certify:
        plan.verify()
    return plan.sent_bytes
