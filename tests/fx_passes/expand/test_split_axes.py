"""Parts of axes: the mesh that is split, names merged again, reshapes and grouped heads that use a
part of an axis.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, eager
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardSpec

MESH = Mesh(data=3, model=8)
FINE = MESH.split({"model": (2, 4)}).split({"model:(2)4": (2, 2)})


def test_a_split_mesh_has_the_same_devices_in_the_same_order():
    assert FINE.axes == (("data", 3), ("model:(1)2", 2), ("model:(2)2", 2), ("model:(4)2", 2))
    assert FINE.unsplit() == MESH
    for rank in range(MESH.size):
        c = MESH.coordinates(rank)
        assert FINE.coordinates(rank) == {name: MESH.place(name, c) for name in FINE.names}
        assert FINE.index(FINE.refine(("model", "data")), FINE.coordinates(rank)) == MESH.index(
            ("model", "data"), c
        )


@pytest.mark.parametrize(
    "fine, merged",
    [
        ("model:(1)2 model:(2)2 model:(4)2", "model"),
        ("model:(1)2 model:(2)2", "model:(1)4"),
        ("model:(2)2 model:(1)2", "model:(2)2 model:(1)2"),
        ("data model:(2)2 model:(4)2", "data model:(2)4"),
        ("", ""),
    ],
)
def test_names_are_merged_and_refined(fine, merged):
    assert FINE.merge(tuple(fine.split())) == tuple(merged.split())
    assert FINE.refine(tuple(merged.split())) == tuple(fine.split())


def test_groups_of_parts():
    assert list(Mesh(a=2, b=4).groups(("b:(2)2",))) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(Mesh(a=2, b=4).groups(("b:(1)2", "a"))) == [[0, 4, 2, 6], [1, 5, 3, 7]]
    assert Mesh(a=2, b=4).in_order(("b:(2)2", "a", "b:(1)2")) == ("a", "b:(1)2", "b:(2)2")


def test_a_layout_with_parts_parses_and_prints():
    spec = ShardSpec.parse("model:(2)4+data _ sum@model:(1)2")
    assert str(spec) == "model:(2)4+data _ sum@model:(1)2" and spec.local_shape((24, 5), MESH) == (
        2,
        5,
    )


def reshape(x):
    return x.reshape(4, 2, 6, 5)


@pytest.mark.parametrize(
    "mesh, spec, after, sent",
    [
        (Mesh(x=4), "_ x _", "_ _ x _", 320),
        (Mesh(x=4, y=2), "y x _", "y _ x _", 160),
        (Mesh(x=6), "_ x _", "_ _ x _", 160),
    ],
)
def test_a_reshape_keeps_the_part_that_fits(mesh, spec, after, sent):
    x = torch.randn(4, 12, 5)
    plan = gspmd.plan(reshape, x, mesh=mesh, in_specs=spec, out_specs=after)
    assert plan.sent_bytes == sent
    assert_same(plan.simulate(x, _poison=True), reshape(x))


def test_one_line_names_the_part():
    plan = gspmd.plan(
        reshape, torch.randn(4, 12, 5), mesh=Mesh(x=4), in_specs="_ x _", out_specs="_ _ x _"
    )
    assert plan.text(full=True).splitlines()[1:4] == [
        "  %x      : f32[4, 12@x, 5]               = input",
        "  %view   : f32[4, 2@x:(1)2, 6@x:(2)2, 5] = reshape(%x, [4, 2, 6, 5])",
        "  %view_p : f32[4, 2, 6@x, 5]             = permute(%view, _ x:(1)2 x:(2)2 _, _ _ x _)",
    ]


def test_parts_do_not_leave_the_program_unasked():
    plan = gspmd.plan(reshape, torch.randn(4, 12, 5), mesh=Mesh(x=4), in_specs="_ x _")
    assert str(plan.out_specs[0]) in ("_ _ _ _", "_ _ x _")
    assert "x" in plan.explain("view")


class Grouped(nn.Module):
    """Attention with fewer key and value heads than query heads."""

    def __init__(self, heads, shared, width=4):
        super().__init__()
        self.heads, self.shared, size = heads, shared, heads * width
        self.q, self.o = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.k, self.v = (nn.Linear(size, shared * width, bias=False) for _ in range(2))

    def forward(self, x):
        b, s, m = x.shape
        q = self.q(x).view(b, s, self.heads, -1)
        k, v = (
            f(x).view(b, s, self.shared, -1).repeat_interleave(self.heads // self.shared, 2)
            for f in (self.k, self.v)
        )
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, m))


@pytest.mark.parametrize(
    "mesh, heads, shared",
    [
        (Mesh(model=4), 8, 2),
        (Mesh(data=2, model=4), 4, 2),
        (Mesh(model=8), 8, 4),
        (Mesh(model=4), 6, 2),
        (Mesh(model=6), 6, 2),
        (Mesh(model=4), 8, 1),
    ],
    ids=str,
)
def test_fewer_key_heads_than_devices(mesh, heads, shared):
    torch.manual_seed(0)
    model, x = Grouped(heads, shared), torch.randn(4, 5, heads * 4)
    gspmd.annotate(model, mesh, {"q.weight": "model _", "o.weight": "_ model"})
    plan = gspmd.plan(
        model, x, mesh=mesh, in_specs="data _ _" if "data" in mesh.names else "_ _ _", grad=True
    )
    assert_same(plan.simulate(x, _poison=True), eager(model, x))


def test_one_key_head_sends_the_width_of_its_weight():
    """Its gradient is a sum over the devices of all query heads, and so is its share of dx, which
    is added to theirs before any reduction: of [b, s, m] there is one in the forward and one in the
    backward. Weights are larger than x: a smaller one had better be gathered.
    """
    mesh = Mesh(model=4)
    model, x = Grouped(8, 1, width=16), torch.randn(16, 5, 128, requires_grad=True)
    gspmd.annotate(model, mesh, {"q.weight": "model _", "o.weight": "_ model"})

    def step(x, q, k, v, o):
        y = torch.func.functional_call(
            model, {"q.weight": q, "k.weight": k, "v.weight": v, "o.weight": o}, (x,)
        )
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, q, k, v, o))

    args = (x, *(model.get_parameter(f"{n}.weight") for n in "qkvo"))
    specs = ("_ _ _", "model _", "_ _", "_ _", "_ model")
    plan = gspmd.plan(step, *args, mesh=mesh, in_specs=specs, out_specs=("_ _ _", *specs))
    weight = 16 * 128 * 4
    moved = [(c.kind, c.payload_bytes) for c in plan.collectives if c.payload_bytes > weight]
    # Keys and values may be computed one on each half of the devices, and gathered together.
    sums = [move for move in moved if move[0] == "all_reduce"]
    assert sums == [("all_reduce", 16 * 5 * 128 * 4)] * 2 and plan.sent_bytes <= 150_528
    assert_same(plan.simulate(*args, _poison=True), step(*args), terms=256)
