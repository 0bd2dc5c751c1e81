"""What several test files need: numbers compared by a tolerance that follows from the type, runs on
simulated devices.
"""

from __future__ import annotations

import itertools
import re

import torch
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import ShardSpec
from torchgspmd.errors import ShardingError

MESHES = (gspmd.Mesh(m=1), gspmd.Mesh(m=2), gspmd.Mesh(a=2, m=2), gspmd.Mesh(a=2, m=3))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layouts(rank: int, names: tuple[str, ...], pending: bool) -> list[ShardSpec]:
    """Every layout: each axis unused, on one dimension (in every order there), or pending."""
    found = {}
    for order in itertools.permutations(names):
        for places in itertools.product(range(-1 - pending, rank), repeat=len(names)):
            dims = tuple(
                tuple(a for a, place in zip(order, places) if place == d) for d in range(rank)
            )
            found[
                ShardSpec(dims, (), tuple(a for a in names if dict(zip(order, places))[a] == -2))
            ] = None
    return list(found)


def tolerance(dtype: torch.dtype, terms: int = 64) -> float:
    """Relative to the largest element: rounding of sums of so many terms in another order."""
    return torch.finfo(dtype).eps * terms if dtype.is_floating_point or dtype.is_complex else 0.0


def assert_same(got, want, what: str = "", terms: int = 64) -> None:
    """Equal structure, shape, type, and numbers up to rounding; NaN and infinities in the same
    places.
    """
    assert type(got) is type(want) or isinstance(want, torch.Tensor) or want is None, (
        what,
        type(got),
        type(want),
    )
    if isinstance(want, dict):
        assert set(got) == set(want), (what, set(got) ^ set(want))
        for key in want:
            assert_same(got[key], want[key], f"{what}[{key}]", terms)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want), what
        for i, (g, w) in enumerate(zip(got, want)):
            assert_same(g, w, f"{what}[{i}]", terms)
    elif isinstance(want, torch.Tensor):
        assert got.shape == want.shape and got.dtype == want.dtype, (
            what,
            got.shape,
            want.shape,
            got.dtype,
            want.dtype,
        )
        got, want = got.detach(), want.detach()
        if want.is_floating_point() and want.itemsize == 1:  # float8: PyTorch only copies it
            got, want = got.view(torch.uint8), want.view(torch.uint8)
        if not want.dtype.is_floating_point and not want.dtype.is_complex:
            assert torch.equal(got, want), f"{what}: {got} is not {want}"
            return
        finite = want[want.isfinite()]
        scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
        torch.testing.assert_close(
            got,
            want,
            rtol=0,
            atol=tolerance(want.dtype, terms) * scale,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )
    else:
        assert got == want, (what, got, want)


def eager(module: nn.Module, *args, **kwargs):
    """The outputs of a module, and the gradients of its differentiable outputs by name, for
    cotangents of ones.
    """
    out = module(*args, **kwargs)
    found = [
        t
        for t in torch.utils._pytree.tree_leaves(out)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(
        found, list(named.values()), [torch.ones_like(t) for t in found], allow_unused=True
    )
    return out, {name: g for name, g in zip(named, grads) if g is not None}


def message(action) -> str:
    """The whole text of the ShardingError that an action raises, line numbers of this directory's
    files as `N`.
    """
    try:
        action()
    except ShardingError as error:
        return re.sub(
            r"(test_\w+\.py):\d+", r"\1:N", re.sub(r"\S*/(test_\w+\.py)", r"\1", str(error))
        )
    raise AssertionError("no ShardingError")
