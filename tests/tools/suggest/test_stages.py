"""Layers in stages: suggest tries them, and its code gives its numbers and a right step."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Hardware, Mesh
from torchgspmd.comm.hardware import Link
from torchgspmd.tools.suggest import candidates, search
from torchgspmd.tools.suggest.judge import Judge
from torchgspmd.tools.suggest.proposal import Marks

WORDS, WIDTH, LENGTH, ROWS = 32, 64, 16, 16
# All messages cost much, so a stage that sends activations alone is the fastest.
SLOW_LINKS = Hardware("links", {4: 1e9}, 1e12, 1e9, (Link(8, 5e6, 1e-6),), launch=0.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, turned=False, layers=4):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.turned = turned

    def forward(self, tokens, labels):
        x = self.table(tokens)
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def wrapped(found, model):
    """Return the model and the options that a proposal's code passes to parallelize."""
    options = {}

    def keep(model, mesh, **given):
        options.update(given, mesh=mesh)
        return model

    names = {"gspmd": gspmd, "model": model, "keep": keep}
    exec(found.code.replace("gspmd.parallelize(", "keep("), names)
    for name, parameter in names["model"].named_parameters():
        # As parallelize does, and as a pipeline marks its stacked weights.
        is_stacked = ".block." in name
        if name.replace(".block.", ".*.") not in found.marks:
            spec = ["stage"] * is_stacked + ["_"] * (parameter.dim() - is_stacked)
            gspmd.mark_sharding(parameter, options["mesh"], " ".join(spec))
    return names["model"], options


def batch():
    return tuple(torch.randint(WORDS, (2, ROWS, LENGTH)))


def search_of(model, arguments, limit=1e9):
    """Return a search without a time limit, before it has tried a mesh."""
    judge = Judge(model, arguments, {}, SLOW_LINKS)
    return search.Search(judge, limit, 0.0, 0.0, math.inf)


def test_stages_are_fastest_on_slow_links():
    options = {"devices": 2, "hardware": SLOW_LINKS, "seconds": 600}
    proposals = gspmd.suggest(Net(), batch(), **options)
    found = proposals[0]
    assert found.mesh.count(("stage",)) == 2 and 'pipeline_model(model, "layers"' in found.code
    assert "extrapolated" not in str(found)
    others = [each for each in proposals if "stage" not in each.mesh.names]
    assert others and all(each.seconds > found.seconds for each in others)


MARKS = Marks(model=(("layers.*.down.weight", 1), ("layers.*.up.weight", 0)), zero=True)


@pytest.mark.parametrize("mesh", ["stage=4,data=1,model=1", "stage=2,data=2,model=2"])
@pytest.mark.parametrize("memory", [1e9, 1e5])
def test_code_gives_its_numbers(mesh, memory):
    torch.manual_seed(0)
    model, (tokens, labels) = Net(), batch()
    tried = search_of(model, (tokens, labels), memory)
    tried.deadline = math.inf
    mesh = Mesh.parse(mesh)
    assert [*tried._staged(mesh, MARKS.on(mesh))]
    found = tried.best()[0]
    assert ("recompute=True" in found.code) == (memory < 1e9), found.code
    expected = model(tokens, labels)
    expected.backward()
    staged, given = wrapped(found, model)
    plan = gspmd.plan(staged, tokens, labels, grad=True, **given)
    assert plan.sent_bytes == pytest.approx(found.sent_bytes)
    assert plan.estimate(SLOW_LINKS).seconds == pytest.approx(found.seconds)
    loss, gradients = plan.simulate(tokens, labels)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients["table.weight"], model.table.weight.grad)


def test_layers_that_are_no_chain_are_not_in_stages():
    tried = search_of(Net(turned=True), batch())
    tried.deadline = math.inf
    tried._try_stages(Mesh(data=4, model=1), Marks())
    assert not tried.tried


def test_meshes_and_microbatches():
    meshes = list(candidates.staged(Mesh(data=4, model=2), 6))
    assert meshes == [
        Mesh(stage=2, data=2, model=2),
        Mesh(stage=4, data=1, model=2),
    ]
    assert candidates.of_stages(Mesh(stage=2, data=2), 48) == [8, 4, 16]
    assert candidates.of_stages(Mesh(stage=4), 6) == [6]
    assert candidates.of_stages(Mesh(stage=8), 4) == []
