"""parallelize without processes; those with some are in tests/distributed."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import torchgspmd as gspmd
from torchgspmd.comm.process_groups import on_own_card, start_process_group


def test_without_processes_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("sys.argv", ["jobs/my train.py", "--lr", "0.1"])
    with pytest.raises(gspmd.ShardingError) as error:
        gspmd.parallelize(torch.nn.Linear(2, 2), gspmd.Mesh(data=2))
    assert str(error.value).splitlines()[0] == "there is no process group"
    assert "torchrun --nproc-per-node 2 'jobs/my train.py' --lr 0.1," in str(error.value)


class Card:
    """A model whose parameters are on GPU 0."""

    def __init__(self):
        self.moves, self.weight = 0, SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))

    def parameters(self):
        return [self.weight]

    def cuda(self):
        self.moves += 1
        return self


@pytest.mark.parametrize("card, local, moves", [(3, "3", 1), (0, "0", 0), (2, "3", 0)])
def test_a_model_moves_to_the_gpu_of_its_process(monkeypatch, card, local, moves):
    """It moves to LOCAL_RANK's GPU, and not if the program has chosen another GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: card)
    monkeypatch.setenv("LOCAL_RANK", local)
    assert on_own_card(model := Card()).moves == moves == model.moves


@pytest.mark.parametrize("count, chosen, found", [(8, 0, [3]), (8, 5, []), (2, 0, [])])
def test_torchruns_variables_start_the_group(monkeypatch, count, chosen, found):
    """LOCAL_RANK's GPU is set where there is one, unless the program has chosen another."""
    cards = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", cards.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(chosen))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    for name, value in dict(
        RANK=3, LOCAL_RANK=3, WORLD_SIZE=8, MASTER_ADDR="", MASTER_PORT=1
    ).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "init_process_group", lambda: cards.append("started"))
    start_process_group(gspmd.Mesh(data=8))
    assert cards == [*found, "started"]
