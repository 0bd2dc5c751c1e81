"""A job that makes many meshes: groups that no rank uses are destroyed, the others go on."""

import os

import torch
from ranks import distributed
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm import process_groups

MOST, MADE = 3, 8


def wrapped(i: int) -> nn.Module:
    mesh = gspmd.Mesh(**{f"rows{i}": 2, f"columns{i}": 2})
    model = nn.Linear(4, 8)
    gspmd.mark_sharding(model.weight, mesh, f"columns{i} _")
    return gspmd.parallelize(model, mesh, in_specs=f"rows{i} _", out_specs=f"rows{i} _")


def train(model: nn.Module) -> None:
    model(torch.ones(4, 4)).sum().backward()


@distributed("data=2,model=2")
def test_unused_groups_go(mesh):
    most, process_groups.MOST_MESHES = process_groups.MOST_MESHES, MOST
    try:
        kept, states, counts = wrapped(0), [], []
        train(kept)
        for i in range(1, MADE):
            model = wrapped(i)
            train(model)
            if i == 1:
                states.append(model.state_dict())  # outlives its model
            del model
            counts.append((len(process_groups._GROUPS), len(os.listdir("/proc/self/fd"))))
        meshes = [str(key[0]) for key in process_groups._GROUPS]
        assert {"rows0=2,columns0=2", "rows1=2,columns1=2"} < set(meshes), meshes
        # One more than MOST: two are used, and of the others one at a time has its groups.
        others = sum("rows" in mesh for mesh in meshes) - 2
        assert others <= MOST, meshes
        assert max(counts[-3:])[1] <= max(counts[2:5])[1], counts
        train(kept)
        assert states[0]["weight"].full_tensor().shape == (8, 4)
    finally:
        process_groups.MOST_MESHES = most
