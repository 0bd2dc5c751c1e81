"""Products of the program of one rank: the operations that compute them, and the same numbers."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.lower.lower_einsum import EINSUM, IN_BLOCKS, lower_einsum
from torchgspmd.fx_passes.lower.reuse_buffers import reuse_buffers
from torchgspmd.rules.custom_ops.attention import attention, attention_backward

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
        graph = reuse_buffers(lower_einsum(self.graph, "cpu"))
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


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize(
    "dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_attention_is_pytorchs(
    dtype: torch.dtype, error: float, width: int, causal: bool, strided: bool
) -> None:
    """width: of the values. Queries and keys have 4 numbers; for other widths there is no kernel on
    CPUs.
    """
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, 3, s, n, dtype=dtype) for s, n in ((5, 4), (7, 4), (7, width), (5, width))
    )
    if strided:  # a row is not in one piece, as kernels expect
        q, k, v, grad = (t.mT.contiguous().mT for t in (q, k, v, grad))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.3)
    want.backward(grad)
    out, lse = attention(q, k, v, causal, 0.3)
    found = out, *attention_backward(grad, q, k, v, out, lse, causal, 0.3)
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    for g, w in zip(found, (want, *(leaf.grad for leaf in leaves)), strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g, w, rtol=error, atol=error)


@pytest.mark.parametrize("width", [4, 6])
def test_attention_of_cpu_processes_goes_past_the_registry_of_operators(width: int) -> None:
    shapes = {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4), "v": (2, 3, 7, width), "grad": (2, 3, 5, width)}
    torch.manual_seed(0)
    graph, inputs = (
        fx.Graph(),
        {name: torch.randn(shape).mT.contiguous().mT for name, shape in shapes.items()},
    )  # of strided rows
    q, k, v, grad = map(graph.placeholder, shapes)
    for node, shape in zip((q, k, v, grad), shapes.values()):
        node.meta = {"shape": shape, "dtype": torch.float32}
    both = graph.call_function(attention._opoverload, (q, k, v, True, 0.3))
    out, lse = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    back = graph.call_function(attention_backward._opoverload, (grad, q, k, v, out, lse, True, 0.3))
    graph.output((out, *(graph.call_function(operator.getitem, (back, i)) for i in range(3))))
    want = fx.GraphModule({}, graph)(*inputs.values())
    graph = lower_einsum(graph, "cpu")
    assert sum(node.target in IN_BLOCKS.values() for node in graph.nodes) == 2
    for g, w in zip(fx.GraphModule({}, graph)(*inputs.values()), want, strict=True):
        torch.testing.assert_close(g, w)
