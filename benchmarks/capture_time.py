"""CPU time of the capture, over that of make_fx and AOTAutograd, for one forward and backward.

    python benchmarks/capture_time.py [--layers 12] [--rounds 5]

Transformer layers on the meta device. The three take turns in one process; printed are the medians,
and the ratios to both. make_fx runs on fake tensors, with parameters as arguments.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import torchgspmd as gspmd
from torchgspmd.capture.trace import capture

GOAL = 1.3  # of the cheaper one


class Model(nn.Module):
    """Layers of a Transformer, to a number."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x = layer(x)
        return (F.mse_loss(x, torch.zeros_like(x)),)


def by_make_fx(model: nn.Module, x: Tensor) -> None:
    parameters = dict(model.named_parameters())

    def step(parameters: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        (loss,) = functional_call(model, parameters, (x,))
        return loss, *torch.autograd.grad(loss, [*parameters.values()])

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {k: mode.from_tensor(p).requires_grad_() for k, p in parameters.items()}
        make_fx(step)(fake, mode.from_tensor(x))


def seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with torch.device("meta"):
        model, x = Model(options.layers), torch.empty(8, 64, 256)
    mesh = gspmd.Mesh(data=2)
    ways: dict[str, Callable[[], object]] = {
        "capture": lambda: capture(model, (x,), {}, mesh, grad=True),
        "make_fx": lambda: by_make_fx(model, x),
        "AOT": lambda: aot_export_module(model, (x,), trace_joint=True, output_loss_index=0),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.rounds + 1):
        for name, run in ways.items():
            spent = seconds(run)
            if round_:  # the first warms caches
                found[name].append(spent)
    medians = {name: statistics.median(each) for name, each in found.items()}
    print(", ".join(f"{name} {spent:.2f} s" for name, spent in medians.items()))
    for peer in ("make_fx", "AOT"):
        print(f"capture over {peer}: {medians['capture'] / medians[peer]:.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()
