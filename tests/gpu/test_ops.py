"""Each custom operation on the card computes its numbers of the CPU in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_same
from samples import SAMPLES
from torch import Tensor
from torch.utils._pytree import tree_map

import torchgspmd.features.tables  # noqa: F401 (registers the operations)
from torchgspmd.features.attention import op as attention_op
from torchgspmd.features.attention.op import zigzag_attention, zigzag_attention_backward
from torchgspmd.features.experts import op as experts
from torchgspmd.features.windows.interpolate import band
from torchgspmd.rules.custom_ops.nd import ctc_losses, einsum
from torchgspmd.rules.custom_ops.random import DRAW_SEED, DRAW_SEEDS, Shard, dropout_mask, uniform
from torchgspmd.rules.custom_ops.updates import adam_, rate
from torchgspmd.rules.ops.cumulative import suffix_scan

ours = torch.ops.torchgspmd
DRAWS = (ours.uniform.default, ours.keep_mask.default)  # their seeds are numbers of the CPU
FLOATS = (torch.float32, torch.bfloat16)
# Of the norm of a result: products of bfloat16 round to 2^-8, and attention has three in a row.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Place(NamedTuple):
    """Where a case computes, and in which type. Numbers are drawn on the CPU."""

    device: torch.device
    dtype: torch.dtype

    def rand(self, *shape: int, seed: int = 0) -> Tensor:
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.dtype).to(self.device)

    def put(self, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).to(self.device)


def assert_near(case: Callable[[Place], Any], device: torch.device, dtype: torch.dtype) -> None:
    """Compare a case on the device with float64 on the CPU, from operands rounded alike."""
    got = case(Place(device, dtype))
    with torch.no_grad():
        want = case(_Exact(torch.device("cpu"), torch.float64, dtype))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, (i, a.shape, b.shape)
        a, b = a.detach().cpu().double(), b.double()
        assert torch.equal(a.isfinite(), b.isfinite()), (i, "other places are infinite")
        a, b = (x.where(b.isfinite(), 0) for x in (a, b))
        error = (a - b).norm() / b.norm().clamp(min=1e-6)
        assert error < TOLERANCE[dtype], (i, float(error))


class _Exact(Place):
    """A place for float64 whose operands were rounded to another type before."""

    def __new__(cls, device: torch.device, dtype: torch.dtype, rounded: torch.dtype) -> Any:
        self = super().__new__(cls, device, dtype)
        self.rounded = rounded
        return self

    def rand(self, *shape: int, seed: int = 0) -> Tensor:
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.rounded).to(self.dtype)


# -------------------------------------------------------------------------------------- attention

HEADS = {"as_many": (4, 4), "groups": (8, 2), "one": (4, 1)}
MASKS = ("none", "causal", "bool", "added", "region", "odd")


def attention_case(mask: str, heads: tuple[int, int], width: int, s: int = 80, t: int = 96) -> Any:
    def case(at: Place) -> list[Tensor]:
        q_rows, k_rows = (t, t) if mask in ("causal", "region") else (s, t)
        if mask == "odd":
            q_rows, k_rows = 77, 91
        q = at.rand(2, heads[0], q_rows, width, seed=1)
        k, v = (at.rand(2, heads[1], k_rows, width, seed=seed) for seed in (2, 3))
        grad = at.rand(2, heads[0], q_rows, width, seed=4)
        seen: Tensor | None = None
        if mask in ("bool", "odd"):
            draw = torch.Generator().manual_seed(5)
            shown = torch.rand(2, 1, q_rows, k_rows, generator=draw) > 0.3
            shown[0, :, 3] = False  # a query that sees nothing
            seen = at.put(shown)
        elif mask == "added":
            seen = at.rand(1, heads[0], q_rows, k_rows, seed=5)
        region = (t, t // 2, 2 * t - 8, 2 * t - 8) if mask == "region" else None
        causal, scale = mask in ("causal", "region"), 1 / math.sqrt(width)
        out, lse = attention_op.attention(q, k, v, causal, scale, seen, region)
        grads = attention_op.attention_backward(
            grad, q, k, v, out, lse, causal, scale, seen, region
        )
        return [out, lse, *grads]

    return case


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", (64, 128, 40))
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_attention(
    mask: str, heads: tuple[int, int], width: int, dtype: torch.dtype, device: torch.device
) -> None:
    assert_near(attention_case(mask, heads, width), device, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zigzag_attention(dtype: torch.dtype, device: torch.device) -> None:
    def case(at: Place) -> list[Tensor]:
        q = at.rand(2, 4, 32, 64, seed=1)
        k, v = (at.rand(2, 4, 64, 64, seed=seed) for seed in (2, 3))
        region = (32, 0, 64, 64)
        out, lse = zigzag_attention(q, k, v, 0.125, 2, region)
        grad = at.rand(*out.shape, seed=4)
        return [out, lse, *zigzag_attention_backward(grad, q, k, v, out, lse, 0.125, 2, region)]

    assert_near(case, device, dtype)


@pytest.mark.parametrize("p", (0.1, 0.5))
def test_attention_with_dropout(p: float, device: torch.device) -> None:
    def case(at: Place) -> list[Tensor]:
        q, k, v, grad = (at.rand(2, 4, 48, 32, seed=seed) for seed in range(4))
        seed = torch.tensor(1234567890123)
        options = (True, 0.2, None, None, seed, p)
        out, lse = attention_op.attention(q, k, v, *options)
        return [out, lse, *attention_op.attention_backward(grad, q, k, v, out, lse, *options)]

    assert_near(case, device, torch.float32)


# ---------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("ends", ([5, 5, 20, 32], [0, 0, 0, 0], [3, 9, 9, 24]))
@pytest.mark.parametrize("dtype", (*FLOATS, torch.float16))
def test_grouped_products(ends: list[int], dtype: torch.dtype, device: torch.device) -> None:
    def case(at: Place) -> list[Tensor]:
        x, w, y = at.rand(32, 64, seed=1), at.rand(4, 64, 48, seed=2), at.rand(32, 48, seed=3)
        rows = at.put(ends)
        return [experts.grouped_mm(x, w, rows), experts.grouped_outer(x, y, rows)]

    assert_near(case, device, dtype)


@pytest.mark.parametrize("groups", (0, 4))
@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_of_groups(groups: int, dtype: torch.dtype, device: torch.device) -> None:
    def case(at: Place) -> list[Tensor]:
        x, w = at.rand(24, 16, seed=1), at.rand(2, 2, 16, 32, seed=2)
        index = torch.randint(4, (24,), generator=torch.Generator().manual_seed(3))
        ends = at.put(index if groups else index.bincount(minlength=4).cumsum(0))
        xs = experts.take_blocks(x, ends, 2, groups)
        ys = experts.block_mm(xs, w, ends, 2, groups)
        outer = experts.block_outer(xs, ys, ends, 2, groups)
        return [experts.put_blocks(ys, ends, 2, groups), outer]

    assert_near(case, device, dtype)


# ------------------------------------------------------------------------------------- the others


@pytest.mark.parametrize("dtype", FLOATS)
def test_einsum(dtype: torch.dtype, device: torch.device) -> None:
    def case(at: Place) -> list[Tensor]:
        x, y = at.rand(3, 8, 64, seed=1), at.rand(64, 3, 4, 16, seed=2)
        return [einsum("bsm,mcnd->bscnd", x, y), einsum("bsm,mbcd->bscd", x, y)]

    assert_near(case, device, dtype)


def test_suffix_scan(device: torch.device) -> None:
    assert_near(lambda at: [suffix_scan(at.rand(5, 33), 1, "cumsum")], device, torch.float32)


@pytest.mark.parametrize("decoupled", (True, False))
@pytest.mark.parametrize("lr", (1e-3, torch.tensor(1e-3)), ids=("number", "tensor"))
def test_adam(decoupled: bool, lr: Any, device: torch.device) -> None:
    """The kernel of the card takes the rate that a program gives it."""

    def case(at: Place) -> list[Tensor]:
        p, g, m = (at.rand(4, 33, seed=seed) for seed in range(3))
        v, step = at.rand(4, 33, seed=3).abs(), at.put(3.0, torch.float32)
        given = at.put(lr) if isinstance(lr, Tensor) else lr
        options = 0.9, 0.999, 0.01, 1e-8, decoupled, False
        adam_([p], [g], [m], [v], step, rate(given, step), *options)
        return [p, m, v]

    assert_near(case, device, torch.float32)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("whole", ((64, 1000), (7, 3, 11), (70000, 70000)))
def test_random_bits_are_those_of_the_cpu(
    whole: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    shape, first = [min(n, 40) for n in whole], [max(0, n - 40) for n in whole]
    seed = torch.tensor(987654321987654321)
    drawn = [
        uniform(seed, 1, shape, first, whole, dtype, where, False).cpu()
        for where in (device, torch.device("cpu"))
    ]
    assert torch.equal(*drawn) and 0 <= drawn[0].min() and drawn[0].max() < 1
    masks = [
        dropout_mask(seed, 0.3, Shard(shape, first, whole), where).cpu()
        for where in (device, torch.device("cpu"))
    ]
    assert torch.equal(*masks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="seeds on a card are those of graphs")
def test_seeds_of_a_graph_lie_on_the_card(device: torch.device) -> None:
    options = 0, [40, 9], [3, 1], [64, 10], torch.float32
    seed = torch.tensor(987654321987654321)
    there = uniform(seed.to(device), *options, device, False)
    assert torch.equal(there.cpu(), uniform(seed, *options, torch.device("cpu"), False))


def test_band(device: torch.device) -> None:
    line = ("upsample_bilinear2d", 0, 9, 20, False, None, False)
    options = (*line, 4, 8, 0, 9, 2, torch.float32)
    for got, want in zip(band(*options, device), band(*options, torch.device("cpu"))):
        assert torch.equal(got.cpu(), want)


def test_ctc_losses(device: torch.device) -> None:
    def case(at: Place) -> list[Tensor]:
        log_probs = at.rand(20, 3, 6).log_softmax(-1)
        targets = at.put(torch.randint(1, 6, (3, 5), generator=torch.Generator().manual_seed(1)))
        sizes = at.put([20, 18, 12]), at.put([5, 4, 3])
        return [*ctc_losses(log_probs, targets, *sizes, 0, False)]

    assert_near(case, device, torch.float32)


def test_room_of_experts(device: torch.device) -> None:
    counts = torch.tensor([3, 5], device=device)
    assert torch.equal(experts.within(counts, 5, None), counts)


def _samples() -> list[Any]:
    """Return the samples of our operations that the rules are proven with."""
    return [
        pytest.param(target, make, id=f"{target.name()}-{i}")
        for target, cases in SAMPLES.items()
        if target.namespace == "torchgspmd"
        for i, make in enumerate(cases)
        if target is not ours.uniform.default or not make()[0][-1]  # native: bits of the device
    ]


@pytest.mark.parametrize("target, make", _samples())
def test_samples(target: Any, make: Callable[[], Any], device: torch.device) -> None:
    args, kwargs = make()

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        stays = not isinstance(value, Tensor) or target in DRAWS and value.dim() == 0
        return value if stays else value.to(device)

    there = tree_map(moved, (args, kwargs))
    got, want = (target(*a, **k) for a, k in (there, (args, kwargs)))
    if target in (DRAW_SEED, DRAW_SEEDS):
        return
    assert_same(tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, got), want)
