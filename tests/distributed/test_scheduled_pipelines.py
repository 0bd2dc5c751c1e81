"""Pipelines whose loss is a part of them, on real processes."""

import copy

import torch
from ranks import distributed
from tied_model import close
from torch import nn
from torch.nn import functional as F

import torchgspmd as gspmd

WIDTH = 4
SCHEDULES = ("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("1f1b", 2), ("zero_bubble", 2)
SOME = SCHEDULES[1], SCHEDULES[4]


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


@distributed("stage=2", "stage=4", "stage=2,model=2")
def test_schedules(mesh):
    torch.manual_seed(0)
    count = 2 * mesh.count(("stage",))
    alone = Model(nn.ModuleList(Block() for _ in range(count)))
    tokens = torch.randint(5, (8, 3))
    expected = alone(tokens)
    expected.backward()
    for schedule, repeats in SCHEDULES if count == 8 else SOME:
        model = copy.deepcopy(alone)
        if "model" in mesh.names:
            marks = {"up.weight": "model _", "down.weight": "_ model"}
            for block in model.blocks:
                gspmd.annotate(block, mesh, marks)
        blocks = gspmd.pipeline(
            model.blocks,
            mesh,
            microbatches=4,
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
