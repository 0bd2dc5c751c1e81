"""Layers of several kinds in stack, pipeline and pipeline_model: masks, numbers, weights, arguments
of their own."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd.layout.mark import raw_mark
from torchgspmd.model_api.block_groups import find_repeats, find_slots

WIDTH, LENGTH, BATCH = 4, 6, 8
EXACT = {"rtol": 1e-9, "atol": 1e-12}  # float64


class Layer(nn.Module):
    """Attention and a feed-forward, or experts: each kind has a window, a scale and a width."""

    def __init__(self, number, kind):
        super().__init__()
        self.number, self.kind = number, kind  # the former is read by none
        self.scale = 1.0 + "abc".index(kind) / 4 if kind in "abc" else 0.5
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "m":
            self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 2)
        else:
            self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x, mask=None, bias=None):
        q = self.query(x)[:, None]
        mask = None if mask is None else mask[:, None]
        y = F.scaled_dot_product_attention(q, q, self.value(x)[:, None], mask)[:, 0]
        x = x + y * self.scale if bias is None else x + y * self.scale + bias
        if self.kind == "m":
            return x + torch.einsum("bse,neh->bsh", x, self.experts).tanh()
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Masks by kind. own: "bias": each layer has a table; "shift": a row for each batch row."""

    def __init__(self, kinds, own=""):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Layer(i, kind) for i, kind in enumerate(kinds))
        self.own, self.kinds = own, kinds
        self.biases = nn.Parameter(torch.randn(len(kinds), LENGTH, WIDTH))

    def forward(self, x, labels):
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        masks = {"a": causal, "b": causal & ~causal.tril(-2), "c": ~causal.tril(-3)}
        masks = {kind: mask.expand(len(x), LENGTH, LENGTH) for kind, mask in masks.items()}
        x = self.embed(x)
        shift = x.mean(1, keepdim=True)
        for number, layer in enumerate(self.layers):
            bias = self.biases[number] if self.own == "bias" else None
            bias = shift if self.own == "shift" else bias
            x = layer(x, masks.get(self.kinds[number]), bias=bias)
        return F.cross_entropy(self.head(x).mean(1), labels)


