"""parallelize without processes; those with some are in tests/distributed."""

import pytest
import torch

import torchgspmd as gspmd


def test_without_processes_the_error_says_what_to_do():
    with pytest.raises(gspmd.ShardingError) as error:
        gspmd.parallelize(torch.nn.Linear(2, 2), gspmd.Mesh(data=2))
    assert str(error.value).splitlines()[0] == "there is no process group"
