"""microbatches= on processes: training as one process does with parts, on batches of two sizes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import distributed
from torch import nn

import torchgspmd as gspmd

COUNT = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x, labels):
        logits = self.down(torch.relu(self.norm(self.up(x))))
        return F.cross_entropy(logits, labels), logits


def batches():
    for rows in (8, 16, 8, 24):
        yield torch.randn(rows, 6, dtype=torch.double), torch.randint(4, (rows,))


def check_state(model, alone):
    state = gspmd.full_state_dict(model)  # of rank 0
    expected = alone.state_dict() if torch.distributed.get_rank() == 0 else {}
    torch.testing.assert_close(dict(state), dict(expected))


@distributed("data=2,model=2")
def test_training_with_buffers_and_two_batch_sizes(mesh):
    torch.manual_seed(0)
    alone = Net().double()
    model = copy.deepcopy(alone)
    gspmd.annotate(model, mesh, {"up.weight": "model data", "down.weight": "_ model"})
    model = gspmd.parallelize(model, mesh, in_specs=("data _", "data"), microbatches=COUNT)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (alone, model)]
    for x, labels in batches():
        losses = [alone(x[i::COUNT], labels[i::COUNT])[0] / COUNT for i in range(COUNT)]
        torch.stack(losses).sum().backward()
        loss, logits = model(x, labels)
        loss.backward()
        torch.testing.assert_close(loss, torch.stack(losses).sum())
        assert logits.shape == (len(x), 4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_state(model, alone)
    model.eval(), alone.eval()
    x, labels = next(batches())
    torch.testing.assert_close(model(x, labels), alone(x, labels))


@distributed("data=2,model=2")
def test_a_whole_step(mesh):
    """train_step divides the batch inside; on one device it does without a loop of the program."""

    def step_of():
        torch.manual_seed(0)
        model = Net().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return gspmd.train_step(model, optimizer, clip=0.1, microbatches=COUNT)

    alone, step = step_of(), step_of()
    step = gspmd.parallelize(step, mesh, in_specs=("data _", "data"), shard_updates="data")
    for x, labels in batches():
        torch.testing.assert_close(step(x, labels), alone(x, labels))
    check_state(step, alone)


@distributed("data=2")
def test_a_batch_that_is_not_divided(mesh):
    model = gspmd.parallelize(Net(), mesh, in_specs=("data _", "data"), microbatches=COUNT)
    with pytest.raises(gspmd.ShardingError, match="a batch of 7 is divided into 2 microbatches"):
        model(torch.ones(7, 6), torch.zeros(7).long())
