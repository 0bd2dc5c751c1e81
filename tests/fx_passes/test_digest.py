"""A program of any depth prints on a page; every name of the page can be explained."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)
MARKS = {
    "layers.*.[qkv].weight": "model _",
    "layers.*.out.weight": "_ model",
    "layers.*.up.weight": "model _",
    "layers.*.down.weight": "_ model",
    "head.weight": "model _",
}


class Layer(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.parts())
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))

    def parts(self):
        return self.q, self.k, self.v


class Decoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def plan_of(layers, **marks):
    tokens = torch.zeros(8, 4, dtype=torch.int64)
    model = gspmd.annotate(Decoder(layers), MESH, MARKS | marks)
    return gspmd.plan(model, tokens, tokens, mesh=MESH, in_specs="auto", grad=True)


def names(text):
    """Return the names in the first column of a page."""
    lines = text.split("\n\n")[0].splitlines()[1:]
    return [line.split()[0] for line in lines if line.startswith("  ") and "(outside" not in line]


@pytest.mark.parametrize("layers", [2, 12])
def test_a_decoder_of_any_depth_fits_a_page(layers):
    plan = plan_of(layers)
    lines = str(plan).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 120
    text = re.sub(" +", " ", str(plan))
    assert f"layers.*.down.weight x {layers} f32[16, 64@model]" in text
    assert f"layers.*.down x {layers} f32[8@data, 4, 16] all_reduce model 1.00 KiB" in text
    assert f"layers.*.norm1 x {layers} f32[8@data, 4, 16]\n" in text
    assert f"layers.*.up x {layers} all_reduce data 2.00 KiB" in text
    assert len(plan.text(full=True).splitlines()) > 100
    for name in names(str(plan)):
        assert plan.explain(name), name


def test_one_layer_with_another_layout_has_a_line_of_its_own():
    text = re.sub(" +", " ", str(plan_of(3, **{"layers.1.up.weight": "_ model"})))
    assert "layers.*.up.weight x 2 f32[64@model, 16]" in text
    assert "layers.1.up.weight f32[64, 16@model]" in text


def test_a_model_of_many_modules_is_joined():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.groups = nn.ModuleDict(
                {
                    f"group{'abcdefgh'[i]}": nn.ModuleDict(
                        {f"part{'abcdefgh'[j]}": nn.Linear(8, 8) for j in range(8)}
                    )
                    for i in range(8)
                }
            )

        def forward(self, x):
            for group in self.groups.values():
                for part in group.values():
                    x = torch.tanh(part(x))
            return x.square().mean()

    plan = gspmd.plan(Wide(), torch.ones(4, 8), mesh=MESH, in_specs="auto", grad=True)
    assert len(str(plan).splitlines()) <= 60
    assert {"groups.groupa.**", "groups.groupa"} <= {*names(str(plan))}
    assert all(plan.explain(name) for name in names(str(plan)))


def test_a_short_program_is_whole():
    plan = gspmd.plan(nn.Linear(8, 8), torch.ones(4, 8), mesh=MESH, in_specs="auto")
    assert str(plan) == plan.text(full=True) and "einsum" in str(plan)
