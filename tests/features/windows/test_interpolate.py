"""Interpolation and adaptive pooling along sharded dimensions: PyTorch's numbers, and only rows of
neighbours are sent.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd.features.windows.interpolate import Line, band, bands, weights

LAYOUTS = [("s=2", "_ _ s _"), ("s=3", "_ _ s _"), ("s=2,r=2", "_ _ s r"), ("s=2,r=2", "_ _ s+r _")]
PLANES: dict[str, dict] = {
    "nearest up": dict(size=(111, 49)),
    "nearest down": dict(scale_factor=0.4),
    "nearest by 2": dict(scale_factor=2),
    "exact": dict(size=(89, 45), mode="nearest-exact"),
    "bilinear": dict(size=(121, 28), mode="bilinear"),
    "corners": dict(size=(105, 61), mode="bilinear", align_corners=True),
    "by 1.5": dict(scale_factor=1.5, mode="bilinear"),
    "bicubic": dict(size=(123, 61), mode="bicubic"),
    "antialias": dict(size=(27, 22), mode="bilinear", antialias=True),
    "bicubic antialias": dict(size=(31, 73), mode="bicubic", antialias=True),
    "area": dict(size=(24, 16), mode="area"),
    "one dimension": dict(size=(51, 67), mode="bilinear"),
    "same": dict(size=(51, 33), mode="bilinear"),
}


def with_gradient(function: Callable) -> Callable:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = function(x.requires_grad_())
        return y, torch.autograd.grad((y * y.detach().cos()).sum(), x)[0]

    return both


def check(function: Callable, x: Tensor, mesh: str, spec: str) -> gspmd.Plan:
    plan = gspmd.plan(
        function, x.clone(), mesh=gspmd.Mesh.parse(mesh), in_specs=spec, out_specs=(spec, spec)
    )
    assert_same(plan.simulate(x.clone(), _poison=True), function(x.clone()))
    return plan


@pytest.mark.parametrize("mesh, spec", LAYOUTS)
@pytest.mark.parametrize("name", PLANES)
def test_planes(name: str, mesh: str, spec: str) -> None:
    x = torch.randn(2, 3, 51, 33, generator=torch.Generator().manual_seed(0))
    plan = check(with_gradient(lambda x: F.interpolate(x, **PLANES[name])), x, mesh, spec)
    assert {c.kind for c in plan.collectives} <= {"permute"} and not plan.replicated_ops


@pytest.mark.parametrize("mesh, spec", [(m, f"{s} _") for m, s in LAYOUTS])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(x, size=(27, 8, 11), mode="trilinear"),
        lambda x: F.interpolate(x, scale_factor=(2, 1, 0.5)),
        lambda x: F.adaptive_avg_pool3d(x, (7, 4, 1)),
    ],
)
def test_volumes(function: Callable, mesh: str, spec: str) -> None:
    check(
        with_gradient(function),
        torch.randn(2, 2, 13, 7, 5, generator=torch.Generator().manual_seed(0)),
        mesh,
        spec,
    )


def adaptive_max(size: tuple) -> Callable:
    function = F.adaptive_max_pool2d if len(size) == 2 else F.adaptive_max_pool3d

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, index = function(x.requires_grad_(), size, return_indices=True)
        return y, index, torch.autograd.grad((y * y.detach().cos()).sum(), x)[0]

    return both


def same(got: tuple, want: tuple) -> None:
    """Indices exactly; NaN where NaN is."""
    assert torch.equal(got[1], want[1])
    for g, w in zip(got, want):
        assert torch.equal(g.isnan(), w.isnan())
        assert_same(g.nan_to_num(), w.nan_to_num())


@pytest.mark.parametrize("mesh, spec", LAYOUTS)
@pytest.mark.parametrize("size", [(17, 11), (16, 8), (51, 6), (60, 33), (51, 33)], ids=str)
@pytest.mark.parametrize("equals", [False, True])
def test_adaptive_max_pooling(size: tuple, mesh: str, spec: str, equals: bool) -> None:
    x = torch.randn(2, 3, 51, 33, generator=torch.Generator().manual_seed(0))
    if equals:
        x = x.round()
        x[0, 0, 40, 2] = x[0, 0, 41, 1] = torch.nan
    plan = gspmd.plan(
        function := adaptive_max(size),
        x,
        mesh=gspmd.Mesh.parse(mesh),
        in_specs=spec,
        out_specs=(spec,) * 3,
    )
    same(plan.simulate(x, _poison=True), function(x.clone()))
    assert {c.kind for c in plan.collectives} <= {"permute"} and not plan.replicated_ops


@pytest.mark.parametrize("mesh, spec", LAYOUTS)
def test_adaptive_max_pooling_to_one(mesh: str, spec: str) -> None:
    x = torch.randn(2, 3, 51, 33, generator=torch.Generator().manual_seed(0)).round()
    x[0, 0, 40, 2] = x[0, 0, 41, 1] = torch.nan
    whole = "_ _ _ _"
    plan = gspmd.plan(
        function := adaptive_max((1, 1)),
        x,
        mesh=gspmd.Mesh.parse(mesh),
        in_specs=spec,
        out_specs=(whole, whole, spec),
    )
    same(plan.simulate(x, _poison=True), function(x.clone()))
    assert {c.kind for c in plan.collectives} == {"all_reduce"} and not plan.replicated_ops


def test_adaptive_max_pooling_of_volumes() -> None:
    x = torch.randn(2, 13, 7, 5, generator=torch.Generator().manual_seed(0))
    plan = gspmd.plan(
        function := adaptive_max((6, 3, 1)),
        x,
        mesh=gspmd.Mesh(s=2, r=2),
        in_specs="_ s r _",
        out_specs=("_ s r _",) * 3,
    )
    assert_same(plan.simulate(x, _poison=True), function(x.clone()))
    assert {c.kind for c in plan.collectives} <= {"permute"} and not plan.replicated_ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 17, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    check(
        with_gradient(lambda x: F.interpolate(x, size=(40, 9), mode="bilinear")),
        x,
        "s=2",
        "_ _ s _",
    )


def test_bytes_of_an_image_are_rounded_as_pytorch_does() -> None:
    x = torch.randint(
        0, 256, (2, 3, 17, 11), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    plan = gspmd.plan(
        lambda x: F.interpolate(x, size=(40, 9), mode="bilinear"),
        x,
        mesh=gspmd.Mesh(s=2),
        in_specs="_ _ s _",
    )
    assert torch.equal(plan.simulate(x), F.interpolate(x, size=(40, 9), mode="bilinear"))


def test_the_graph_of_an_interpolation() -> None:
    x = torch.empty(1, 2, 32, device="meta")
    mesh = gspmd.Mesh(s=4)
    plan = gspmd.plan(
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
        x,
        mesh=mesh,
        in_specs="_ _ s",
        out_specs="_ _ s",
    )
    assert plan.text(full=True).splitlines()[1:5] == [
        "  %x                 : f32[1, 2, 32@s]                = input",
        "  %x_h               : f32[1, 2, 32@s[(16i-1)/2:+10]] = halo(%x, 2, s, (16i-1)/2:+10 in "
        "0:32 else 0, 32)",
        "  %upsample_linear1d : f32[1, 2, 64@s]                = upsample_linear1d(%x_h, [64], "
        "False, 2.0)",
        "  return %upsample_linear1d",
    ]
    assert plan.sent_bytes == 2 * 2 * 4  # a row of two channels to either side


def test_bands_are_the_weights() -> None:
    line = Line("upsample_bilinear2d", 1, 7, 12, False)
    first, last, band = bands(line, torch.float64)
    dense = torch.zeros(12, 7, dtype=torch.float64)
    for p, (row, end) in enumerate(zip(first.tolist(), last.tolist())):
        dense[p, row : end + 1] = band[p, : end + 1 - row]
    assert torch.equal(dense, weights(line, torch.float64)) and band.shape == (12, 2)


class Copies(TorchDispatchMode):
    """Counts copies to another device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_weights_are_copied_to_a_device_once() -> None:
    """A copy from the CPU makes the host wait for a GPU."""
    of = ("upsample_linear1d", 0, 7, 13, False, None, False, 2, 9, 1, 6)
    counts = []
    for _ in range(2):
        with Copies() as copies:
            results = band._init_fn(*of, 2, torch.float32, torch.device("meta"))
        counts.append(copies.count)
    assert counts[0] and not counts[1]
    kept = band(*of, 2, torch.float32, torch.device("cpu"))
    kept[1].zero_()  # a program writes over what it has
    again = band(*of, 2, torch.float32, torch.device("cpu"))
    assert again[1].any() and [r.shape for r in results] == [r.shape for r in again]
