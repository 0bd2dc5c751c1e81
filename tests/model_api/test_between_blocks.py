"""Loops over blocks that compute between two blocks, and keep values for behind the loop."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from pipelined import EXACT, check_planned
from torch import nn

import torchgspmd as gspmd

WIDTH, LENGTH, BATCH = 4, 5, 8

# What a loop does with block i's argument x, result y and second value v: a new x. `kept` is read
# behind the loop, and adds to the loss.
DOES = {
    "residual": lambda m, i, x, y, v, kept: x + y,
    "scaled": lambda m, i, x, y, v, kept: m.scale[i] * x + m.other[i] * y,
    "first": lambda m, i, x, y, v, kept: y + m.other[i] * m.entered,
    "number": lambda m, i, x, y, v, kept: x + 0.5**i * y,
    "norm": lambda m, i, x, y, v, kept: m.norm(x + y),
    "some": lambda m, i, x, y, v, kept: y + m.mix[i // 2](x) if i in (1, 2) else y,
    "one": lambda m, i, x, y, v, kept: y + torch.tanh(m.conv(x.mT).mT) if i == 0 else y,
    "losses": lambda m, i, x, y, v, kept: (kept.append(v.mean()), y)[1],
    "total": lambda m, i, x, y, v, kept: (kept.append(v.mean() + sum(kept)), y)[1],
    "states": lambda m, i, x, y, v, kept: (kept.append(y.square()), y)[1],
    "every other": lambda m, i, x, y, v, kept: (kept.append(y) if i % 2 else None, y)[1],
    "skips": lambda m, i, x, y, v, kept: (
        (kept.append(y), y)[1] if i < m.count // 2 else y + m.scale[i] * kept.pop()
        if kept else y
    ),
    "rows": lambda m, i, x, y, v, kept: y + m.entered * (i + 1) if i else y,
    "dense": lambda m, i, x, y, v, kept: (kept.append(y), sum(kept) / len(kept))[1],
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.number = number

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return y, y.square().flatten(0, 1)


class Model(nn.Module):
    def __init__(self, does, count):
        super().__init__()
        self.layers, self.count = nn.ModuleList(map(Block, range(count))), count
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.scale, self.other = (nn.Parameter(torch.rand(count)) for _ in range(2))
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.does = does

    def forward(self, x, labels):
        x = self.entered = self.embed(x)
        kept = {name: [] for name in self.does}
        for i, layer in enumerate(self.layers):
            before, (x, v) = x, layer(x)
            for name in self.does:
                x = DOES[name](self, i, before, x, v, kept[name])
        self.entered = None
        loss = F.cross_entropy(self.head(x).mean(1), labels)
        for values in kept.values():
            loss = loss + sum(value.mean() for value in values) / 8
        return loss


def draws(count):
    """Draw a loop's work, its number of layers, its stages, the mesh, and options."""
    found = []
    for seed in range(count):
        draw = random.Random(seed)
        does = draw.sample([*DOES], draw.choice([1, 1, 2]))
        make = draw.choice(["1f1b", "zero_bubble", "gpipe", "dualpipev", "pipeline", "stack"])
        repeats = {"dualpipev": [2], "gpipe": [1], "stack": [1]}.get(make, [1, 1, 2])
        mesh = draw.choice(["stage=2", "data=2,stage=2", "stage=2,model=2"])
        layers = draw.choice([4, 5]) if repeats != [2] else 4
        found.append((does, layers, make, "data=2" if make == "stack" else mesh,
                      draw.choice(repeats), draw.random() < 0.5))  # fmt: skip
    return found


@pytest.mark.parametrize("does, layers, make, mesh, repeats, is_stored", draws(40), ids=str)
def test_a_loop_that_computes_between_blocks(does, layers, make, mesh, repeats, is_stored):
    torch.manual_seed(0)
    model, mesh = Model(does, layers).double(), gspmd.Mesh.parse(mesh)
    x, labels = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randint(3, (BATCH,))
    expected = model(x, labels)
    expected.backward()
    other = copy.deepcopy(model)
    if make == "stack":
        other.layers = gspmd.stack(other.layers)
    elif make == "pipeline":
        options = {"microbatches": 4, "repeats": repeats}
        other.layers = gspmd.pipeline(other.layers, mesh, **options)
    else:
        options = {"microbatches": 4, "schedule": make, "repeats": repeats}
        gspmd.pipeline_model(other, "layers", mesh, **options)
    torch.testing.assert_close(other(x, labels), expected, **EXACT)
    if "model" in mesh.names:
        gspmd.annotate(other, mesh, {"layers.*.up.weight": "model _"})
    elif "data" in mesh.names and is_stored:  # ZeRO
        gspmd.annotate(other, mesh, {"layers.*.up.weight": "data _"})
    check_planned(other, mesh, (x, labels), model, expected)


