"""Localize: the program of one device, as text; masks only where padding would be seen."""

from __future__ import annotations

import models
import pytest
import torch
from expecttest import TestCase
from helpers import assert_same
from torch import fx

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.comm.local_ops import mask_padding

MESH = Mesh(a=2, m=3)


def text_of(plan: gspmd.Plan) -> str:
    """One line a node: name = operation(arguments)."""

    def show(value) -> str:
        if isinstance(value, fx.Node):
            return value.name
        return (
            f"[{', '.join(map(show, value))}]" if isinstance(value, (list, tuple)) else str(value)
        )

    lines = []
    for node in plan.program.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name} = input")
        elif node.op == "output":
            lines.append(f"return {', '.join(map(show, node.args[0]))}")
        else:
            target = getattr(node.target, "__name__", str(node.target))
            arguments = [
                *map(show, node.args),
                *(f"{k}={show(v)}" for k, v in node.kwargs.items() if k != "device"),
            ]
            lines.append(f"{node.name} = {target}({', '.join(arguments)})")
    return "\n".join(lines)


def plan_of(f, *shapes, **options) -> gspmd.Plan:
    return gspmd.plan(f, *(torch.zeros(s) for s in shapes), mesh=MESH, **options)


def masks(plan: gspmd.Plan) -> list[tuple]:
    """(dimension, global length, fill) of every mask."""
    return [(n.args[1], *n.args[3:]) for n in plan.program.graph.nodes if n.target is mask_padding]


