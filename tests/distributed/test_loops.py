"""Loops on real processes: layers in a loop, in a loop over microbatches; loops that values end."""

from unittest.mock import patch

import torch
from ranks import distributed
from tied_model import close
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.nn import functional as F

import torchgspmd as gspmd
from torchgspmd.runtime.compile_graph import CompiledPiece

LAYERS, WIDTH = 3, 6


def layer(h, weights):
    up, down = weights
    return h + F.gelu(F.layer_norm(h, (WIDTH,)) @ up) @ down, h.sum()


class Layers(nn.Module):
    """The loss of microbatches x [m, b, s, d], one after the other."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(LAYERS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(LAYERS, 2 * WIDTH, WIDTH) / 3)

    def forward(self, x):
        def microbatch(total, rows):
            h, _ = scan(layer, rows, (self.up, self.down))
            return total + h.square().mean(), h.sum()

        return scan(microbatch, x.new_zeros(()), x)[0]

    def by_hand(self, x):
        """The same by loops of Python."""
        total = x.new_zeros(())
        for h in x:
            for weights in zip(self.up, self.down):
                h, _ = layer(h, weights)
            total = total + h.square().mean()
        return total


@distributed("data=2", "data=2,model=2")
def test_layers_in_microbatches(mesh):
    check_layers(mesh, "torch")


def check_layers(mesh, backend):
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 6, 5, WIDTH)
    expected = model.by_hand(x)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    if "model" in mesh.names:
        gspmd.annotate(model, mesh, {"up": "_ _ model", "down": "_ model _"})
    else:
        gspmd.annotate(model, mesh, {"up": "_ data _", "down": "_ _ data"})
    model = gspmd.parallelize(model, mesh, in_specs=("_ data _ _",), backend=backend)
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        close(loss, expected)
        loss.backward()
        for name, p in model.named_parameters():
            close(p.grad, gradients[name])


class Branches(nn.Module):
    """As many layers as values say, each with one of two activations."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x):
        def body(y):
            y = y @ self.weight * 0.5
            return (torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.tanh() * 0.9, (y,)),)

        return while_loop(lambda y: y.square().sum() > 1, body, (x,))[0].sum()

    def by_hand(self, y):
        """The same by `while` and `if`."""
        while y.square().sum() > 1:
            y = y @ self.weight * 0.5
            y = y.sin() if y.sum() > 0 else y.tanh() * 0.9
        return y.sum()


@distributed("data=2", "data=2,model=2")
def test_branches_and_loops_that_values_end(mesh):
    check_branches(mesh, "torch")


@distributed("data=2")
def test_inductor_compiles_the_body_of_a_loop(mesh):
    compiled = []

    def record(piece, inputs):
        compiled.extend(str(node.target) for node in piece.program.graph.nodes)
        return lambda boxed: piece.program(*boxed)  # as Inductor, without its C++

    with patch.object(CompiledPiece, "_compile", record):
        check_layers(mesh, "inductor")
    for op in ("aten.gelu.default", "aten.gelu_backward.default"):
        assert 0 < compiled.count(op) <= 3, "in the first, the last and all other iterations"
    check_branches(mesh, "inductor")


def check_branches(mesh, backend):
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(4, 6)
    if "model" in mesh.names:
        gspmd.annotate(model, mesh, {"weight": "_ model"})
    sharded = gspmd.parallelize(model, mesh, in_specs="data _", backend=backend)
    for scale in (1, -1, 3):
        weight = sharded.weight.full_tensor().detach().requires_grad_()
        reference = Branches()
        reference.weight = nn.Parameter(weight)
        expected = reference.by_hand(x * scale)
        expected.backward()
        sharded.zero_grad()
        loss = sharded(x * scale)
        close(loss, expected)
        loss.backward()
        close(sharded.weight.grad, reference.weight.grad)


class Sigmoid(nn.Module):
    """The loss of all pairs of images and texts (features/pairs)."""

    def __init__(self):
        super().__init__()
        self.image = nn.Parameter(torch.randn(5, 2))
        self.text = nn.Parameter(torch.randn(4, 2))

    def forward(self, x, y):
        labels = 2 * torch.eye(len(x)) - 1
        return -F.logsigmoid(labels * ((x @ self.image) @ (y @ self.text).T)).sum() / len(x)


@distributed("data=2", "data=4")
def test_a_loss_of_all_pairs(mesh):
    torch.manual_seed(0)
    model, x, y = Sigmoid(), torch.randn(22, 5), torch.randn(22, 4)
    expected = model(x, y)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    blocks = {"costs": {"pair_bytes": 0}}
    wrapped = gspmd.parallelize(model, mesh, in_specs=("data _", "data _"), advanced=blocks)
    loss = wrapped(x, y)
    loss.backward()
    close(loss, expected)
    for name, p in wrapped.named_parameters():
        close(p.grad, gradients[name])
