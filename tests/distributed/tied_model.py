"""A small model with a tied word table, dropout, running statistics and uneven sizes, wrapped and
plain, and how the two are compared.
"""

import copy

import torch
import torch.nn.functional as F
from language_model import whole
from torch import nn

import torchgspmd as gspmd
from torchgspmd.rules.custom_ops.random import draw_seed, uniform

WORDS, WIDTH, HIDDEN = 51, 16, 65  # sizes that 2, 3 and 4 do not divide


class Model(nn.Module):
    """Tied embedding, dropout, a buffer that changes, uneven sizes."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.batch_norm = nn.BatchNorm1d(6)
        self.dropout = dropout

    drop = staticmethod(F.dropout)

    def forward(self, tokens, targets):  # [b, 6]
        x = self.embedding(tokens)  # [b, 6, m]
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)
        logits = self.batch_norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def dropout_of_one_device(x, p, training):
    """F.dropout with the numbers that a mesh of one device draws."""
    shape = list(x.shape)
    drawn = (
        uniform(draw_seed(), 0, shape, [0] * x.dim(), shape, torch.float32, x.device, False)
        if training
        else torch.zeros(shape)
    )
    return x * ((drawn < 1 - p) / (1 - p)) if training else x


def marked(model, mesh):
    if "model" not in mesh.names:
        return model
    for tensor, spec in (
        (model.embedding.weight, "model _"),
        (model.up.weight, "model _"),
        (model.up.bias, "model"),
        (model.down.weight, "_ model"),
    ):
        gspmd.mark_sharding(tensor, mesh, spec)
    return model


def batch(step, rows=7):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (2, rows, 6), generator=generator)


def close(a, b, tolerance=1e-5):
    a, b = whole(a).detach(), whole(b).detach()
    assert a.shape == b.shape and torch.isfinite(a).all(), (a.shape, b.shape)
    scale = max(b.abs().max().item(), 1e-6)
    assert (a - b).abs().max().item() <= tolerance * scale, (
        f"off by {(a - b).abs().max().item() / scale:.1e}"
    )


def pair(mesh, **options):
    torch.manual_seed(0)
    reference = Model(**options)
    model = gspmd.parallelize(marked(copy.deepcopy(reference), mesh), mesh, in_specs=specs(mesh))
    reference.drop = dropout_of_one_device
    return model, reference


def specs(mesh):
    return ("data _", "data _") if "data" in mesh.names else None
