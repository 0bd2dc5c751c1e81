"""Training by train_step and by a loop of torch: one model, and optimizers by name."""

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from common.lamb import Lamb  # noqa: E402

OPTIMIZERS = {
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.05, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 1e-2),
    "radam": lambda ps: torch.optim.RAdam(ps, 1e-2),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, 1e-2),
    "asgd": lambda ps: torch.optim.ASGD(ps, 1e-2),
    "rprop": lambda ps: torch.optim.Rprop(ps, 1e-2),
    "lamb": lambda ps: Lamb(ps, 1e-2),
    "adamax": lambda ps: torch.optim.Adamax(ps, 1e-2),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 1e-2, momentum=0.9, centered=True),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, 1e-2, amsgrad=True, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-2, foreach=False),
    "adam": lambda ps: torch.optim.Adam(ps, 1e-2, weight_decay=0.1, maximize=True, foreach=False),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64).double(), nn.Linear(64, 16).double()
        gspmd.annotate(self, {"up.weight": "hidden embed", "down.weight": "embed hidden"})

    def forward(self, x):
        return (self.down(F.gelu(self.up(x))) - x).square().mean()


def loop(model, optimizer, x, clip=0.1):
    loss = model(x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def pair(name):
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, reference)]
    return model, reference, *optimizers, torch.randn(12, 16, dtype=torch.float64)


def check(model, reference):
    for (name, got), want in zip(model.named_parameters(), reference.parameters()):
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=name)


def averaged(model):
    """Return averages of a model's weights, which begin with the weights of now."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    return average
