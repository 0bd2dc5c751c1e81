"""PyTorch's samples of its optimizers: an ordinary loop on two processes, against one device.

Every configuration, in each of torch's ways (one by one, lists, fused), trains a small model for
three steps. Its state_dict then goes into a second optimizer, which takes one step more.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_same, tolerance
from ranks import distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import torchgspmd as gspmd

optimizers = pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="torch ships no optim_db"
)
DATABASE = {info.name: info for info in optimizers.optim_db}
REASONS = {
    "SparseAdam": "takes sparse gradients, and a layout is one of dense tensors",
}
EPS = torch.finfo(torch.float64).eps
TERMS = 4096  # of 4 steps, each with sums of 24 terms, through roots of averages
# Muon multiplies in bfloat16, whose rounding steps of one rate each leave in the weights.
# LBFGS divides by differences of gradients that nearly vanish, which keep half of the digits:
# of few iterations, since each amplifies the rounding of those before.
ROUNDING = {"Muon": round(tolerance(torch.bfloat16) / EPS), "LBFGS": round(EPS**-0.5)}


class Net(nn.Module):
    """Matrices alone, since Muon takes nothing else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)

    def forward(self, x):
        return self.down(self.up(x).tanh()).square().mean()


def subjects() -> list:
    return [
        pytest.param(name, marks=[pytest.mark.skip(REASONS[name])] if name in REASONS else [])
        for name in DATABASE
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        optimizer.step(closure)


def whole(tree):
    """Return a copy with tensors of one device, and tensors for numbers, such as losses."""
    tree = pytree.tree_map_only(float, lambda n: torch.tensor(n, dtype=torch.float64), tree)
    return pytree.tree_map_only(
        Tensor, lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone(), tree
    )


def trained(model: nn.Module, kind: type, options: dict) -> tuple[dict, dict]:
    """Return the state of an optimizer after three steps, and the weights after four."""
    model.load_state_dict(start_of(model))
    optimizer = kind(model.parameters(), **copy.deepcopy(options))
    train(model, optimizer, range(3))
    state = whole(optimizer.state_dict())
    again = kind(model.parameters(), **copy.deepcopy(options))
    again.load_state_dict(optimizer.state_dict())
    train(model, again, range(3, 4))
    return state, whole(dict(model.named_parameters()))


def start_of(model: nn.Module) -> dict:
    """Return the weights of a new model, laid out as the model's."""
    ours = dict(model.named_parameters())
    return {
        name: torch.distributed.tensor.distribute_tensor(
            value, ours[name].device_mesh, ours[name].placements, src_data_rank=None
        )
        if isinstance(ours[name], DTensor)
        else value
        for name, value in Net().double().state_dict().items()
    }


@distributed("model=2")
@pytest.mark.parametrize("name", subjects())
def test_optimizer(mesh, name):
    info, alone = DATABASE[name], Net().double()
    marks = {"up.weight": "model _", "down.weight": "_ model"}
    model = gspmd.parallelize(gspmd.annotate(Net().double(), mesh, marks), mesh)
    configurations = optimizers._get_optim_inputs_including_global_cliquey_kwargs(
        "cpu", torch.float64, info, skip=("differentiable",)
    )
    compared = 0
    for config in configurations:
        options = {**config.kwargs, **({"max_iter": 2} if info.step_requires_closure else {})}
        try:
            want = trained(alone, info.optim_cls, options)
        except Exception:  # noqa: BLE001 (one device does not take this configuration either)
            continue
        got = trained(model, info.optim_cls, options)
        assert_same(got, want, config.desc, ROUNDING.get(name, TERMS))
        compared += 1
    assert compared
