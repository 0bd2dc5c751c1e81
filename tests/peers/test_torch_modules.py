"""PyTorch's samples of its modules: each on two processes with random marks, against itself alone.

Of each module the first sample in training and the last in evaluation, in float64: results,
gradients of parameters and arguments, buffers.
"""

from __future__ import annotations

import copy
import random
import zlib

import pytest
import torch
from coverage import differs, random_spec
from ranks import distributed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import torchgspmd as gspmd

pytest.importorskip("torch.testing._internal.common_modules", reason="torch ships no module_db")
from module_coverage import EXACT, MODULES, Case, tensors  # noqa: E402

RANDOM = {
    "nn.FractionalMaxPool2d": "draws its windows",
    "nn.FractionalMaxPool3d": "draws its windows",
}


def subjects() -> list:
    return [
        pytest.param(name, marks=[pytest.mark.skip(RANDOM[name])] if name in RANDOM else [])
        for name in MODULES
    ]


def sample_of(name: str, training: bool) -> Case:
    info = MODULES[name]
    torch.manual_seed(0)
    made = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    )
    case = Case(info, made[0 if training else -1], training)
    if any(map(nn.parameter.is_lazy, case.module.parameters())):
        case.module(*case.args, **case.kwargs)  # a lazy module has no shapes before
    case.args, case.kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        (case.args, case.kwargs),
    )
    return case


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def run(module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return results, the gradients of parameters and arguments, and buffers."""
    outs = tensors(module(*args, **kwargs))
    if used := [t for t in outs if t.requires_grad]:
        sum(whole(t).sum() for t in used).backward()
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    grads = [t.grad for t in (*module.parameters(), *given) if t.is_leaf and t.grad is not None]
    return [whole(t) for t in (*outs, *grads, *module.buffers())]


@distributed("model=2")
@pytest.mark.parametrize("name", subjects())
def test_module(mesh, name):
    for training in (True, False):
        module, args, kwargs = sample_of(name, training).fresh()
        rng = random.Random(zlib.crc32(f"{name} {training}".encode()))
        marks = {n: random_spec(rng, p.shape, mesh.names) for n, p in module.named_parameters()}
        wrapped = gspmd.parallelize(gspmd.annotate(copy.deepcopy(module), mesh, marks), mesh)
        got = run(wrapped, *copy.deepcopy((args, kwargs)))
        want = run(module, args, kwargs)
        assert (why := differs(got, want, EXACT)) is None, (training, marks, why)
