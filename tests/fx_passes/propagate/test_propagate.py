"""Propagation: the layout of every value from a few marks, and the chain back to the mark."""

from __future__ import annotations

import re

import models
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import torchgspmd as gspmd
from torchgspmd import Mesh

MESH = Mesh(a=2, b=2)


def layouts(f, *shapes, mesh: Mesh = MESH, **options) -> dict[str, str]:
    """What propagation decides, by the name of the value."""
    plan = gspmd.plan(f, *(torch.zeros(s) for s in shapes), mesh=mesh, **options)
    return {value.name: str(spec) for value, spec in plan.layouts.spec.items()}


CASES = {
    "elementwise, forwards": (
        lambda x: x.sin().exp(),
        [(4, 6)],
        {"in_specs": "a b"},
        {"x": "a b", "sin": "a b", "exp": "a b"},
    ),
    "elementwise, backwards": (
        lambda x: x.sin().exp(),
        [(4, 6)],
        {"out_specs": "a b"},
        {"x": "a b", "sin": "a b", "exp": "a b"},
    ),
    "partial layouts merge": (
        torch.add,
        [(4, 6), (4, 6)],
        {"in_specs": ("a _", "? b")},
        {"add": "a b"},
    ),
    "a closed dimension stays": (
        torch.add,
        [(4, 6), (4, 6)],
        {"in_specs": ("a _", "_ _"), "out_specs": "_ _"},
        {"add": "_ _"},
    ),
    "broadcast": (
        torch.add,
        [(4, 6), (6,)],
        {"in_specs": ("a b", None)},
        {"arg1": "b", "add": "a b"},
    ),
    "product": (torch.matmul, [(4, 6), (6, 8)], {"in_specs": ("a _", "_ b")}, {"einsum": "a b"}),
    "product, summed factor": (
        torch.matmul,
        [(4, 6), (6, 8)],
        {"in_specs": ("_ a", None)},
        {"arg1": "a _", "einsum": "_ _"},
    ),
    "an axis occurs once": (
        torch.matmul,
        [(4, 6), (6, 8)],
        {"in_specs": ("a _", "_ a")},
        {"arg0": "a _", "arg1": "_ a", "einsum": "_ a"},
    ),
    "an earlier round comes before a larger tensor": (
        torch.matmul,
        [(4, 6), (6, 80)],
        {"in_specs": ("a _", "_ a:p1")},
        {"arg0": "a _", "arg1": "_ a", "einsum": "a _"},
    ),
    "a later round fills what is free": (
        torch.matmul,
        [(4, 6), (6, 8)],
        {"in_specs": ("a _", "_ b:p2")},
        {"einsum": "a b"},
    ),
    "a dimension of a later round keeps its axis": (
        torch.add,
        [(4, 4), (4, 4)],
        {"in_specs": ("a _", "? a:p1")},
        {"arg1": "_ a", "add": "a _"},
    ),
    "an open dimension of a later round": (
        torch.add,
        [(4, 6), (4, 6)],
        {"in_specs": ("a b", "a ?:p1")},
        {"arg1": "a b", "add": "a b"},
    ),
    "reduction": (lambda x: x.sum(0), [(4, 6)], {"in_specs": "a b"}, {"sum_1": "b"}),
    "transpose": (lambda x: x.t(), [(4, 6)], {"in_specs": "a b"}, {"t": "b a"}),
    "split of a dimension": (
        lambda x: x.view(2, 3, 6),
        [(6, 6)],
        {"in_specs": "a b"},
        {"view": "a _ b"},
    ),
    "split, minor part cannot": (
        lambda x: x.view(5, 2, 6),
        [(10, 6)],
        {"in_specs": "a b"},
        {"view": "_ _ b"},
    ),
    "merge of dimensions": (
        lambda x: x.view(12, 6),
        [(4, 3, 6)],
        {"in_specs": "a _ b"},
        {"view": "a b"},
    ),
    "merge, minor part cannot": (
        lambda x: x.view(12, 6),
        [(3, 4, 6)],
        {"in_specs": "_ a b"},
        {"view": "_ b"},
    ),
    "two axes of one dimension": (
        lambda x: x.sin(),
        [(8, 6)],
        {"in_specs": "b+a _"},
        {"sin": "b+a _"},
    ),
    "softmax": (lambda x: x.softmax(-1), [(4, 6)], {"in_specs": "a _"}, {"_softmax": "a _"}),
    "embedding": (
        F.embedding,
        [(4, 3), (8, 6)],
        {"in_specs": ("a _", "_ b")},
        {"embedding": "a _ b"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts(name):
    f, shapes, options, want = CASES[name]
    tensors = [torch.zeros(s) for s in shapes]
    if f is F.embedding:
        tensors[0] = tensors[0].long()
    plan = gspmd.plan(f, *tensors, mesh=MESH, **options)
    found = {value.name: str(spec) for value, spec in plan.layouts.spec.items()}
    assert {key: found.get(key) for key in want} == want, found


def test_layout_does_not_depend_on_the_sizes_of_axes():
    names = [
        layouts(models.mlp(Mesh(model=n)), (2, 32, models.WIDTH), mesh=Mesh(model=n))
        for n in (2, 4, 8)
    ]
    assert names[0] == names[1] == names[2] and "model" in names[0]["gelu"]


def test_a_gradient_has_the_layout_of_its_parameter():
    plan = gspmd.plan(
        models.mlp(Mesh(model=2)), torch.zeros(2, 32, models.WIDTH), mesh=Mesh(model=2), grad=True
    )
    assert [str(s) for s in plan.out_specs] == ["_ _ _", "model _", "model", "_ model", "_"]


def test_unmarked_program_stays_replicated():
    assert set(layouts(lambda x: x.sin().sum(), (4, 6)).values()) == {"_ _", ""}


class TestGolden(TestCase):
    maxDiff = None

    def table(self, module, mesh, grad=True) -> str:
        found = layouts(module, (*models.TOKENS, models.WIDTH), mesh=mesh, grad=grad)
        width = max(map(len, found))
        return "\n".join(f"{name:{width}} [{spec}]" for name, spec in found.items())

    def test_megatron_from_the_weights_alone(self):
        mesh = Mesh(model=2)
        self.assertExpectedInline(
            self.table(models.block(mesh, "tp"), mesh, grad=False),
            """\
norm1_weight         [_]
norm1_bias           [_]
attention_q_weight   [model _]
attention_k_weight   [model _]
attention_v_weight   [model _]
attention_out_weight [_ model]
norm2_weight         [_]
norm2_bias           [_]
mlp_up_weight        [model _]
mlp_down_weight      [_ model]
x                    [_ _ _]
getitem              [_ _ _]
einsum               [_ _ model]
view                 [_ _ model _]
transpose            [_ model _ _]
einsum_1             [_ _ model]
view_1               [_ _ model _]
transpose_1          [_ model _ _]
einsum_2             [_ _ model]
view_2               [_ _ model _]
transpose_2          [_ model _ _]
getitem_3            [_ model _ _]
transpose_3          [_ _ model _]
clone                [_ _ model _]
_unsafe_view         [_ _ model]
einsum_3             [_ _ _]
add                  [_ _ _]
getitem_5            [_ _ _]
einsum_4             [_ _ model]
gelu                 [_ _ model]
einsum_5             [_ _ _]
add_1                [_ _ _]""",
        )

    def test_sequence_parallel(self):
        mesh = Mesh(model=2)
        self.assertExpectedInline(
            self.table(models.block(mesh, "sp"), mesh, grad=False),
            """\
norm1_weight         [_]
norm1_bias           [_]
attention_q_weight   [model _]
attention_k_weight   [model _]
attention_v_weight   [model _]
attention_out_weight [_ model]
norm2_weight         [_]
norm2_bias           [_]
mlp_up_weight        [model _]
mlp_down_weight      [_ model]
x                    [_ model _]
mark_sharding        [_ model _]
getitem              [_ model _]
einsum               [_ model _]
view                 [_ model _ _]
transpose            [_ _ model _]
einsum_1             [_ model _]
view_1               [_ model _ _]
transpose_1          [_ _ model _]
einsum_2             [_ model _]
view_2               [_ model _ _]
transpose_2          [_ _ model _]
getitem_3            [_ _ model _]
transpose_3          [_ model _ _]
clone                [_ model _ _]
_unsafe_view         [_ model _]
einsum_3             [_ model _]
add                  [_ model _]
mark_sharding_1      [_ model _]
getitem_5            [_ model _]
einsum_4             [_ _ model]
gelu                 [_ _ model]
einsum_5             [_ model _]
add_1                [_ model _]
mark_sharding_2      [_ model _]""",
        )

    def test_explain(self):
        mesh = Mesh(model=2)
        plan = gspmd.plan(models.mlp(mesh), torch.zeros(*models.TOKENS, models.WIDTH), mesh=mesh)
        text = "\n\n".join(plan.explain(name) for name in ("gelu", "up.weight", "x"))
        self.assertExpectedInline(
            re.sub(r"\S*models\.py:\d+", "models.py:N", text),
            """\
model: %gelu [_ _ model] <- gelu: d0 d1 d2 -> d0 d1 d2
model: %add [_ _ model] <- add: d0 d1 d2, d2 -> d0 d1 d2
model: %einsum [_ _ model] <- einsum: c d b, a b -> c d a
model: %up_weight [model _] <- marked at models.py:N

model: %up_weight [model _] <- marked at models.py:N

%x [_ _ _]: no mark reaches it""",
        )
