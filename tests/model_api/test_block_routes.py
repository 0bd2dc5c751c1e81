"""Loops over blocks that return and take more than one value, in stack and pipelines."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pipelined import EXACT, check_planned
from torch import nn

import torchgspmd as gspmd
from torchgspmd.layout.mark import raw_mark

WIDTH, LENGTH, BATCH = 4, 5, 8


class Mixed(nn.Module):
    """RWKV-7: the first layer's values are mixed into those of the others."""

    def __init__(self, number):
        super().__init__()
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x, first=None, **unused):
        value = self.value(x)
        first = value if first is None else first
        mixed = F.scaled_dot_product_attention(x, x, value + (first - value) * self.mix)
        return x + self.out(torch.tanh(mixed)), first


class Streams(nn.Module):
    """Two streams of different lengths, by keyword, returned in another order (MMDiT)."""

    def __init__(self, number):
        super().__init__()
        self.up, self.of_context = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, context, scale):
        both = torch.tanh(self.up(torch.cat([hidden, context], 1)))
        hidden = hidden + both[:, : hidden.shape[1]] * scale
        return context + self.of_context(hidden).mean(1, keepdim=True), hidden


class Biased(nn.Module):
    """T5: the first layer has a table, and computes a bias that all layers add."""

    def __init__(self, number):
        super().__init__()
        self.query, self.has_table = nn.Linear(WIDTH, WIDTH), number == 0
        if self.has_table:
            self.table = nn.Embedding(2 * LENGTH, 1)

    def forward(self, x, mask=None, bias=None):
        if bias is None:
            at = torch.arange(x.shape[1])
            table = self.table if self.has_table else None
            bias = table(at[:, None] - at + LENGTH).squeeze(-1)
        scores = self.query(x) @ x.mT + bias
        scores = scores if mask is None else scores + mask[:, None]
        return {"weights": scores.sigmoid(), "hidden": x + scores.softmax(-1) @ x, "bias": bias}


class Numbered(Biased):
    """The bias depends on no weight; the last value is None."""

    def forward(self, x, mask=None, bias=None):
        bias = torch.arange(LENGTH).to(x) / 8 if bias is None else bias
        return [x + torch.tanh(self.query(x) + bias[:, None]), bias, None]


class Longer(nn.Module):
    """The first layer has a norm, which reads the hidden values."""

    def __init__(self, number):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if number == 0 else None

    def forward(self, x):
        return x + torch.tanh(self.up(x if self.norm is None else self.norm(x)))


class Repeated(nn.Module):
    """An argument has rows for each batch row and head (Bloom's alibi)."""

    def __init__(self, number):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, alibi):
        heads = self.up(x).unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1)
        scores = (heads @ heads.mT + alibi).softmax(-1) @ heads
        return (x + scores.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2),)


def mixed(model, x):
    first = None
    for layer in model.layers:
        x, first = layer(x, first)
    return x


def by_number(model, x):
    first = None
    for i in range(len(model.layers)):
        x, first = model.layers[i](x, unused=None, first=first)
    return x


def streams(model, x):
    context = x.mean(1, keepdim=True)
    for layer in model.layers:
        context, x = layer(hidden=x, context=context, scale=model.scale)
    return x + context


def biased(model, x):
    bias, mask = None, x.sum(-1) / 8
    for layer in model.layers:
        found = layer(x, bias=bias, mask=mask)
        x, bias = found["hidden"], found["bias"]
    return x


def numbered(model, x):
    bias = None
    for layer in model.layers:
        x, bias, _ = layer(x, None, bias)
    return x


def plain(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


def repeated(model, x):
    alibi = x.sum(-1, keepdim=True).repeat_interleave(2, 0)
    for layer in model.layers:
        x = layer(x, alibi)[0]
    return x


def swapped(model, x):
    """Pass block 0's value on to block 2, where block 1 has left its own."""
    values = [None]
    for i, layer in enumerate(model.layers):
        x, value = layer(x, values[0] if i == 2 else values[-1])
        values = [value, value] if i == 0 else [values[0], value + 0]
    return x


class Model(nn.Module):
    def __init__(self, kind, loop, layers):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(map(kind, range(layers)))
        self.scale, self.loop = nn.Parameter(torch.tensor(0.7)), loop

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.loop(self, self.embed(x))).mean(1), labels)


def staged(model, make, mesh, **options):
    model = copy.deepcopy(model)
    if make == "stack":
        model.layers = gspmd.stack(model.layers)
    elif make == "pipeline":
        model.layers = gspmd.pipeline(model.layers, mesh, microbatches=4, **options)
    else:
        gspmd.pipeline_model(model, "layers", mesh, microbatches=4, schedule=make, **options)
    return model


def check(kind, loop, layers, make, mesh, **options):
    torch.manual_seed(0)
    model, mesh = Model(kind, loop, layers).double(), gspmd.Mesh.parse(mesh)
    x, labels = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randint(3, (BATCH,))
    expected = model(x, labels)
    expected.backward()
    other = staged(model, make, mesh, **options)
    assert other.state_dict().keys() == model.state_dict().keys()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x, labels), expected, **EXACT)
    check_planned(other, mesh, (x, labels), model, expected)
    return other


