"""An index outside of its table, on processes: a ShardingError on each rank that has it."""

import pytest
import torch
from ranks import distributed
from torch import nn

import torchgspmd as gspmd
from torchgspmd import ShardingError

CLASSES, WIDTH = 10, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(CLASSES, WIDTH)

    def forward(self, x, y):
        return x + self.positions(y)


class Classifier(nn.Module):
    """Looks up tokens, and positions in a loop; its classes are divided."""

    def __init__(self, mesh):
        super().__init__()
        self.table, self.out = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = gspmd.stack([Block(), Block()])
        self.loss = nn.CrossEntropyLoss()
        if mesh is not None:
            axis = mesh.names[-1]
            gspmd.mark_sharding(self.table.weight, mesh, f"{axis} _")
            gspmd.mark_sharding(self.out.weight, mesh, f"{axis} _")

    def forward(self, x, y, at):
        return self.loss(self.out(self.blocks(self.table(x), at)), y)


@distributed("model=2")
def test_indices_outside(mesh):
    """In a sharded table, in sharded classes, in a loop; the next step is right."""
    torch.manual_seed(0)
    model = gspmd.parallelize(Classifier(mesh), mesh)
    good = [torch.tensor([0, 3, 9, 5]) for _ in range(3)]
    expected = float(model(*good).detach())
    for place, module in enumerate(("table", "loss", "blocks")):
        for index in (CLASSES, CLASSES + 1, -1, 4000):
            bad = [x.clone() for x in good]
            bad[place][2] = index
            with pytest.raises(ShardingError) as raised:
                model(*bad)
            text = str(raised.value)
            assert text.startswith(
                f"index {index} is outside of {CLASSES} rows, in module '{module}"
            ), text
            assert "test_outside_indices.py:" in text
    assert float(model(*good).detach()) == expected
