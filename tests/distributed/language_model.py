"""A small model with a word table and two products, wrapped and plain, and their comparison."""

import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd

WORDS = 11  # which no mesh divides
OFFSET = 1.0


class Options:
    def __init__(self):
        self.scale, self.inner = 1.0, SimpleNamespace(power=1)


class Model(nn.Module):
    sign = 1

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = (
            nn.Embedding(WORDS, 16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )
        self.head, self.dropout = nn.Linear(16, WORDS), nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(WORDS))
        self.temperature, self.scales, self.options = 1.0, [1.0, 2.0], Options()

    def forward(self, tokens):  # [b, s]
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        x = x * self.options.scale**self.options.inner.power * OFFSET
        return (
            self.sign * self.dropout(self.head(x)) / self.temperature * self.scales[1] + self.shift
        )

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


class Counting(Model):
    """Every rank plans it: a plan that changes a number is not shared."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        return super().forward(tokens)


def tokens(step=0, rows=6):
    return torch.randint(WORDS, (rows, 5), generator=torch.Generator().manual_seed(step))


def pair(mesh, kind=Model):
    """A wrapped module, and the same on one process."""
    torch.manual_seed(0)
    reference = kind()
    model, axis = copy.deepcopy(reference), mesh.names[-1]
    gspmd.annotate(
        model,
        mesh,
        {
            "embedding.weight": f"{axis} _",
            "up.weight": f"{axis} _",
            "up.bias": axis,
            "down.weight": f"_ {axis}",
        },
    )
    return gspmd.parallelize(model, mesh), reference


def loss_of(model, step=0, rows=6):
    return F.cross_entropy(model(tokens(step, rows)).flatten(0, 1), tokens(step, rows).flatten())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(whole(a).detach(), whole(b).detach(), rtol=tolerance, atol=tolerance)


def same_gradients(model, reference):
    for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            close(p.grad, q.grad)


def same_parameters(model, reference, tolerance=1e-5):
    for p, q in zip(model.parameters(), reference.parameters()):
        close(p, q, tolerance)


def error_of(call):
    try:
        call()
    except gspmd.ShardingError as error:
        return str(error)
    raise AssertionError("no error")
