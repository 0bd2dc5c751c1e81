"""The programs of all devices of a mesh, on one card, compute what the plain model does there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt.model import GPT, LAYOUTS, Config  # noqa: E402

MESHES = {
    "dp": gspmd.Mesh(data=4),
    "tp": gspmd.Mesh(data=2, model=2),
    "sp": gspmd.Mesh(model=4),
    "cp": gspmd.Mesh(data=1, seq=4),
    "fsdp": gspmd.Mesh(data=4),
    "2d": gspmd.Mesh(data=2, model=2),
    "pp": gspmd.Mesh(stage=2),
    "pp_dp": gspmd.Mesh(data=2, stage=2),
    "pp_tp": gspmd.Mesh(stage=2, model=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: torch.device) -> None:
    mesh = MESHES[layout]
    torch.manual_seed(0)
    plain = GPT(Config(96, context=32, layers=2, heads=4, width=64)).to(device)
    batch = [torch.randint(96, (8, 32), device=device) for _ in range(2)]
    loss = plain(*batch)
    loss.backward()
    torch.manual_seed(0)
    model = GPT(plain.config).to(device)
    model.load_state_dict(plain.state_dict())
    model.divide(mesh, 4, schedule="1f1b")
    model = gspmd.annotate(model, LAYOUTS[layout].on(mesh))
    out, grads = gspmd.plan(model, *batch, mesh=mesh, grad=True).simulate(*batch)
    torch.testing.assert_close(out, loss, rtol=1e-5, atol=1e-5)
    want = dict(plain.named_parameters())
    for name, grad in grads.items():
        if name in want:
            torch.testing.assert_close(grad, want[name].grad, rtol=1e-4, atol=1e-5)
    assert sum(name in want for name in grads) >= 4