MASKED = {
    "even sizes need none": (lambda x: x.sum(), (6, 6), "a m", []),
    "elementwise needs none": (lambda x: x.sin() + 1, (5, 7), "a m", []),
    "a sum needs zeros": (lambda x: x.sum(0), (5, 6), "a m", [(0, 5, 0.0)]),
    "a maximum needs -inf": (lambda x: x.amax(1), (5, 7), "a m", [(1, 7, float("-inf"))]),
    "a minimum needs inf": (lambda x: x.amin(0), (5, 7), "a m", [(0, 5, float("inf"))]),
    "a product needs ones": (lambda x: x.prod(0), (5, 7), "a m", [(0, 5, 1.0)]),
    "rows apart need none": (lambda x: x.softmax(1), (5, 7), "a _", []),
    "one mask for two sums": (
        lambda x: (x.sum(0), (x.sum(0, True) * 2)),
        (5, 6),
        "a _",
        [(0, 5, 0.0)],
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks(name):
    f, shape, spec, want = MASKED[name]
    plan = plan_of(f, shape, in_specs=spec)
    assert masks(plan) == want
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert_same(plan.simulate(x, _poison=True), f(x))


def test_summed_factor_of_a_product_is_masked_on_both_sides():
    assert masks(plan_of(torch.matmul, (6, 7), (7, 6), in_specs=("_ m", "m _"))) == [
        (1, 7, 0.0),
        (0, 7, 0.0),
    ]


def test_coordinates_are_the_first_inputs():
    plan = plan_of(torch.sin, (6, 6), in_specs="a m")
    assert [n.name for n in plan.program.graph.nodes if n.op == "placeholder"] == [
        "coordinate_a",
        "coordinate_m",
        "arg0",
    ]


def test_shapes_are_local():
    plan = plan_of(lambda x: x.view(6, 2, 6).sin(), (12, 6), in_specs="m a")
    assert [n.meta["shape"] for n in plan.program.graph.nodes if n.op == "call_function"] == [
        (2, 2, 3),
        (2, 2, 3),
    ]


def test_text_is_the_same_for_every_device():
    plan = plan_of(lambda x: x.sum(0).cumsum(0), (5, 7), in_specs="a m")
    again = plan_of(lambda x: x.sum(0).cumsum(0), (5, 7), in_specs="a m")
    assert plan.program.code == again.program.code


class TestGolden(TestCase):
    maxDiff = None

    def test_mlp(self):
        mesh = Mesh(model=2)
        plan = gspmd.plan(
            models.mlp(mesh), torch.zeros(*models.TOKENS, models.WIDTH), mesh=mesh, grad=True
        )
        self.assertExpectedInline(
            text_of(plan),
            """\
coordinate_model = input
up_weight = input
up_bias = input
down_weight = input
down_bias = input
x = input
tangent_0 = input
einsum_default = einsum.default(cdb,ab->cda, x, up_weight)
add_tensor = add.Tensor(einsum_default, up_bias)
gelu_default = gelu.default(add_tensor)
einsum_default_1 = einsum.default(cdb,ab->cda, gelu_default, down_weight)
all_reduce_start = start(all_reduce, [einsum_default_1], [[sum, model]])
all_reduce = wait(all_reduce_start, 0)
add_tensor_1 = add.Tensor(all_reduce, down_bias)
sum_dim_int_list = sum.dim_IntList(tangent_0, [0, 1], True)
reshape_default = reshape.default(sum_dim_int_list, [64])
einsum_default_2 = einsum.default(cda,ab->cdb, tangent_0, down_weight)
einsum_default_3 = einsum.default(cda,cdb->ab, tangent_0, gelu_default)
gelu_backward_default = gelu_backward.default(einsum_default_2, add_tensor)
sum_dim_int_list_1 = sum.dim_IntList(gelu_backward_default, [0, 1], True)
reshape_default_1 = reshape.default(sum_dim_int_list_1, [128])
einsum_default_4 = einsum.default(cda,cdb->ab, gelu_backward_default, x)
return add_tensor_1, einsum_default_4, reshape_default_1, einsum_default_3, reshape_default""",
        )

    def test_vocabulary_parallel_embedding(self):
        plan = gspmd.plan(
            torch.nn.functional.embedding,
            torch.zeros(4, dtype=torch.int64),
            torch.zeros(8, 6),
            mesh=Mesh(m=2),
            in_specs=(None, "m _"),
        )
        self.assertExpectedInline(
            text_of(plan),
            """\
coordinate_m = input
input_1 = input
weight = input
mul = mul(coordinate_m, 4)
sub_tensor = sub.Tensor(input_1, mul)
ge_scalar = ge.Scalar(sub_tensor, 0)
lt_scalar = lt.Scalar(sub_tensor, 4)
logical_and_default = logical_and.default(ge_scalar, lt_scalar)
clamp_default = clamp.default(sub_tensor, 0, 3)
clamp_default_1 = clamp.default(input_1, 0, 7)
eq_tensor = eq.Tensor(clamp_default_1, input_1)
where_self = where.self(eq_tensor, clamp_default, input_1)
embedding_default = embedding.default(weight, where_self)
unsqueeze_default = unsqueeze.default(logical_and_default, -1)
scalar_tensor_default = scalar_tensor.default(0, dtype=torch.float32)
where_self_1 = where.self(unsqueeze_default, embedding_default, scalar_tensor_default)
all_reduce_start = start(all_reduce, [where_self_1], [[sum, m]])
all_reduce = wait(all_reduce_start, 0)
return all_reduce""",
        )

    def test_uneven_sum_over_two_axes(self):
        self.assertExpectedInline(
            text_of(plan_of(lambda x: x.sum(0), (7, 4), in_specs="a+m _")),
            """\
coordinate_a = input
coordinate_m = input
x = input
mul = mul(coordinate_a, 3)
add = add(mul, coordinate_m)
mask_padding = mask_padding(x, 0, add, 7, 0.0)
sum_dim_int_list = sum.dim_IntList(mask_padding, [0])
all_reduce_start = start(all_reduce, [sum_dim_int_list], [[sum, a+m]])
all_reduce = wait(all_reduce_start, 0)
return all_reduce""",
        )

    def test_gathered_padding_is_cut_off(self):
        self.assertExpectedInline(
            text_of(plan_of(lambda x: x.sin(), (7, 4), in_specs="m _", out_specs="_ _")),
            """\
coordinate_a = input
coordinate_m = input
x = input
sin_default = sin.default(x)
all_gather_start = start(all_gather, [sin_default], [[0, m]])
all_gather = wait(all_gather_start, 0)
narrow_default = narrow.default(all_gather, 0, 0, 7)
contiguous_default = contiguous.default(narrow_default)
return contiguous_default""",
        )
