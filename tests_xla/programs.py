"""Models that the tests train on XLA, and what a training step of them is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from gpt.model import GPT, Config
from gpt.model import LAYOUTS as ALL_LAYOUTS
from torch import Tensor, nn
from vit.model import LAYOUTS as VIT_LAYOUTS
from vit.model import Config as ViTConfig
from vit.model import ViT

import torchgspmd as gspmd
from torchgspmd import Mesh, annotate, mark_sharding

LAYOUTS = {name: x for name, x in ALL_LAYOUTS.items() if "stage" not in x.rules}
MESH = Mesh(data=4, model=2)
EVEN, UNEVEN = (
    (64, 16, 8),
    (61, 13, 6),
)  # vocabulary, length of a sequence, sequences: UNEVEN divides over nothing
DIGITS, UNEVEN_DIGITS = (
    (12, 8),
    (15, 6),
)  # rows of an image, images: 3 x 3 and 5 x 5 patches make 10 and 26 tokens


class ConvNet(nn.Module):
    """Images whose rows are sharded; batch norm over all of them."""

    def __init__(self, mesh: Mesh, layout: str = "data _ model _"):
        super().__init__()
        self.mesh, self.layout = mesh, layout
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 5, stride=2, padding=2), nn.Linear(8, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # x [b, 3, h, w], labels [b]
        x = mark_sharding(x, self.mesh, self.layout)
        x = mark_sharding(F.relu(self.norm(self.first(x))), self.mesh, self.layout)  # [b, 8, h, w]
        x = mark_sharding(
            F.max_pool2d(F.relu(self.second(x)), 2), self.mesh, self.layout
        )  # [b, 8, h/4, w/4]
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class MoE(nn.Module):
    """A mixture of experts by one-hot dispatch (GShard): experts and groups of tokens lie along the
    same axes.
    """

    def __init__(self, mesh: Mesh, width: int = 16, experts: int = 8, hidden: int = 32):
        super().__init__()
        self.mesh, self.experts = mesh, experts
        self.gate = nn.Parameter(torch.randn(width, experts) / width)  # [m, e]
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)  # [e, m, h]
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)  # [e, h, m]
        mark_sharding(self.up, mesh, "data _ model")
        mark_sharding(self.down, mesh, "data model _")

    def forward(self, x: Tensor) -> Tensor:  # [g, s, m]
        x = mark_sharding(x, self.mesh, "data _ _")
        odds = torch.einsum("gsm,me->gse", x, self.gate).softmax(-1)
        best, chosen = odds.max(-1)  # [g, s]
        taken = F.one_hot(chosen, self.experts)  # [g, s, e]
        place = (taken.cumsum(1) - 1) * taken  # [g, s, e]
        room = 2 * x.shape[1] // self.experts
        slots = F.one_hot(place.clamp(max=room), room + 1)[..., :room] * taken.unsqueeze(
            -1
        )  # [g, s, e, c]
        slots = slots.to(x.dtype)
        sent = mark_sharding(torch.einsum("gsec,gsm->egcm", slots, x), self.mesh, "data _ _ _")
        hidden = F.relu(torch.einsum("egcm,emh->egch", sent, self.up))
        back = mark_sharding(
            torch.einsum("egch,ehm->egcm", hidden, self.down), self.mesh, "data _ _ _"
        )
        y = torch.einsum("gsec,egcm->gsm", slots * best[..., None, None], back)
        return mark_sharding(y, self.mesh, "data _ _").square().mean()


def gpt(
    layout: str, sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32, layers: int = 2
) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(Config(sizes[0], context=sizes[1], layers=layers, heads=4, width=32)).to(dtype)
    return annotate(model, LAYOUTS[layout].on(MESH))


def texts(sizes: tuple[int, int, int], steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    vocabulary, length, count = sizes
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield tuple(torch.randint(vocabulary, (2, count, length), generator=generator))


def vit(
    layout: str, sizes: tuple[int, int], dtype: torch.dtype = torch.float32, layers: int = 2
) -> nn.Module:
    torch.manual_seed(0)
    model = ViT(ViTConfig(sizes[0], 3, 3, layers=layers, heads=4, width=32)).to(dtype)
    return annotate(model, VIT_LAYOUTS[layout].on(MESH))


def images(
    dtype: torch.dtype, steps: int, size: tuple[int, int] = (16, 16), count: int = 8
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randn(count, 3, *size, generator=generator, dtype=dtype),
            torch.randint(10, (count,), generator=generator),
        )


def pictures(
    sizes: tuple[int, int], steps: int, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Tensor, Tensor]]:
    return images(dtype, steps, (sizes[0], sizes[0]), sizes[1])


def groups(dtype: torch.dtype, steps: int, count: int = 8) -> Iterator[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (torch.randn(count, 16, 16, generator=generator, dtype=dtype),)


def train(
    model: nn.Module,
    batches,
    optimizer: torch.optim.Optimizer,
    each: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The loss of every step. each: called after a step with its number."""
    losses = []
    for step, batch in enumerate(batches):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        each(step)
        optimizer.zero_grad()
    return losses


def on_both(model: nn.Module, **options) -> tuple[nn.Module, nn.Module]:
    """(the model on XLA, an equal one on the CPU)"""
    reference = copy.deepcopy(model)
    return gspmd.parallelize(model, MESH, backend="xla", **options), reference


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def primed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Itself with a state, after a step that changes nothing: the program of a training step is
    then compiled once, not twice.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    return optimizer


def furthest(losses: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    assert len(losses) == len(wanted)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted))
