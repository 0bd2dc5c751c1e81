"""In-place and out variants, views that are written to, every type, tensors without elements or
dimensions, sizes below the axis.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same

import torchgspmd as gspmd

MESH = gspmd.Mesh(a=2, b=3)


def r(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def views_written(x):
    y = x[1:3]
    y.mul_(2)
    x.add_(1)
    x[:, 0] = 5
    x.t()[1].fill_(3)
    return x.view(-1)[::2]


def given_results(x):
    first, second = torch.empty_like(x), torch.empty(0)
    torch.sin(x, out=first)
    torch.add(x, 1, out=first[:])
    torch.mul(x, 2, out=second)
    return first, second, torch.matmul(x, x.mT, out=torch.empty(6, 6))


def assigned(x, y):
    x[1:4, 0:2] = y
    return x * 1


PADS_TO_NOTHING = torch.__version__ >= (2, 10)  # 2.9 refuses a negative pad that leaves no rows
SHAPES = {
    "views written to": (views_written, ("a b",), r(6, 4)),
    "out=": (given_results, ("a b",), r(6, 4)),
    "assigned slice": (assigned, ("a b", "_ a"), r(6, 4), r(3, 2)),
    "index_put_": (
        lambda x, i, y: x.index_put_((i,), y, accumulate=True),
        ("a b", "_", "_ b"),
        r(6, 4),
        torch.tensor([0, 2, 2]),
        r(3, 4),
    ),
    "scatter_": (
        lambda x, i, y: x.scatter_(0, i, y),
        ("a b", None, None),
        r(6, 4),
        torch.tensor([[0, 1, 2, 3]]),
        r(1, 4),
    ),
    "chain of in-place operations": (
        lambda x: x.masked_fill_(x > 0, 0).clamp_(-1).relu_(),
        ("a b",),
        r(6, 4),
    ),
    "copy_ of another type": (lambda x, y: x.copy_(y), ("a b", "b a"), r(6, 4), ints(6, 4)),
    "lerp_ addcmul_ addcdiv_": (
        lambda x, y: x.lerp_(y, 0.3).addcmul_(y, y, value=2).addcdiv_(y, y + 9),
        ("a b", "b a"),
        r(6, 4),
        r(6, 4, seed=1).abs(),
    ),
    "foreach": (
        lambda x, y: [
            *torch._foreach_add([x, y], 1.0),
            *torch._foreach_mul([x, y], [y, x]),
            *torch._foreach_norm([x, y]),
        ],
        ("a b", "b a"),
        r(6, 4),
        r(6, 4, seed=1),
    ),
    "views of a parameter": (
        lambda w: (w[:2].t() @ w[2:4]).sum() + w.view(-1)[3],
        ("b a",),
        r(6, 4),
    ),
    "no rows": (
        lambda x: (
            x.sum(0),
            x * 2,
            x.mT @ x,
            torch.cat([x, x]),
            x.amax(1),
            x.view(4, 0),
            x.softmax(1),
            x.any(),
            x.all(0),
        ),
        ("a b",),
        torch.empty(0, 4),
    ),
    "no columns": (
        lambda x: (x.sum(1), x @ x.mT, x.prod(1), x.mean(0)),
        ("a b",),
        torch.empty(6, 0),
    ),
    "no dimensions": (
        lambda x: (
            x.sin(),
            x.sum(),
            x.view(1),
            x.expand(3, 4),
            x.unsqueeze(0),
            torch.stack([x, x]),
            x.softmax(0),
            x.cumsum(0),
            x.sort()[0],
            x.max(),
        ),
        ("",),
        torch.tensor(2.0),
    ),
    "sizes below the axis": (
        lambda x: (
            x.sum(),
            x.softmax(0),
            x.cumsum(1),
            x @ x.mT,
            x.flip(0),
            x.sort(1)[0],
            torch.cat([x, x], 1),
            x[0],
            x.roll(1, 0),
            x.topk(1)[0],
            x.mean(),
            x.std(),
        ),
        ("a b",),
        r(2, 2),
    ),
    "size 1": (
        lambda x: (x.sum(), x.softmax(0), x.cumsum(1), x @ x.mT, x.flip(0), x.mean(0)),
        ("b a",),
        r(1, 2),
    ),
    "cut to nothing": (
        lambda x: (
            F.pad(x, [-1, -2 if PADS_TO_NOTHING else -1, 1, 1]) + 1,
            x.narrow(1, 2, 0),
            F.pad(x[:0], [0, 0, 1, 2]),
            x[:, 3:],
        ),
        ("a b",),
        r(5, 3),
    ),
    "small convolution": (
        lambda x, w: F.conv2d(x, w, padding=1),
        ("_ _ a b", "b _ _ _"),
        r(1, 2, 2, 2),
        r(3, 2, 3, 3),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_numbers_and_arguments_are_those_of_one_device(name):
    f, specs, *tensors = SHAPES[name]
    plan = gspmd.plan(f, *tensors, mesh=MESH, in_specs=specs)
    ours, theirs = ([t.clone() for t in tensors] for _ in range(2))
    assert_same(plan.simulate(*ours, _poison=True), f(*theirs), name)
    assert_same(ours, theirs, f"{name}: arguments")


def floating(x):
    return (
        x @ x.mT,
        x.softmax(0),
        x.sum(0),
        x.logsumexp(1),
        F.gelu(x),
        F.layer_norm(x, (4,)),
        x.amax(0),
        x.cumsum(0),
        x.sort(0)[0],
    )


def integral(x):
    return (
        x + x,
        x * 3,
        x // 3,
        x % 2,
        x & 3,
        x << 1,
        x >> 1,
        x.sum(0),
        x.prod(1),
        x.cumsum(0),
        x.amax(0),
        x.max(1),
        x.argsort(0),
        x.flip(0),
    )


def complex_numbers(x):
    return (
        (x * (1 + 2j)).abs().sum(0),
        x @ x.mT.conj(),
        x.real + x.imag,
        torch.fft.fft(x, dim=0),
        x.cumsum(1),
        x.angle(),
    )


TYPES = {
    **dict.fromkeys([torch.float64, torch.float32], floating),
    **dict.fromkeys([torch.int64, torch.int32, torch.int16, torch.int8], integral),
    torch.uint8: integral,
    torch.complex64: complex_numbers,
    torch.complex128: complex_numbers,
    torch.bool: lambda x: (
        x.any(0),
        x.all(1),
        x.sum(),
        x | ~x,
        x.cumsum(0),
        x.float(),
        x.logical_xor(x[:1]),
    ),
    **dict.fromkeys(
        [torch.bfloat16, torch.float16],
        lambda x: (x * 2, x.sin(), x.amax(0), x.flip(1), x.to(torch.float32).sum(0)),
    ),
}


@pytest.mark.parametrize("spec", ["a b", "_ a+b"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(dtype, spec):
    x = (
        ints(7, 4, dtype=dtype)
        if not (dtype.is_floating_point or dtype.is_complex)
        else torch.complex(r(7, 4), r(7, 4, seed=1)).to(dtype)
        if dtype.is_complex
        else r(7, 4).to(dtype)
    )
    plan = gspmd.plan(TYPES[dtype], x, mesh=MESH, in_specs=spec)
    assert_same(plan.simulate(x, _poison=True), TYPES[dtype](x), str(dtype))
    assert [r.op for r in plan.replicated_ops if r.why.startswith("no rule")] == []