def gradients_by_layer(model, gradients):
    """Return gradients by the names of the model's state_dict."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    return model.state_dict()


def staged(model, make, mesh, rows, **options):
    model = copy.deepcopy(model)
    if make == "stack":
        model.layers = gspmd.stack(model.layers)
    elif make == "pipeline":
        model.layers = gspmd.pipeline(model.layers, mesh, microbatches=4, rows=rows, **options)
    else:
        options = {"schedule": make, **options}
        gspmd.pipeline_model(model, "layers", mesh, microbatches=4, rows=rows, **options)
    return model


def check(kinds, make, mesh, own="", **options):
    torch.manual_seed(0)
    model, mesh = Model(kinds, own).double(), gspmd.Mesh.parse(mesh)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.double)
    labels = torch.randint(3, (BATCH,))
    expected = model(x, labels)
    expected.backward()
    rows = ("mask", "bias") if own == "shift" else ("mask",)
    other = staged(model, make, mesh, rows, **options)
    torch.testing.assert_close(other(x, labels), expected, **EXACT)
    specs = ("data _ _", "data") if "data" in mesh.names else None
    plan = gspmd.plan(other, x, labels, mesh=mesh, in_specs=specs, grad=True)
    found, gradients = plan.simulate(x, labels)
    torch.testing.assert_close(found, expected.detach(), **EXACT)
    gradients = gradients_by_layer(other, gradients)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, **EXACT, msg=name)
    return other


@pytest.mark.parametrize(
    "kinds, make, mesh, options",
    [
        ("abababab", "stack", "stage=2", {}),
        ("amambm", "stack", "data=2", {}),
        ("aabaabaa", "1f1b", "stage=2", {}),
        ("dmmmmm", "pipeline", "stage=2", {}),
        ("dmdmdm", "zero_bubble", "stage=3", {}),
        ("aaabaaaba", "pipeline", "data=2,stage=2", {}),
        ("dammammamm", "1f1b", "data=2,stage=2", {}),
        ("abababab", "pipeline", "stage=2", {"repeats": 2}),
        ("daaaa", "pipeline", "stage=2", {"recompute": True}),
        ("daaaaaaa", "1f1b", "stage=2", {"repeats": 2}),
        ("abababab", "zero_bubble", "stage=2", {"repeats": 2}),
    ],
)
def test_kinds(kinds, make, mesh, options):
    """A group of two, of three with a remainder, a first layer of its own, weights of two kinds."""
    check(kinds, make, mesh, **options)


@pytest.mark.parametrize(
    "kinds, make", [("ababa", "stack"), ("aaaa", "pipeline"), ("aaaaa", "1f1b")]
)
def test_arguments_of_each_layer(kinds, make):
    """A parameter's row for each layer is one of the loop's rows, and has its gradient."""
    check(kinds, make, "stage=2", own="bias")


@pytest.mark.parametrize("make", ["pipeline", "1f1b", "zero_bubble"])
def test_rows_of_arguments_that_need_a_gradient(make):
    """They pass from stage to stage, and each stage adds to their gradient."""
    check("abab", make, "data=2,stage=2", own="shift")


def test_weights_have_a_stack_for_each_shape():
    model = gspmd.stack(Model("dmmdmm").layers)
    names = dict(model.named_parameters())
    assert names["block.up.weight"].shape == (2, 6, WIDTH)
    assert names["block1.experts"].shape == (4, 3, WIDTH, WIDTH)
    assert model.state_dict().keys() == Model("dmmdmm").layers.state_dict().keys()
    assert model.get_submodule("4").kind == "m" and [*model][3].kind == "d"
    other = gspmd.stack(Model("dmmdmm").layers)
    other.load_state_dict(model.state_dict())
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)
    gspmd.annotate(other, gspmd.Mesh(model=2), {"*.experts": "_ _ model"})
    assert str(raw_mark(other.block1.experts)[1]) == "_ _ _ model"


def test_a_program_grows_with_the_group_alone():
    sizes = {}
    for groups in (2, 6):
        model = staged(Model("aab" * groups), "stack", gspmd.Mesh(stage=2), None)
        x, labels = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(3, (BATCH,))
        plan = gspmd.plan(model, x, labels, mesh=gspmd.Mesh(data=2), grad=True)
        sizes[groups] = len(plan.program.graph.nodes)
    assert sizes[6] == sizes[2]


def test_kinds_that_do_not_repeat_are_an_error():
    mesh = gspmd.Mesh(stage=4)
    with pytest.raises(gspmd.ShardingError, match="blocks 0 and 1 of a pipeline differ"):
        gspmd.pipeline(Model("dmdm").layers, mesh, microbatches=2)  # each stage would have both
    with pytest.raises(gspmd.ShardingError, match="blocks 0 and 1 of a stack differ"):
        gspmd.stack(Model("dm").layers)
    layers = Model("aaaa").layers
    for i, layer in enumerate(layers):
        layer.scale = float(i)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(gspmd.ShardingError, match="read scale, which differs: 0.0, 1.0, 2.0, 3.0"):
        gspmd.plan(gspmd.stack(layers), x, mesh=mesh)


def groups_by_hand(items):
    """The most items that a loop saves, by trying each."""
    size = range(len(items) + 1)
    tries = ((b, p, c) for p in size[1:] for c in size[2:] for b in size if b + p * c <= len(items))
    return max(
        (p * (c - 1) for b, p, c in tries if items[b : b + p * c] == items[b : b + p] * c),
        default=0,
    )


def test_groups_and_slots_of_random_layers():
    rng = random.Random(3)
    for _ in range(200):
        group = [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        kinds = [rng.randrange(3)] * rng.randrange(2) + group * rng.randint(1, 4) + group[:1]
        found = find_repeats(kinds)
        assert found.saved == groups_by_hand(kinds)
        inside = kinds[found.before : found.end]
        assert inside == kinds[found.before :][: found.period] * found.count
        stages = rng.randint(1, 5)
        slots = find_slots(kinds, stages, len(kinds))
        assert [slots.kinds[slot] for _, slot in slots.places] == kinds
        assert sorted(set(slots.places)) == [*slots.places]  # in order, each slot once
        assert len(slots.kinds) >= -(-len(kinds) // stages) and slots.places[-1][0] < stages
        if len(set(kinds)) == 1:
            assert len(slots.kinds) == -(-len(kinds) // stages)
