"""parallelize on real gloo processes: see worker_parallelize.py for what is compared."""

import pytest
import torch
from helpers import launch

import torchgspmd as gspmd


@pytest.mark.parametrize("mesh", ["data=2", "model=3", "data=2,model=2"])
def test_processes_compute_what_one_process_does(mesh):
    assert launch(mesh, "checks").count(f"holds on {mesh}") == 21


def test_a_checkpoint_is_resumed_on_other_meshes(tmp_path):
    path = str(tmp_path / "checkpoint")
    launch("data=2,model=2", "save", path)
    for mesh in ("model=3", "data=1"):
        launch(mesh, "load", path)


def test_without_processes_the_error_says_what_to_do():
    with pytest.raises(gspmd.ShardingError) as error:
        gspmd.parallelize(torch.nn.Linear(2, 2), gspmd.Mesh(data=2))
    assert str(error.value).splitlines()[0] == "there is no process group"
