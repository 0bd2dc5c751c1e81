"""StepLog on real ranks: its rows, and the rank for which the others wait."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from ranks import distributed
from torch import nn

import torchgspmd as gspmd


class Rows:
    """Stands for a run of W&B."""

    def __init__(self):
        self.rows = []

    def log(self, row, step):
        self.rows.append((step, row))


@distributed("data=2")
def test_rows_and_the_slowest_rank(mesh, tmp_path):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    model = gspmd.parallelize(model, mesh, in_specs="data _")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, run, rows = torch.randn(8, 16), Rows(), []
    model(x)  # plans
    options = {"total": 11, "every": 4, "tokens": 8, "file": tmp_path / "log.jsonl"}
    with gspmd.StepLog(model, **options, wandb=run, hardware="h100") as log:
        for _ in range(11):
            if dist.get_rank() == 1:
                time.sleep(0.3)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            rows.append(log.step(loss=loss, rate=0.1))
    assert [row["step"] for row in rows if row] == [4, 8, 11]
    last = rows[-1]
    assert last["loss"] == loss.item() and last["rate"] == 0.1
    assert last["seconds"] >= 0.2 and last["tokens_per_second"] == 8 / last["seconds"]
    assert 0 < last["mfu"] < 1 and last["memory"] > 2**20
    assert rows[7]["slowest"] == 1 and rows[7]["waits"] > 0.2
    if dist.get_rank() == 0:
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [row for row in rows if row]
        assert [step for step, _ in run.rows] == [4, 8, 11]
    else:
        assert not run.rows


def test_every_zero_is_an_error():
    with pytest.raises(gspmd.ShardingError, match="every is 0"):
        gspmd.StepLog(every=0)