class Noting(Block):
    """A user of hooks: its value is noted, and another hook changes it."""

    def __init__(self, number):
        super().__init__(number)
        self.inner = nn.Identity()

    def forward(self, x):
        return self.inner(super().forward(x)[0]), x


@pytest.mark.parametrize("make", ["1f1b", "stack"])
def test_hooks_note_values_of_each_block(make):
    torch.manual_seed(0)
    kept = []

    class Hooked(Model):
        def forward(self, x, labels):
            kept.clear()
            loss = super().forward(x, labels)
            return loss + sum((value * i).square().mean() for i, value in enumerate(kept))

    model = Hooked([], 4).double()
    model.layers = nn.ModuleList(map(Noting, range(4))).double()
    for layer in model.layers:
        layer.inner.register_forward_hook(note := lambda module, args, y: kept.append(y))
        layer.inner.register_forward_hook(change := lambda module, args, y: y * 0.5)
    assert note and change
    x, labels = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randint(3, (BATCH,))
    expected = model(x, labels)
    expected.backward()
    mesh, other = gspmd.Mesh.parse("data=2" if make == "stack" else "stage=2"), model
    gradient, row = model.layers[1].up.weight.grad, 1
    if make == "stack":
        other.layers = gspmd.stack(model.layers)
    else:
        gspmd.pipeline_model(other, "layers", mesh, microbatches=2, schedule=make)
        row = other.layers.place(1)
    plan = gspmd.plan(other, x, labels, mesh=mesh, grad=True)
    found, gradients = plan.simulate(x, labels)
    torch.testing.assert_close(found, expected.detach(), **EXACT)
    torch.testing.assert_close(gradients["layers.block.up.weight"][row], gradient, **EXACT)


class Setting(Block):
    def forward(self, x):
        self.loss = x.mean()
        return super().forward(x)


def test_values_in_attributes():
    """A tensor in a block's attribute is an error. The loop's attributes end with the step."""
    torch.manual_seed(0)
    x, labels = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(3, (BATCH,))
    mesh = gspmd.Mesh(stage=2)

    class Logging(Model):
        def forward(self, x, labels):
            self.norms = []
            x = self.embed(x)
            for layer in self.layers:
                x, value = layer(x)
                self.norms.append(value.detach().norm())
            return F.cross_entropy(self.head(x).mean(1), labels)

    model = Logging([], 4)
    expected = copy.deepcopy(model)(x, labels)
    gspmd.pipeline_model(model, "layers", mesh, microbatches=4, schedule="1f1b")
    found, _ = gspmd.plan(model, x, labels, mesh=mesh, grad=True).simulate(x, labels)
    torch.testing.assert_close(found, expected.detach())
    model = Model([], 4)
    model.layers = nn.ModuleList(map(Setting, range(4)))
    gspmd.pipeline_model(model, "layers", mesh, microbatches=4, schedule="1f1b")
    with pytest.raises(gspmd.ShardingError, match="sets its attribute 'loss' to a tensor"):
        gspmd.plan(model, x, labels, mesh=mesh, grad=True)


def by_keys(model, x):
    for name in model.layers:
        x = x + model.layers[name](x)[0]
    return x


def by_items(model, x):
    for _, layer in model.layers.items():
        x = layer(x)[0]
    return x


@pytest.mark.parametrize("loop", [by_keys, by_items])
def test_layers_in_a_dict(loop):
    torch.manual_seed(0)

    class OfDict(Model):
        def forward(self, x, labels):
            return F.cross_entropy(self.head(loop(self, self.embed(x))).mean(1), labels)

    model, mesh = OfDict([], 4).double(), gspmd.Mesh(stage=2)
    names = [*map(str, range(4))]
    model.layers = nn.ModuleDict(zip(names, model.layers))
    x, labels = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randint(3, (BATCH,))
    expected = model(x, labels)
    other = copy.deepcopy(model)
    other.layers = nn.ModuleDict({f"layer{name}": model.layers[name] for name in names})
    with pytest.raises(gspmd.ShardingError, match="have the names .'layer0', 'layer1'"):
        gspmd.pipeline_model(other, "layers", mesh, microbatches=2)
    gspmd.pipeline_model(model, "layers", mesh, microbatches=2, schedule="1f1b")
    torch.testing.assert_close(model(x, labels), expected, **EXACT)
    found, _ = gspmd.plan(model, x, labels, mesh=mesh, grad=True).simulate(x, labels)
    torch.testing.assert_close(found, expected.detach(), **EXACT)
