"""Models with which PyTorch tests its checkpoints and DTensors, with inputs and random marks."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable

import pytest
import torch
from coverage import random_spec
from torch import Tensor, nn

import torchgspmd as gspmd

dtensor_helpers = pytest.importorskip(
    "torch.testing._internal.distributed._tensor.common_dtensor",
    reason="torch ships no helpers of DTensor",
)
composable = pytest.importorskip(
    "torch.testing._internal.common_dist_composable", reason="torch ships no composable models"
)


def transformer(**options) -> nn.Module:
    fields = dtensor_helpers.ModelArgs.__dataclass_fields__
    if missing := options.keys() - fields:
        pytest.skip(f"this torch's ModelArgs has no {', '.join(missing)}")
    return dtensor_helpers.Transformer(dtensor_helpers.ModelArgs(dropout_p=0.0, **options))


def tokens(seed: int) -> Tensor:
    return torch.randint(8, (4, 16), generator=torch.Generator().manual_seed(seed))


def rows(count: int) -> Callable[[int], Tensor]:
    return lambda seed: torch.randn(4, count, generator=torch.Generator().manual_seed(seed))


CPU = torch.device("cpu")
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "MLPModule": (lambda: dtensor_helpers.MLPModule("cpu"), rows(10)),
    "MLPModule without bias": (lambda: dtensor_helpers.MLPModule("cpu", bias=False), rows(10)),
    "MLPStacked": (lambda: dtensor_helpers.MLPStacked("cpu"), rows(10)),
    "Transformer": (transformer, tokens),
    "Transformer, not tied": (lambda: transformer(weight_tying=False), tokens),
    "Transformer, recomputed": (lambda: transformer(checkpoint_activations=True), tokens),
    "Transformer, experts": (lambda: transformer(num_experts=4), tokens),
    "UnitModule": (lambda: composable.UnitModule(CPU), rows(100)),
    "CompositeModel": (lambda: composable.CompositeModel(CPU), rows(100)),
    "UnitParamModule": (lambda: composable.UnitParamModule(CPU), rows(100)),
    "CompositeParamModel": (lambda: composable.CompositeParamModel(CPU), rows(100)),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name][0]()


def wrapped(model: nn.Module, mesh: gspmd.Mesh, seed: str) -> nn.Module:
    """Return a copy on the mesh, each axis on a random dimension of each parameter."""
    rng = random.Random(zlib.crc32(seed.encode()))
    marks = {n: random_spec(rng, p.shape, mesh.names) for n, p in model.named_parameters()}
    return gspmd.parallelize(gspmd.annotate(copy.deepcopy(model), mesh, marks), mesh)


def train(model: nn.Module, name: str, steps: int = 2, optimizer=None) -> torch.optim.Optimizer:
    """Take steps of AdamW, whose epsilon keeps rounding from moving a weight."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(MODELS[name][1](step)).square().mean().backward()
        optimizer.step()
    return optimizer
