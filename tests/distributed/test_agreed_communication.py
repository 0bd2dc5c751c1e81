"""parallelize(communication=): every rank raises the same error before anything is sent."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from ranks import distributed
from torch import nn

import torchgspmd as gspmd

X = torch.linspace(-1, 1, 48).view(8, 6)


def wrapped(mesh, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    gspmd.annotate(model, mesh, {"0.weight": "model _", "0.bias": "model", "2.weight": "_ model"})
    return gspmd.parallelize(model, mesh, in_specs="_ _", **options)


@distributed("model=2")
def test_all_ranks_refuse_what_is_not_agreed(mesh):
    model = wrapped(mesh, communication=["all_reduce model 2"])
    assert model(X).shape == (8, 6)
    for rows in ([], ["all_gather"], ["all_reduce model 1"]):
        with pytest.raises(gspmd.ShardingError, match="communication that is not agreed, 1 x"):
            wrapped(mesh, communication=rows)(X)
    dist.barrier()


@distributed("model=2")
def test_a_golden_text_of_the_wrapped_model_agrees_to_it(mesh):
    folder = [None]
    if dist.get_rank() == 0:
        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = f"{folder[0]}/plan.txt"
    model = wrapped(mesh)
    expected = model(X)
    if dist.get_rank() == 0:
        model.plan.check(path, update=True)
    dist.barrier()
    assert torch.equal(wrapped(mesh, communication=path)(X), expected)
    with pytest.raises(gspmd.ShardingError, match="all_reduce  model  f32"):
        wrapped(mesh, communication=path)(torch.cat([X, X]))
