"""Inductor compiles one of the layers that are alike."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import torchgspmd as gspmd
from torchgspmd.runtime.compile_graph import CompiledPiece, like_regions, program_key

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt.model import GPT, LAYOUTS, Config  # noqa: E402


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layers(nn.Module):
    """Layers that a Python loop calls; `odd` is another one in their middle."""

    def __init__(self, count: int, odd: int | None = None) -> None:
        super().__init__()
        self.odd = odd
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x).sin().exp() * 0.1 + x.cos()
            y = y.sigmoid().sub(y.mean(-1, keepdim=True)).tanh() + y.abs().sqrt().log1p()
            x = y.relu() if i == self.odd else y
        return x


def traced(module: nn.Module) -> torch.fx.GraphModule:
    """Return the module's program; its parameters are inputs."""

    def run(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, parameters, x)

    return make_fx(run)(dict(module.named_parameters()), torch.rand(4, 8))


@pytest.mark.parametrize("count", (2, 3, 6))
def test_layers_are_regions(count: int) -> None:
    regions = like_regions(traced(Layers(count)).graph)
    if count < 3:
        assert not regions
        return
    assert len(regions) in (count, count - 1)
    assert len({len(region) for region in regions}) == 1


def test_a_layer_that_differs_divides_them() -> None:
    """No region has the operation that one layer alone has."""
    regions = like_regions(traced(Layers(9, odd=4)).graph)
    assert len(regions) >= 6
    assert not any(node.target == torch.ops.aten.relu.default for r in regions for node in r)


def test_graphs_with_one_key_compute_the_same() -> None:
    module = traced(Layers(2))
    assert program_key(module.graph) == program_key(copy.deepcopy(module).graph)
    other = traced(Layers(2, odd=1))
    assert program_key(module.graph) != program_key(other.graph)


def test_one_compilation_for_like_layers(one_process: None, monkeypatch) -> None:
    """Losses and gradients are those of eager PyTorch, and four more layers compile nothing.

    Pieces run as they are: test_inductor_order.py compiles them.
    """
    counts = []
    for layers in (6, 10):
        compiled: list[CompiledPiece] = []

        def noted(piece: CompiledPiece, inputs: list, made: list = compiled) -> object:
            made.append(piece)
            return lambda boxed: piece.program(*boxed)

        monkeypatch.setattr(CompiledPiece, "_compile", noted)
        size, models = Config(17, context=8, layers=layers, heads=2, width=16), []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(GPT(size))
        plain = models[0]
        mesh = LAYOUTS["dp"].on(gspmd.Mesh(data=1))
        model = gspmd.parallelize(models[1], mesh, backend="inductor")
        tokens = torch.randint(17, (2, 8))
        loss, want = model(tokens, tokens), plain(tokens, tokens)
        loss.backward()
        want.backward()
        torch.testing.assert_close(loss, want)
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)
        counts.append(len(compiled))
    assert counts[0] == counts[1] <= 8, counts
