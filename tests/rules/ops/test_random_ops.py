"""Random numbers: the same on every mesh, every device draws only its part, and the parts are as
random as the whole.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes.simulator import Simulator, split_global
from torchgspmd.rules.custom_ops.random import uniform

ONE = Mesh(m=1)
MESHES = [Mesh(m=2), Mesh(m=3), Mesh(a=2, m=2), Mesh(a=2, m=3)]
X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")

PROGRAMS = {
    "dropout": lambda x: F.dropout(x, 0.4) * 2,
    "rand": lambda x: x + torch.rand(7, 6),
    "rand_like": lambda x: x + torch.rand_like(x).sin(),
    "randn": lambda x: x + torch.randn(7, 6),
    "double": lambda x: x + torch.randn(7, 6, dtype=torch.float64),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "randint": lambda x: x + torch.randint(3, 90, (7, 6)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1) + x,
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2) + x,
    "exponential_": lambda x: torch.empty_like(x).exponential_() + x,
    "randperm": lambda x: x[torch.randperm(7)],
    "multinomial": lambda x: torch.multinomial(x.exp(), 3),
    "poisson": lambda x: torch.poisson(x.exp()),
    "two": lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 7, 2, 3).transpose(1, 2)] * 3, dropout_p=0.4
    ),
    "alpha": lambda x: (
        F.alpha_dropout(x, 0.3, True) + F.feature_alpha_dropout(x, 0.3, True) + F.dropout1d(x, 0.4)
    ),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


def drawn(f, mesh: Mesh, spec: str, *args, **options):
    torch.manual_seed(7)
    plan = gspmd.plan(f, *args, mesh=mesh, in_specs=spec, **options)
    return plan, plan.simulate(*args, _poison=True)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_same_on_every_mesh(name, mesh):
    want = drawn(PROGRAMS[name], ONE, "_ _", X)[1]
    for spec in ("m _", "_ m", "_ m+a" if "a" in mesh.names else "_ _"):
        assert_same(drawn(PROGRAMS[name], mesh, spec, X)[1], want, f"{name} {spec}")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_have_the_mask_of_the_forward(mesh):
    def f(w, x):
        y = F.dropout(x @ w, 0.5)
        return y, torch.autograd.grad(y.square().sum(), w)[0]

    w = torch.randn(6, 5, requires_grad=True)
    torch.manual_seed(7)
    want = gspmd.plan(f, w, X, mesh=ONE).simulate(w, X)
    torch.manual_seed(7)
    got = gspmd.plan(f, w, X, mesh=mesh, in_specs=("_ m", None)).simulate(w, X, _poison=True)
    assert_same(got, want, terms=1024)
    y, grad = got
    kept = (y != 0).double() * 2  # dropout divides by 1/2
    torch.testing.assert_close(
        grad.double(), 2 * X.double().mT @ (y.double() * kept), rtol=1e-4, atol=1e-4
    )


def test_a_part_is_drawn_without_the_rest():
    plan, _ = drawn(lambda x: F.dropout(x, 0.5), Mesh(m=4), "m _", torch.ones(64, 64))
    shapes = [n.args[2] for n in plan.program.graph.nodes if "keep_mask" in str(n.target)]
    assert shapes == [[16, 64]] and plan.collectives == ()


def test_seeds():
    f, x = PROGRAMS["dropout"], torch.ones(64, 64)
    plan = gspmd.plan(f, x, mesh=Mesh(m=2), in_specs="m _")
    torch.manual_seed(3)
    first, second = plan.simulate(x), plan.simulate(x)
    torch.manual_seed(3)
    again = plan.simulate(x)
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_native_numbers_differ_between_parts_and_agree_between_replicas():
    f, x = (lambda x: x * 0 + torch.rand(64, 8)), torch.ones(64, 8)
    plan, values = drawn(f, Mesh(a=2, m=2), "m _", x, advanced={"rng": "native"})
    assert not torch.equal(values[:32], values[32:])
    torch.manual_seed(7)
    parts = Simulator(plan.program, plan.mesh).run_devices(
        [split_global(x, plan.in_specs[0], plan.mesh)]
    )[0]
    places = [plan.mesh.coordinates(rank)["m"] for rank in range(4)]
    assert all(
        torch.equal(a, b) == (p == q) for a, p in zip(parts, places) for b, q in zip(parts, places)
    )


def test_parts_are_independent_and_uniform():
    """Means, variances and correlations of parts of one draw, of streams and of neighbouring seeds,
    in standard deviations.
    """
    n = 1 << 16
    parts = [
        uniform(
            torch.tensor(seed), stream, [n], [first], [n * 4], torch.float32, CPU, False
        ).double()
        - 0.5
        for seed in (5, 6, 5 + (1 << 32))
        for stream in (0, 1)
        for first in (0, n, 3 * n)
    ]
    for x in parts:
        assert abs(x.mean()) * (12 * n) ** 0.5 < 4 and abs(x.var() * 12 - 1) * (n / 0.8) ** 0.5 < 4
        for lag in (1, 2, 64, 1000):
            assert abs((x[lag:] * x[:-lag]).mean()) * 12 * n**0.5 < 4.5
        counts = torch.histc(x, 256, -0.5, 0.5)
        assert (
            abs(float(((counts - n / 256) ** 2 / (n / 256)).sum()) - 255) < 4.5 * (2 * 255) ** 0.5
        )
    for i, x in enumerate(parts):
        for y in parts[:i]:
            assert abs((x * y).mean()) * 12 * n**0.5 < 4.5


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_numbers_are_below_1(dtype):
    x = uniform(torch.tensor(1), 0, [1 << 18], [0], [1 << 18], dtype, CPU, False)
    assert (
        x.dtype == dtype
        and 0 <= float(x.min())
        and float(x.max()) < 1
        and abs(float(x.double().mean()) - 0.5) < 0.01
    )


def test_places_beyond_32_bits():
    far = [
        uniform(torch.tensor(1), 0, [1, 64], [row, 0], [1 << 40, 64], torch.float32, CPU, False)
        for row in (0, 1 << 26, 1 << 39)
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(far) for b in far[:i])


def test_one_number_decides_for_a_channel():
    x = torch.ones(4, 6, 9)
    y = drawn(lambda x: nn.Dropout1d(0.5)(x), Mesh(a=2, m=2), "a m _", x)[1]
    assert torch.equal(y, y[:, :, :1].expand_as(y)) and 0 < float((y == 0).float().mean()) < 1