@pytest.mark.parametrize(
    "kind, loop, layers, make, mesh, options",
    [
        (Biased, biased, 2, "1f1b", "stage=2", {"rows": ("mask",)}),
        (Mixed, mixed, 4, "pipeline", "stage=2", {}),
        (Mixed, by_number, 5, "1f1b", "data=2,stage=2", {}),
        (Mixed, mixed, 4, "stack", "data=2", {}),
        (Mixed, mixed, 8, "zero_bubble", "stage=2", {"repeats": 2}),
        (Streams, streams, 4, "zero_bubble", "data=2,stage=2", {}),
        (Streams, streams, 3, "pipeline", "stage=2", {"recompute": True}),
        (Biased, biased, 5, "pipeline", "data=2,stage=2", {"rows": ("mask",)}),
        (Biased, biased, 4, "stack", "data=2", {}),
        (Biased, biased, 8, "1f1b", "stage=2", {"repeats": 2, "rows": ("mask",)}),
        (Numbered, numbered, 4, "1f1b", "stage=2", {}),
        (Longer, plain, 4, "1f1b", "stage=2", {}),
        (Repeated, repeated, 4, "1f1b", "data=2,stage=2", {"rows": ("alibi",)}),
        (Repeated, repeated, 2, "pipeline", "stage=2", {"rows": ("alibi",)}),
        (Mixed, swapped, 4, "1f1b", "stage=2", {}),
    ],
)
def test_values_between_blocks(kind, loop, layers, make, mesh, options):
    check(kind, loop, layers, make, mesh, **options)


def test_a_block_with_an_addition_is_in_the_others_slots():
    """T5 on as many stages as layers: the table is a parameter of its own, and no stage's."""
    mesh = gspmd.Mesh(stage=4)
    other = staged(Model(Biased, biased, 4), "1f1b", mesh, rows=("mask",))
    assert other.layers.slots == [[0, 1, 2, 3]] and other.layers.rows == (4,)
    names = dict(other.named_parameters())
    assert names["layers.own0.table.weight"].shape == (2 * LENGTH, 1)
    assert "layers.block.table.weight" not in names
    gspmd.annotate(other, gspmd.Mesh(stage=4, model=2), {"layers.0.table.weight": "model _"})
    assert str(raw_mark(names["layers.own0.table.weight"])[1]) == "model _"
    with pytest.raises(gspmd.ShardingError, match="modules that the others lack: .'norm'"):
        x = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(3, (BATCH,))
        gspmd.plan(staged(Model(Longer, plain, 4), "1f1b", mesh), *x, mesh=mesh, grad=True)


def test_on_one_stage_a_loop_is_pythons():
    """Nothing runs twice: an object that the blocks write to has each value once."""

    class Noting(Mixed):
        def forward(self, x, first=None, notes=()):
            notes.append(self.value(x))
            return x + self.out(notes[-1]) * len(notes), first

    def noting(model, x):
        notes = []
        for layer in model.layers:
            x, _ = layer(x, notes=notes)
        return x

    check(Noting, noting, 2, "1f1b", "stage=1")


def kept(model, x):
    """Read a block's results behind the loop."""
    return mixed(model, x) + model.layers[0](x)[1]


def transposed(model, x):
    x = x.transpose(0, 1)
    for layer in model.layers:
        x = layer(x)
    return x.transpose(0, 1)


def twice(model, x):
    return plain(model, plain(model, x))


@pytest.mark.parametrize(
    "kind, loop, words",
    [
        (Longer, transposed, "the layers take 5 rows, and no argument of the model has as many"),
        (Longer, twice, "calls layers that are stages of a pipeline a second time"),
        (Mixed, kept, "calls layers|in a loop over blocks|second time"),
    ],
)
def test_loops_that_are_errors(kind, loop, words):
    """Without a mesh they run as Python runs them."""
    torch.manual_seed(0)
    model, mesh = Model(kind, loop, 4).double(), gspmd.Mesh(stage=2)
    x, labels = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randint(3, (BATCH,))
    other = staged(model, "1f1b", mesh)
    torch.testing.assert_close(other(x, labels), model(x, labels))
    with pytest.raises(gspmd.ShardingError, match=words):
        gspmd.plan(other, x, labels, mesh=mesh, grad=True)


def test_a_program_grows_with_no_layer():
    sizes = {}
    for layers in (3, 9):
        model = staged(Model(Biased, biased, layers), "stack", gspmd.Mesh(data=2))
        x = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(3, (BATCH,))
        plan = gspmd.plan(model, *x, mesh=gspmd.Mesh(data=2), grad=True)
        sizes[layers] = len(plan.program.graph.nodes)
    assert sizes[9] == sizes[3]


def again(model, x):
    """ALBERT: one layer, for all of the model's depth."""
    for _ in range(5):
        x = model.layers[0](x)
    return x


def again_with_numbers(model, x):
    first = None
    for _ in range(4):
        x, first = model.layers[0](x, first)
    return x


@pytest.mark.parametrize(
    "kind, loop, make, mesh, options",
    [
        (Longer, again, "1f1b", "stage=2", {}),
        (Mixed, again_with_numbers, "1f1b", "data=2,stage=2", {}),
        (Longer, again, "zero_bubble", "data=2,stage=2", {"repeats": 2}),
    ],
)
def test_a_lone_layer_that_is_called_again(kind, loop, make, mesh, options):
    """All stages have its weights, whose gradients are added up once a step."""
    other = check(kind, loop, 1, make, mesh, **options)
    assert all(w.shape[0] == 1 for w in other.layers.weights()[0].values())
