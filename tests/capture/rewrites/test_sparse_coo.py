"""Sparse matrices: programs compute with their indices and values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, eager, message
from torch import Tensor, nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)
INDICES = torch.tensor([[0, 1, 2, 3, 3, 3, 5], [1, 2, 3, 0, 0, 6, 4]])  # one of them twice
NEAR = torch.sparse_coo_tensor(INDICES, torch.arange(1.0, 8.0), (7, 7))
SORTED = NEAR.coalesce()


class Net(nn.Module):
    """A sparse matrix of learned values, and a dense one."""

    def __init__(self, function):
        super().__init__()
        self.values, self.layer, self.function = (
            nn.Parameter(torch.rand(7)),
            nn.Linear(4, 7),
            function,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.sparse_coo_tensor(INDICES, self.values, (7, 7)), self.layer(x))


FUNCTIONS = {
    "product": lambda s, d: s @ d,
    "product from the left": lambda s, d: d @ s,
    "mv": lambda s, d: torch.mv(s, d[:, 0]),
    "sparse.mm": lambda s, d: torch.sparse.mm(s, d),
    "addmm": lambda s, d: torch.addmm(d, s, d, beta=0.5, alpha=2),
    "sparse.addmm": lambda s, d: torch.sparse.addmm(d, s, d),
    "linear": lambda s, d: F.linear(s, d, d[0]),
    "t": lambda s, d: s.t() @ d,
    "T": lambda s, d: s.T @ d,
    "transpose": lambda s, d: s.transpose(0, 1).mm(d),
    "to_dense": lambda s, d: s.to_dense() * d,
    "degrees": lambda s, d: torch.sparse.sum(s, 1).to_dense() * d,
    "sum": lambda s, d: s.sum() * d,
    "scaled": lambda s, d: -(2 * s * 3 / 4) @ d,
    "add": lambda s, d: (s + NEAR) @ d,
    "add to dense": lambda s, d: d + s,
    "parts": lambda s, d: (
        torch.sparse_coo_tensor(s._indices(), s._values() * 2, s.shape).coalesce() @ d * s._nnz()
    ),
    "detach": lambda s, d: s.detach() @ d,
    "constants": lambda s, d: NEAR @ d + SORTED.t() @ d * SORTED.values().sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "marks", [("model", "model _"), ("data", "_ data"), ("_", "data+model _")], ids=str
)
def test_numbers(name, marks):
    torch.manual_seed(0)
    net, x = Net(FUNCTIONS[name]), torch.randn(7, 4)
    for parameter, mark in zip((net.values, net.layer.weight), marks):
        gspmd.mark_sharding(parameter, MESH, mark)
    plan = gspmd.plan(net, x, mesh=MESH, in_specs="data _", grad=True)
    assert_same(plan.simulate(x), eager(net, x), terms=512)
    assert not any("sparse" in str(node.target) for node in plan.captured.graph.nodes)


def test_arguments_and_attributes():
    net, x = nn.Linear(4, 5), torch.randn(7, 4)
    net.near = NEAR  # no buffer

    def forward(x, near):
        return near @ torch.sparse.mm(net.near, x)

    plan = gspmd.plan(forward, x, NEAR, mesh=MESH, in_specs=("data _", None))
    torch.testing.assert_close(plan.simulate(x, NEAR), forward(x, NEAR))
    assert [i.name for i in plan.captured.inputs] == ["x", "near_indices", "near_values"]


def test_results():
    given = NEAR, torch.ones(7)
    twice, x = gspmd.plan(
        lambda near, x: (near * 2, x + 1), *given, mesh=MESH, in_specs=(None, "data")
    ).simulate(*given)
    assert twice.layout is torch.sparse_coo
    torch.testing.assert_close(
        (twice.to_dense(), x), ((NEAR * 2).to_dense(), torch.full((7,), 2.0))
    )


def test_what_has_no_way():
    for function in (
        lambda s, d: s @ s,
        lambda s, d: s.pow(2) @ d,
        lambda s, d: torch.sparse.softmax(s, 1) @ d,
        lambda s, d: s.values().sum(),
        lambda s, d: torch.div(s, 2, rounding_mode="floor") @ d,
        lambda s, d: torch.mm(input=s, mat2=d),
    ):
        assert "is sparse_coo, and a layout is one of dense tensors" in message(
            lambda function=function: gspmd.plan(Net(function), torch.randn(7, 4), mesh=MESH)
        )
