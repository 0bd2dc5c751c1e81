"""Rows around the end of a sharded dimension: one halo exchange round the ring, there and back."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same

import torchgspmd as gspmd

RING = gspmd.Mesh(cols=8)
GRID = gspmd.Mesh(rows=2, cols=4)


def padded(x, before, behind):
    return F.pad(x, (before, behind) + (0, 0) * (x.dim() - 3), mode="circular")


def written(x, before, behind):
    """The same pad as users write it."""
    front, back = x[..., x.shape[-1] - before :], x[..., :behind]
    return torch.cat([piece for piece in (front, x, back) if piece.shape[-1]], -1)


def planets(x, w, pad=padded):
    """A residual block of a weather model: circular along longitude, zeros at the poles."""
    reach = w.shape[-1] // 2
    zeros = (0, 0) + (reach, reach) * (x.dim() - 3)
    return x + torch.tanh(F.conv3d(F.pad(pad(x, reach, reach), zeros), w))


def levels(x, w):
    return planets(torch.stack([*x.unbind(2)], 2), w)


def zeros_first(x, w):
    return F.conv3d(padded(F.pad(x, (0, 0, 1, 1, 1, 1)), 1, 1), w)


def step_of(function):
    def step(x, w, dy):
        y = function(x, w)
        return y.detach(), *torch.autograd.grad(y, (x, w), dy)

    return step


def tensors(columns=64, kernel=3, rows=8, levels=4):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "requires_grad": True}
    x, w = torch.randn(2, 3, levels, rows, columns, **options), (3, 3, *[kernel] * 3)
    return x, torch.randn(w, **options), torch.randn_like(x.detach())


def halo_bytes(mesh, x, reach):
    """Return bytes of the columns for both neighbors, and of the rows for the neighbor there is."""
    count = dict(mesh.axes)
    rows, columns = x.shape[-2] // count.get("rows", 1), x.shape[-1] // count["cols"]
    beside = reach * (columns + 2 * reach) if "rows" in count else 0
    return x[..., 0, 0].numel() * 8 * (2 * reach * rows + beside)


@pytest.mark.parametrize("mesh", [RING, GRID], ids=str)
@pytest.mark.parametrize(
    ("function", "kernel", "convolutions"),
    [
        (planets, 3, 1),
        (planets, 5, 1),
        (levels, 3, 1),
        (zeros_first, 3, 1),
        (lambda x, w: planets(x, w, written), 3, 1),
        (lambda x, w: planets(planets(x, w), w), 3, 2),
    ],
)
def test_a_convolution_round_the_globe_sends_halos_alone(function, kernel, convolutions, mesh):
    args = tensors(kernel=kernel)
    spec = "_ _ _ rows cols" if mesh is GRID else "_ _ _ _ cols"
    step = step_of(function)
    plan = gspmd.plan(step, *args, mesh=mesh, in_specs=(spec, None, spec))
    # Besides, the weight's gradient is summed.
    sent = sum(c.sent_bytes * c.count for c in plan.collectives if c.kind != "all_reduce")
    assert sent == 2 * convolutions * halo_bytes(mesh, args[0], kernel // 2), plan
    assert_same(plan.simulate(*args, _poison=True), step(*args))


@pytest.mark.parametrize("seed", range(24))
def test_other_pads_strides_and_sizes(seed):
    """Pads at one end, strides, dilations, groups, uneven shards, halos larger than a shard, and
    pads whose gradient is no convolution's alone.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kernel, stride, dilation = draw.randint(1, 5), draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2))
    columns, groups = draw.choice((12, 18, 19, 24)), draw.choice((1, 2))
    before = draw.randint(0, dilation * (kernel - 1))
    behind = dilation * (kernel - 1) - before if draw.random() < 0.7 else draw.randint(0, 4)
    pad = draw.choice((padded, written))
    between = draw.choice((torch.Tensor.contiguous, torch.Tensor.contiguous, torch.sin))

    def function(x, w):
        y = between(pad(x, before, behind))
        options = {"stride": (1, stride), "dilation": (1, dilation), "groups": groups}
        return F.conv2d(y, w, padding=(1, 0), **options)

    x = torch.randn(2, 4, 6, columns, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4 // groups, 3, kernel, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(function(x, w).detach())
    step, mesh = step_of(function), draw.choice((gspmd.Mesh(s=3), gspmd.Mesh(s=2, t=2)))
    spec = "_ _ _ s" if len(mesh.axes) == 1 else "_ _ s t"
    plan = gspmd.plan(step, x, w, dy, mesh=mesh, in_specs=(spec, None, spec))
    assert_same(plan.simulate(x, w, dy, _poison=True), step(x, w, dy))


def test_both_dimensions_go_around():
    """As on a torus, by nn.Conv2d(padding_mode="circular")."""
    conv = torch.nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular", bias=False).double()

    def function(x, w):
        return torch.func.functional_call(conv, {"weight": w}, (x,))

    x = torch.randn(2, 3, 8, 16, dtype=torch.float64, requires_grad=True)
    args = (x, conv.weight, torch.randn(2, 3, 8, 16, dtype=torch.float64))
    mesh, spec, step = gspmd.Mesh(rows=2, cols=2), "_ _ rows cols", step_of(function)
    plan = gspmd.plan(step, *args, mesh=mesh, in_specs=(spec, None, spec))
    # Two rows with 8 columns and two columns with 6 rows, 6 numbers each.
    sent = sum(c.sent_bytes for c in plan.collectives if c.kind != "all_reduce")
    assert sent == 2 * 6 * 8 * (2 * 4 + 2 * 10), plan
    assert_same(plan.simulate(*args, _poison=True), step(*args))


def joined(x):
    """Rows around the end, and rows that only look like it."""
    return (
        torch.cat([x[3:], x[:3]]),
        torch.cat([x[2:], x]),
        torch.cat([x, x[:4]]),
        torch.cat([x, x, x[:1]]),
        torch.cat([x[4:], x[:3]]),
        torch.cat([x[3:], x[1:3]]),
        torch.cat([x[:3], x[3:]]),
        torch.cat([x[3:], x[:3].flip(0)]),
        torch.cat([x[3:], x.sin()[:3]]),
        torch.cat([x[1:2], x[2:5]]),
        torch.cat([x[:, 1:], x[:, :1]], 1),
        torch.cat([x[3:], x[:3]], 1),
    )


@pytest.mark.parametrize("count", [2, 3])
def test_joined_rows(count):
    x = torch.randn(6, 5, dtype=torch.float64)
    plan = gspmd.plan(joined, x, mesh=gspmd.Mesh(s=count), in_specs="s _")
    assert_same(plan.simulate(x, _poison=True), joined(x))


def test_a_pad_of_nothing_is_a_tensor_of_its_own():
    def step(x):
        y = F.pad(x, (0, 0), mode="circular")
        y.add_(1)
        return x, y

    x = torch.randn(2, 3, 8)
    plan = gspmd.plan(step, x, mesh=gspmd.Mesh(s=2), in_specs="_ _ s")
    assert_same(plan.simulate(x.clone()), step(x.clone()))
