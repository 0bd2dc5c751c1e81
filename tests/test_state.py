"""What modules keep between calls, on real gloo processes (worker_state.py), and in plans."""
from pathlib import Path

import pytest
import torch
from test_capture import rand
from test_parallelize import launch
from torch import nn

import torchgspmd as gspmd

WORKER = Path(__file__).with_name("worker_state.py")


@pytest.mark.parametrize("mesh", ["model=3", "data=2,model=2"])
def test_modules_that_keep_something_between_calls(mesh):
    assert launch(mesh, worker=WORKER).count(f"holds on {mesh}") == 6


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.hidden, self.calls = nn.Parameter(rand(6, 8)), None, 0

    def forward(self, x):
        self.calls += 1
        self.hidden = x @ self.weight + (0.0 if self.hidden is None else self.hidden)
        return self.hidden.sum(0)


def test_a_plan_is_of_the_state_as_it_is():
    """What a module keeps is among the inputs of a plan; it changes by simulate only."""
    mesh, net, x = gspmd.Mesh(data=2), Recurrent(), rand(4, 6)
    first = gspmd.plan(net, x, mesh=mesh, in_specs="data _")
    assert net.hidden is None and net.calls == 0 and "hidden" not in str(first)
    first.simulate(x)
    then = gspmd.plan(net, x, mesh=mesh, in_specs="data _")
    assert "%hidden : f32[4@data, 8]" in " ".join(str(then).split())
    torch.testing.assert_close(then.simulate(x), (2 * x @ net.weight).sum(0))
    torch.testing.assert_close(net.hidden, 2 * x @ net.weight)
    assert net.calls == 2


def test_a_global_tensor_that_is_changed_in_place_is_an_error():
    total = torch.zeros(6)

    def add(x):
        total.add_(x.sum(0))
        return x * 1
    with pytest.raises(gspmd.ShardingError, match="changes a tensor in place that it finds in a global variable"):
        gspmd.plan(add, rand(4, 6), mesh=gspmd.Mesh(data=2))
