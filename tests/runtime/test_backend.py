"""A process group that cannot carry tensors of a device is an error, before anything is sent."""

import pytest
import torch.distributed as dist

import torchgspmd as gspmd
from torchgspmd.comm import process_groups


def test_a_model_on_the_cpu_in_a_group_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "backend_of", lambda device: "")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(gspmd.ShardingError, match="no backend for tensors of the device cpu"):
            process_groups.groups_of(gspmd.Mesh(data=1), "cpu")
    finally:
        dist.destroy_process_group()
