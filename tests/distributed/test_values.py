"""Sizes that depend on values, on processes: values are sharded along their other
dimensions, and each call may have other sizes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import distributed
from torch import Tensor, nn

import torchgspmd as gspmd

if torch.__version__ < "2.10":
    pytest.skip("torch 2.9 cannot trace it", allow_module_level=True)


class Ragged(nn.Module):
    """Attention within each sequence of a packed batch x [12, 8], then a layer of the first one."""

    def __init__(self, layouts: dict[str, str], mesh: gspmd.Mesh):
        super().__init__()
        self.qkv = nn.Linear(8, 24, dtype=torch.double)
        self.out = nn.Linear(8, 8, dtype=torch.double)
        self.layouts, self.mesh = layouts, mesh

    def mark(self, x: Tensor, name: str) -> Tensor:
        return gspmd.mark_sharding(x, self.mesh, self.layouts[name])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(12, 3, 4, 2).permute(1, 2, 0, 3)  # [heads, 12, 2]
        lists = [t.split(lengths.tolist(), 1) for t in (q, k, v)]
        y = [F.scaled_dot_product_attention(*each) for each in zip(*lists)]
        first = self.mark(y[0], "first").transpose(0, 1).flatten(1)  # [n, 8]
        first = self.mark(self.out(first), "out")
        first = self.mark(F.pad(first, (0, 0, 0, 1)).roll(1, 0), "padded")
        return torch.cat([first.cos(), *(t.transpose(0, 1).flatten(1) for t in y[1:])])


LAYOUTS = (
    {"first": "model _ _", "out": "_ model", "padded": "_ _"},
    {"first": "_ _ _", "out": "_ data", "padded": "_ model"},
)


@distributed("data=2,model=2")
def test_sizes_of_each_call(mesh):
    """Values of unknown size are gathered, summed, exchanged and sent by permutes."""
    for layouts in LAYOUTS:
        torch.manual_seed(0)
        model = Ragged(layouts, mesh)
        reference = copy.deepcopy(model)
        gspmd.annotate(model, mesh, {"qkv.weight": "model _", "out.weight": "_ model"})
        sharded = gspmd.parallelize(model, mesh)
        for lengths in ([5, 3, 4], [1, 9, 2]):
            x, lengths = torch.randn(12, 8, dtype=torch.double), torch.tensor(lengths)
            results = []
            for each in (sharded, reference):
                each.zero_grad()
                result = each(x, lengths)
                result.square().sum().backward()
                results.append((result, [p.grad for p in each.parameters()]))
            (got, gradients), (expected, wanted) = results
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
            for gradient, one in zip(gradients, wanted):
                torch.testing.assert_close(gradient.full_tensor(), one, rtol=1e-10, atol=1e-10)


class Chosen(nn.Module):
    """A layer of the rows that values choose: a result of another size in each call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6, dtype=torch.double)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        rows = x[x[:, 0] > 0]
        return self.layer(rows) if rows.shape[0] > 0 else x


@distributed("model=2")
def test_results_of_unknown_size(mesh):
    """Results and their gradients have the sizes of the call; without rows another program runs."""
    torch.manual_seed(0)
    model = Chosen()
    reference = copy.deepcopy(model)
    gspmd.annotate(model, mesh, {"layer.weight": "model _"})
    sharded = gspmd.parallelize(model, mesh, out_specs="_ model")
    for k, x in enumerate(torch.randn(4, 7, 8, dtype=torch.double)):
        if k in (1, 3):
            x = -x.abs()
            torch.testing.assert_close(sharded(x).full_tensor(), reference(x))
            continue
        result, expected = sharded(x), reference(x)
        assert result.shape == expected.shape and result.to_local().shape[1] == 3
        torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-10, atol=1e-10)
        for each in (sharded, reference):
            each.zero_grad()
        result.full_tensor().square().sum().backward()
        expected.square().sum().backward()
        gradient = sharded.layer.weight.grad.full_tensor()
        torch.testing.assert_close(gradient, reference.layer.weight.grad, rtol=1e-10, atol=1e-10)
    assert len(sharded._all_programs()) == 2
    # A run that ends at the check has not counted: it once did.
    assert sharded.calls == reference.calls == 4
