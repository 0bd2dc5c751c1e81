"""Experts on real processes: tokens of all routings come to their experts and back."""

import sys
from unittest.mock import patch

import pytest
import row_exchanges
import torch
from expert_layer import ChosenExperts, Experts, batch
from ranks import distributed

import torchgspmd as gspmd
from torchgspmd import ShardingError
from torchgspmd.comm import carriers as libraries


def close(a, b):
    a = a.full_tensor() if hasattr(a, "full_tensor") else a
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@distributed("expert=2", "expert=4")
def test_experts_compute_what_one_device_does(mesh):
    devices = mesh.size
    for cut in ({}, {"shards": devices, "capacity": devices}):
        torch.manual_seed(0)
        model = Experts(8, 16, 8, **cut)
        alone = Experts(8, 16, 8)
        alone.load_state_dict(model.state_dict())
        gspmd.annotate(model, mesh, {"*": "expert _ _"})
        model = gspmd.parallelize(model, mesh, in_specs=("expert _", "expert _", "expert _"))
        for kind in ("uniform", "skewed", "to one", "empty experts"):
            x, chosen, weights = batch(kind, 32, 16, 8)
            y, _ = model(x, chosen, weights)
            y.square().sum().backward()
            theirs = batch(kind, 32, 16, 8)
            expected = alone.whole(*theirs)
            expected.square().sum().backward()
            close(y, expected)
            close(x.grad, theirs[0].grad)
            close(weights.grad, theirs[2].grad)
            for p, q in zip(model.parameters(), alone.parameters()):
                close(p.grad, q.grad)
                p.grad = q.grad = None


@distributed("expert=4")
def test_rows_by_deep_ep(mesh):
    """A stand-in has its calls. Bits are those of all_to_all, and empty places are not sent."""
    found = []
    row_exchanges.SENT.clear()
    with (
        patch.dict(sys.modules, deep_ep=row_exchanges.module()),
        patch.object(libraries, "on_gpus", lambda groups: True),
    ):
        for carriers in ([], ["deep_ep"]):
            torch.manual_seed(0)
            model = Experts(8, 512, 8, shards=4, capacity=2.0, overflow="count").bfloat16()
            gspmd.annotate(model, mesh, {"*": "expert _ _"})
            specs = ("expert _",) * 3
            model = gspmd.parallelize(model, mesh, in_specs=specs, advanced={"carriers": carriers})
            for kind in ("skewed", "to one"):
                x, chosen, weights = batch(kind, 64, 512, 8)
                x = x.detach().bfloat16().requires_grad_()
                y, _ = model(x, chosen, weights.detach().bfloat16())
                y.square().sum().backward()
                found += [y, x.grad]
    half = len(found) // 2
    for got, want in zip(found[half:], found[:half]):
        assert torch.equal(got, want)
    # Forward: rows go and come back; backward the same. A device has 32 choices, and room for 64.
    assert len(row_exchanges.SENT) == 2 * 4, row_exchanges.SENT
    assert max(row_exchanges.SENT[::2]) <= 32, row_exchanges.SENT


@distributed("expert=2", "data=2,expert=2")
def test_matrices_that_an_index_chooses(mesh):
    model, alone = ChosenExperts(5, 8, 64), ChosenExperts(5, 8, 64)
    gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _", "up_bias": "expert _"})
    rows = "+".join(dict(mesh.axes)) + " _"
    model = gspmd.parallelize(model, mesh, in_specs=(rows, rows), out_specs=rows)
    x, chosen = torch.randn(12, 8, dtype=torch.float64), torch.randint(-1, 5, (12, 2))
    y, expected = model(x, chosen), alone(x, chosen)
    y.square().sum().backward()
    expected.square().sum().backward()
    close(y, expected)
    for p, q in zip(model.parameters(), alone.parameters()):
        close(p.grad, q.grad)


@distributed("expert=2")
def test_all_ranks_raise_if_there_is_no_room(mesh):
    model = Experts(4, 8, 8, shards=2, capacity=1.0)
    gspmd.annotate(model, mesh, {"*": "expert _ _"})
    model = gspmd.parallelize(model, mesh, in_specs=("expert _", "expert _", "expert _"))
    x, chosen, weights = batch("uniform", 16, 8, 4)
    model(x, chosen, weights)
    with pytest.raises(ShardingError, match="which has room for 8"):
        model(x, torch.where(torch.arange(16).unsqueeze(1) < 8, 0, chosen), weights)
