"""Reshapes of dimensions that the mesh does not divide, and single rows of sharded ones: neighbours
exchange rows, nothing is gathered.
"""

import pytest
import torch
from expecttest import assert_expected_inline

import torchgspmd as gspmd

CASES = {
    "flatten": (lambda x: x.flatten(1), (3, 7, 5), "_ s _", "_ s"),
    "flatten the first": (lambda x: x.flatten(0, 1), (6, 5, 3), "s _ _", "s _"),
    "flatten a few": (lambda x: x.flatten(), (3, 16), "s _", "s"),
    "flatten three": (lambda x: x.flatten(1), (2, 7, 2, 3), "_ s _ _", "_ s"),
    "unflatten": (lambda x: x.unflatten(1, (7, 5)), (3, 35), "_ s", "_ s _"),
    "unflatten a few": (lambda x: x.unflatten(0, (3, 16)), (48,), "s", "s _"),
    "unflatten in three": (lambda x: x.view(2, 7, 2, 3), (2, 42), "_ s", "_ s _ _"),
}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_uneven_reshapes_exchange_rows(name: str, count: int) -> None:
    function, shape, before, after = CASES[name]
    mesh, x = gspmd.Mesh(s=count), torch.randn(shape)
    plan = gspmd.plan(lambda x: function(x).sin(), x, mesh=mesh, in_specs=before, out_specs=after)
    torch.testing.assert_close(plan.simulate(x, _poison=True), function(x).sin())
    even = (
        shape[before.split().index("s")] % count == 0
        and function(x).shape[after.split().index("s")] % count == 0
    )
    assert {c.kind for c in plan.collectives} <= (set() if even else {"permute"})
    assert (
        plan.sent_bytes < (count - 1) / count * x.numel() * x.element_size()
    )  # less than to gather it
    assert not plan.replicated_ops


def test_what_flattening_prints() -> None:
    plan = gspmd.plan(
        lambda x: x.flatten(1),
        torch.randn(3, 7, 5),
        mesh=gspmd.Mesh(s=2),
        in_specs="_ s _",
        out_specs="_ s",
    )
    assert_expected_inline(
        str(plan),
        """\
mesh s=2
  %x         : f32[3, 7@s, 5]             = input
  %x_h       : f32[3, 7@s[(18i)/5:+5], 5] = halo(%x, 1, s, (18i)/5:+5 in 0:7, 7)
  %join_rows : f32[3, 35@s]               = join_rows(%x_h, 1)
  return %join_rows

permute        over s               1 x, 60 B sent by a device
sent by a device in all: 60 B
memory of a device: parameters 0 B, inputs 240 B, peak 756 B""",
    )


@pytest.mark.parametrize("row", [0, 4, -1])
def test_a_row_of_a_sharded_dimension(row: int) -> None:
    """A class token: its owner sends it, the others' tokens stay where they are."""
    x, w = torch.randn(4, 17, 8, requires_grad=True), torch.randn(8, 5)
    plan = gspmd.plan(
        lambda x, w: x[:, row] @ w,
        x,
        w,
        mesh=gspmd.Mesh(s=2),
        in_specs=("_ s _", "_ _"),
        out_specs="_ _",
    )
    torch.testing.assert_close(plan.simulate(x, w, _poison=True), x[:, row] @ w)
    assert [(c.kind, c.sent_bytes) for c in plan.collectives] == [("all_reduce", 4 * 5 * 4)]
    assert not plan.replicated_ops
