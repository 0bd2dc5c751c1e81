"""print() and logging in forward show the values of each run, in order, as eager PyTorch does."""

import logging

import pytest
import torch
from torch import nn

import torchgspmd as gspmd

MESH, PIPES = gspmd.Mesh(data=2, model=2), gspmd.Mesh(stage=2)


class Talks(nn.Module):
    def __init__(self, say):
        super().__init__()
        self.up, self.say = nn.Linear(8, 16, dtype=torch.float64), say
        for p in self.up.parameters():  # sums are exact
            p.data = torch.randint(-8, 8, p.shape).double() / 8

    def forward(self, x):
        h = self.up(x)
        self.say(h)
        return h.square().mean()


def in_place(h):
    print("before", h[0, 0], end="; ")
    h = h.clone()
    h.mul_(2)
    print("after", h[0, 0])


SAID = {
    "tensor": lambda h: print("h", h.sum(), h.shape, sep="|"),
    "format": lambda h: print(f"sum {h.sum():.3f}, mean {h.mean():8.2e}, {h.min()}", end="!\n"),
    "number": lambda h: print(h.sum().item(), f"{h.sum().item():.4f}", 3),
    "container": lambda h: print([h[0, :2], {"a": h[1, 1]}], None),
    "in place": in_place,
    "integers": lambda h: print((h > 0).sum(), h.argmax()),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", SAID)
def test_a_run_prints_its_values(name, grad, capsys):
    torch.manual_seed(0)
    model = Talks(SAID[name])
    plan = gspmd.plan(model, torch.zeros(4, 8).double(), mesh=MESH, in_specs="data _", grad=grad)
    assert capsys.readouterr().out == ""
    for x in (torch.randint(-4, 4, (4, 8)).double(), torch.ones(4, 8).double()):
        with torch.no_grad():
            model(x)
        expected = capsys.readouterr().out
        plan.simulate(x)
        assert capsys.readouterr().out == expected != ""


def test_a_run_logs_its_values(caplog):
    logger = logging.getLogger("talks")
    model = Talks(lambda h: logger.warning("norm %s of %d", h.norm(), 4))
    plan = gspmd.plan(model, torch.zeros(4, 8).double(), mesh=MESH, in_specs="data _")
    assert not caplog.records
    x = torch.ones(4, 8).double()
    with torch.no_grad():
        model(x)
        plan.simulate(x)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == second


def test_a_text_that_goes_nowhere_is_an_error():
    with pytest.raises(gspmd.ShardingError, match="formats a value that only a run knows as '.3f'"):
        gspmd.plan(Talks(lambda h: f"{h.sum():.3f}"), torch.ones(4, 8).double(), mesh=MESH)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        print(x)
        return self.up(x)


@pytest.mark.parametrize("wrap", [gspmd.stack, lambda b: gspmd.pipeline(b, PIPES, microbatches=2)])
def test_a_print_in_a_body_is_an_error(wrap):
    mesh = PIPES if wrap is not gspmd.stack else MESH
    with pytest.raises(gspmd.ShardingError, match="of each of its iterations|of one iteration"):
        gspmd.plan(wrap([Block(), Block()]), torch.ones(4, 8), mesh=mesh)
