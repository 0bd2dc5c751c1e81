"""scan, map and associative_scan: numbers, gradients, and one reduction."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops.map import map as map_rows

import torchgspmd as gspmd
from torchgspmd import Mesh

MESH = Mesh(data=2, model=2)


class Loop(nn.Module):
    """A sum of what one of the loops returns, of a batch x [b, s, k]."""

    def __init__(self, run):
        super().__init__()
        self.run, self.weight = run, nn.Parameter(torch.randn(6, 6, dtype=torch.double) / 3)

    def forward(self, x):
        return self.run(x, self.weight)


def scanned(x, w):
    carry, rows = scan(
        lambda h, row: (torch.tanh(row + h @ w), (h * row).sum(1)),
        torch.zeros_like(x[:, 0]),
        x,
        dim=1,
    )
    return carry.square().sum() + rows.square().sum()


def by_hand(x, w):
    """The same by a loop of Python: torch 2.9 differentiates scan wrongly in eager mode."""
    h, rows = torch.zeros_like(x[:, 0]), []
    for row in x.unbind(1):
        rows.append((h * row).sum(1))
        h = torch.tanh(row + h @ w)
    return h.square().sum() + torch.stack(rows).square().sum()


def mapped(x, w):
    return map_rows(lambda row, w: (row @ w).relu(), x, w).square().sum()


def accumulated(x, w):
    return associative_scan(torch.mul, (x @ w).sigmoid(), 1, combine_mode="generic").sum()


LOOPS = (scanned, mapped, accumulated)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", LOOPS, ids=lambda f: f.__name__)
def test_numbers_and_gradients(run):
    torch.manual_seed(0)
    model, x = Loop(run), torch.randn(4, 3, 6, dtype=torch.double)
    reference = by_hand if run is scanned else run
    expected = reference(x, model.weight)
    expected.backward()
    gspmd.mark_sharding(model.weight, MESH, "_ model")
    result = gspmd.plan(model, x, mesh=MESH, in_specs=("data _ _",), grad=True)
    loss, gradients = result.simulate(x)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients["weight"], model.weight.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_the_gradient_of_a_weight_of_all_iterations_is_reduced_once():
    """Its terms stay pending over data until the last one is added."""

    def loss(x, w):
        def body(total, rows):
            return total + (rows @ w).square().sum(), rows.sum()

        return scan(body, x.new_zeros(()), x, dim=0)[0]

    model, x = Loop(loss), torch.randn(5, 8, 6, dtype=torch.double)
    result = gspmd.plan(model, x, mesh=Mesh(data=4), in_specs=("_ data _",), grad=True)
    sums = [c.payload_bytes for c in result.collectives if c.kind == "all_reduce"]
    assert sorted(sums) == [8, 6 * 6 * 8]
    expected = torch.autograd.grad((x @ model.weight).square().sum(), model.weight)[0]
    torch.testing.assert_close(result.simulate(x)[1]["weight"], expected, rtol=1e-10, atol=1e-10)


def attend(row):
    """Attend to two keys alike, each kept or not."""
    values = row[:, None, None].expand(-1, 2, 1)  # [heads, keys, 1]
    keys = torch.zeros_like(values)
    return F.scaled_dot_product_attention(keys[:, :1], keys, values, dropout_p=0.5)[:, 0, 0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("draw", (lambda row: F.dropout(row, 0.5), attend))
def test_a_loop_that_draws_random_numbers_draws_others_in_each_iteration(draw, reverse):
    def dropped(x):
        return scan(lambda h, row: (h + row, draw(row)), x[0], x, reverse=reverse)[1]

    plan = gspmd.plan(dropped, torch.ones(3, 64), mesh=MESH, in_specs="_ data")
    rows = plan.simulate(torch.ones(3, 64))
    assert any("loop_row" in node.name for node in plan.captured.graph.nodes)
    assert not torch.equal(rows[0], rows[1]) and {0.0, 2.0} <= set(rows.unique().tolist())
