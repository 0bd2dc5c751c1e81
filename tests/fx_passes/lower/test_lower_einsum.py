"""Products of the program of one rank: the operations that compute them, and the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.lower.lower_einsum import EINSUM, lower_einsum
from torchgspmd.fx_passes.lower.reuse_buffers import reuse_buffers

SIZES = dict(b=2, s=3, m=4, h=5, q=4)


class Program:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.graph, self.inputs = fx.Graph(), []

    def input(self, letters: str) -> fx.Node:
        shape = tuple(SIZES[c] for c in letters)
        node = self.graph.placeholder(f"{letters}_{len(self.inputs)}")
        node.meta = {"shape": shape, "dtype": torch.float64}
        self.inputs.append(torch.randn(shape, dtype=torch.float64))
        return node

    def __call__(self, op, *args, letters: str) -> fx.Node:
        node = self.graph.call_function(op, args)
        node.meta = {"shape": tuple(SIZES[c] for c in letters), "dtype": torch.float64}
        return node

    def product(self, equation: str) -> fx.Node:
        terms, out = equation.split("->")
        return self(EINSUM, equation, *map(self.input, terms.split(",")), letters=out)

    def lowered(self, *results: fx.Node) -> list:
        """Which operations compute it; fails unless the numbers are the same."""
        self.graph.output(results)
        want = fx.GraphModule({}, self.graph)(*self.inputs)
        graph = reuse_buffers(lower_einsum(self.graph))
        graph.lint()
        for g, w in zip(fx.GraphModule({}, graph)(*self.inputs), want, strict=True):
            torch.testing.assert_close(g, w)
        views = (aten.reshape.default, aten.transpose.int, aten.permute.default)
        return [n.target for n in graph.nodes if n.op == "call_function" and n.target not in views]


@pytest.mark.parametrize(
    "equation, op",
    [
        ("bsm,hm->bsh", aten.linear),
        ("bsm,mh->bsh", aten.matmul),
        ("sm,hm->sh", aten.linear),
        ("sm,mh->sh", aten.mm),
        ("bsh,bsm->hm", aten.mm),
        ("bsm,bhm->bsh", aten.bmm),
        ("hm,bsm->bsh", aten.mm),
        ("m,hm->h", aten.linear),
    ],
)
def test_one_product(equation: str, op) -> None:
    p = Program()
    assert op.default in p.lowered(p.product(equation))


@pytest.mark.parametrize("equation", ["bm,bh->bmh", "bm,bh->bhm", "m,h->mh", "bsm,bh->bsmh"])
def test_a_product_of_vectors_is_elementwise(equation: str) -> None:
    p = Program()
    assert aten.mul.Tensor in p.lowered(p.product(equation))


def test_a_bias_comes_with_the_product() -> None:
    p = Program()
    assert p.lowered(p(aten.add.Tensor, p.product("bsm,hm->bsh"), p.input("h"), letters="bsh")) == [
        aten.linear.default
    ]
    p = Program()
    assert p.lowered(p(aten.add.Tensor, p.product("bsm,mh->bsh"), p.input("h"), letters="bsh")) == [
        aten.addmm.default
    ]


def test_sums_of_products_are_added_up_in_one_piece_of_memory() -> None:
    p = Program()
    first = p(aten.add.Tensor, p.product("bsq,qm->bsm"), p.product("bsh,mh->bsm"), letters="bsm")
    total = p(aten.add.Tensor, first, p.product("bsq,qm->bsm"), letters="bsm")
    assert p.lowered(total) == [aten.linear.default, aten.addmm_.default, aten.addmm_.default]


def test_a_product_that_is_read_elsewhere_is_kept() -> None:
    p = Program()
    x, y = p.product("bsq,qm->bsm"), p.product("bsh,hm->bsm")
    assert p.lowered(p(aten.add.Tensor, x, y, letters="bsm"), x, y) == [
        aten.matmul.default,
        aten.matmul.default,
        aten.add.Tensor,
    ]


def test_the_sum_of_a_product_and_itself() -> None:
    p = Program()
    x = p.product("bsq,qm->bsm")
    assert p.lowered(p(aten.add.Tensor, x, x, letters="bsm")) == [
        aten.matmul.default,
        aten.add.Tensor,
    ]
