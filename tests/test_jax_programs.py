"""The programs of JAX's documentation on shard_map and on scans over microbatches, in PyTorch.

The numbers are those of one device; a device sends at most what the collectives of the page send.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan

import torchgspmd as gspmd
from torchgspmd import Mesh, collectives

SIZES = [784, *[128] * 5, 8]  # of the multilayer perceptron
BATCH, N = 32, 8


def reduced(elements, n):
    return 2 * (n - 1) / n * elements * 4


def gathered(elements, n):
    return (n - 1) / n * elements * 4


@pytest.mark.parametrize(
    "mesh, specs, out, most",
    (
        ("x=4,y=2", ("x y", "y _"), "x _", reduced(2 * 4, 2)),
        ("i=8", ("i _", "_ i"), "_ i", gathered(8 * 16, N)),
        ("i=8", ("_ i", "i _"), "i _", gathered(8 * 16, N)),
    ),
)
def test_products(mesh, specs, out, most):
    """psum over y; gather of the first operand; scatter of partial sums."""
    a, b = torch.randn(8, 16), torch.randn(16, 4 if "x" in mesh else 16)
    mesh = Mesh.parse(mesh)
    plan = gspmd.plan(torch.matmul, a, b, mesh=mesh, in_specs=specs, out_specs=out)
    torch.testing.assert_close(plan.simulate(a, b), a @ b)
    assert plan.sent_bytes <= most


def test_a_product_that_gathers_rows_in_a_loop():
    """Blocks of the first operand travel round; each is multiplied when it comes by."""
    mesh, a, b = Mesh(i=N), torch.randn(16, 16), torch.randn(16, 8)

    def product(a, b):  # a [2, 16], b [16, 1]
        index, rows, blocks = collectives.axis_index("i"), a, []
        for step in range(N):
            blocks.append(rows @ b)
            rows = collectives.permute(rows, "i", 1) if step < N - 1 else rows
        ours = torch.stack(blocks)  # of devices index, index - 1, ...
        order = (index - torch.arange(N)) % N
        return ours[order].flatten(0, 1)

    run = gspmd.manual(product, mesh, ("i _", "_ i"), "_ i", axes=("i",))
    plan = gspmd.plan(run, a, b, mesh=mesh, in_specs=("i _", "_ i"), out_specs="_ i")
    torch.testing.assert_close(plan.simulate(a, b), a @ b)
    assert plan.sent_bytes == (N - 1) * 2 * 16 * 4


def test_a_product_that_scatters_sums_in_a_loop():
    """A sum of one block of rows travels round; each device adds its part."""
    mesh, a, b = Mesh(i=N), torch.randn(16, 16), torch.randn(16, 8)

    def product(a, b):  # a [16, 2], b [2, 8]
        index, rows = collectives.axis_index("i"), a.unflatten(0, (N, -1))
        total = torch.zeros(2, 8)
        for step in range(N):
            part = rows[((index - 1 - step) % N).reshape(1)][0] @ b
            total = (collectives.permute(total, "i", 1) if step else total) + part
        return total

    run = gspmd.manual(product, mesh, ("_ i", "i _"), "i _", axes=("i",))
    plan = gspmd.plan(run, a, b, mesh=mesh, in_specs=("_ i", "i _"), out_specs="i _")
    torch.testing.assert_close(plan.simulate(a, b), a @ b)
    assert plan.sent_bytes == (N - 1) * 2 * 8 * 4


class Perceptron(nn.Module):
    def __init__(self, marks=None, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*each) for each in zip(SIZES, SIZES[1:]))
        if marks:
            gspmd.annotate(self, mesh, {f"layers.*.{name}": mark for name, mark in marks.items()})

    def forward(self, x, targets):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return (self.layers[-1](x) - targets).square().sum(-1).mean()


WEIGHTS = sum(a * b + b for a, b in zip(SIZES, SIZES[1:]))
ROWS = sum(SIZES[1:])  # results of all layers, of an example


@pytest.mark.parametrize(
    "mesh, marks, spec, most",
    (
        ("batch=8", None, "batch _", reduced(WEIGHTS + 1, 8)),
        # gathered in the forward and again in the backward, then scattered
        (
            "batch=8",
            {"weight": "_ batch", "bias": "batch"},
            "batch _",
            3 * gathered(WEIGHTS, 8) + reduced(1, 8),
        ),
        # sums of each layer's results are scattered, and gathered in the backward
        (
            "feats=8",
            {"weight": "_ feats", "bias": "feats"},
            "_ feats",
            2 * gathered(BATCH * ROWS, 8) + reduced(1, 8),
        ),
        (
            "batch=4,feats=2",
            {"weight": "_ batch+feats", "bias": "batch+feats"},
            "batch feats",
            3 * gathered(WEIGHTS / 2, 4) + 2 * gathered(BATCH / 4 * ROWS, 2) + reduced(2, 8),
        ),
    ),
    ids=("data", "fully sharded", "tensor", "both"),
)
def test_a_perceptron(mesh, marks, spec, most):
    mesh = Mesh.parse(mesh)
    model, x, targets = Perceptron(marks, mesh), torch.randn(BATCH, 784), torch.randn(BATCH, 8)
    loss = model(x, targets)
    loss.backward()
    plan = gspmd.plan(model, x, targets, mesh=mesh, in_specs=(spec, spec), grad=True)
    result, gradients = plan.simulate(x, targets)
    torch.testing.assert_close(result, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert plan.sent_bytes <= most


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_microbatches_are_reduced_once():
    """A scan over microbatches around a scan over layers, weights whole on all devices."""
    mesh, layers, width = Mesh(data=4), 3, 16

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(layers, width, width) / 4)

        def forward(self, x):  # [microbatches, batch, width]
            def layer(h, weight):
                return torch.tanh(h @ weight), h.new_zeros(())

            def one(total, rows):
                return total + scan(layer, rows, self.weight)[0].square().sum(), rows.sum()

            return scan(one, x.new_zeros(()), x)[0]

    model, x = Model(), torch.randn(5, 8, width)
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="_ data _", grad=True)
    assert plan.sent_bytes == reduced(layers * width * width + 1, 4)
    assert [c.count for c in plan.collectives] == [1, 1]  # outside both loops: the loss, the weight
    h = x
    for weight in model.weight:
        h = torch.tanh(h @ weight)
    h.square().sum().backward()
    gradient = plan.simulate(x)[1]["weight"]
    torch.testing.assert_close(gradient, model.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("microbatches", (4, 8))
def test_a_pipeline(microbatches):
    """Batch and results are divided over the stages; one activation goes on in each tick.

    The page's devices also pass round what they have of the batch and of the results, each time
    that all of its microbatches have been begun.
    """
    mesh, stages, width, rows = Mesh(stage=4), 4, 16, 8
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(stages)]
    model = gspmd.pipeline(blocks, mesh, microbatches=microbatches)
    x = torch.randn(microbatches * rows, width)
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="stage _", out_specs="stage _")
    torch.testing.assert_close(plan.simulate(x), nn.Sequential(*blocks)(x))
    ticks, of_a_device = microbatches + stages - 1, microbatches // stages
    passed_on = ticks + 2 * (ticks // of_a_device) * of_a_device
    assert plan.sent_bytes <= passed_on * rows * width * 4
