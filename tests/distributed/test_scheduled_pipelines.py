"""Pipelines whose loss is a part of them, on real processes."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from ranks import distributed
from tied_model import close
from torch import nn
from torch.nn import functional as F

import torchgspmd as gspmd
from torchgspmd.comm.hardware import Link

WIDTH = 4
SCHEDULES = [
    ("zero_bubble", 2),  # the first and the last guard
    ("gpipe", 1),
    ("1f1b", 1),
    ("zero_bubble", 1),
    ("1f1b", 2),
    ("dualpipev", 2),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding and head are tied; the head is in the loss of the pipeline."""

    def __init__(self, blocks):
        super().__init__()
        self.embed, self.blocks = nn.Parameter(torch.randn(5, WIDTH)), blocks

    def loss(self, y, tokens):
        return F.cross_entropy((y @ self.embed.T).flatten(0, 1), tokens.flatten())

    def forward(self, tokens):
        x = self.embed[tokens]
        if not isinstance(self.blocks, nn.ModuleList):
            return self.blocks(x, tokens=tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens)


@pytest.mark.parametrize("schedule, repeats", SCHEDULES)
@distributed("stage=2", "stage=4", "stage=2,model=2")
def test_schedules(mesh, schedule, repeats):
    torch.manual_seed(0)
    count = 2 * mesh.count(("stage",))
    alone = Model(nn.ModuleList(Block() for _ in range(count)))
    tokens = torch.randint(5, (8, 3))
    expected = alone(tokens)
    expected.backward()
    model = copy.deepcopy(alone)
    if "model" in mesh.names:
        marks = {"up.weight": "model _", "down.weight": "_ model"}
        for block in model.blocks:
            gspmd.annotate(block, mesh, marks)
    blocks = gspmd.pipeline(
        model.blocks,
        mesh,
        microbatches=count,
        repeats=repeats,
        schedule=schedule,
        loss=model.loss,
    )
    model.blocks = blocks
    wrapped = gspmd.parallelize(model, mesh)
    for _ in range(2):
        wrapped.zero_grad()
        loss = wrapped(tokens)
        close(loss, expected)
        loss.backward()
        for name, p in wrapped.named_parameters():
            rows = name.removeprefix("blocks.block.")
            if rows == name:
                close(p.grad, alone.get_parameter(name).grad)
                continue
            for layer in range(count):
                gradient = alone.get_parameter(f"blocks.{layer}.{rows}").grad
                close(p.grad.full_tensor()[blocks.place(layer)], gradient)


class Plain(nn.Module):
    """A forward that knows no pipeline."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


# Messages take as long as a dozen operations, so pairs of dualpipev are one program.
SLOW = replace(gspmd.Hardware.of("a100"), links=(Link(math.inf, 25e9, 50e-6),))


@pytest.mark.parametrize("schedule", ("dualpipev", "1f1b"))
@distributed("stage=2,model=2")
def test_a_model_as_it_is(mesh, schedule):
    torch.manual_seed(0)
    alone = Plain(8).double()  # loops over the layers of a stage
    model = copy.deepcopy(alone)
    model = gspmd.pipeline_model(model, "layers", mesh, microbatches=4, schedule=schedule)
    gspmd.annotate(model, mesh, {"layers.*.up.weight": "model _"})
    batch = torch.randn(8, WIDTH, dtype=torch.double), torch.randint(3, (8,))
    plan = gspmd.plan(model, *batch, mesh=mesh, grad=True, hardware=SLOW)
    assert ("vee joint" in plan.summary()) == (schedule == "dualpipev")
    model = gspmd.parallelize(model, mesh, hardware=SLOW)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (alone, model)]
    for _ in range(3):
        x, labels = torch.randn(8, WIDTH, dtype=torch.double), torch.randint(3, (8,))
        losses = [m(x, labels) for m in (alone, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = gspmd.full_state_dict(model)
    expected = alone.state_dict() if torch.distributed.get_rank() == 0 else {}
    torch.testing.assert_close(dict(state), dict(expected))
    with torch.no_grad():
        torch.testing.assert_close(model(x, labels), alone(x, labels))


class Reader(Block):
    """A layer that reads another list's result."""

    def forward(self, x, memory):
        return super().forward(F.scaled_dot_product_attention(x, memory, memory))


class TwoLists(Model):
    """Layers of two kinds, and a second list that reads their result, as does the loss."""

    def __init__(self):
        super().__init__(nn.ModuleList(Block() for _ in range(4)))
        for number, block in enumerate(self.blocks):
            block.norm.eps = (1e-5, 0.1)[number % 2]
        self.readers = nn.ModuleList(Reader() for _ in range(3))

    def forward(self, tokens):
        x = self.embed[tokens]
        for block in self.blocks:
            x = block(x)
        y = self.embed[tokens.flip(1)]
        for layer in self.readers:
            y = layer(y, x)
        return self.loss(x + y, tokens)


@distributed("stage=2")
def test_two_lists_of_layers(mesh):
    torch.manual_seed(0)
    alone = TwoLists().double()
    tokens = torch.randint(5, (8, 3))
    alone(tokens).backward()
    expected = {name: x.grad for name, x in alone.named_parameters()}
    model, lists = copy.deepcopy(alone), ("blocks", "readers")
    gspmd.pipeline_model(model, lists, mesh, microbatches=4, schedule="1f1b", rows=("memory",))
    wrapped = gspmd.parallelize(model, mesh)
    loss = wrapped(tokens)
    close(loss, alone(tokens))
    loss.backward()
    found = {name: x.grad.full_tensor() for name, x in wrapped.named_parameters()}
    close(found["embed"], expected["embed"])
    for path in lists:
        for number in range(len(getattr(alone, path))):
            row = found[f"{path}.block.up.weight"][getattr(model, path).place(number)]
            close(row, expected[f"{path}.{number}.up.weight"])
