"""Operands in the order in memory that they had in the trace, at LOCAL and when a plan runs."""

from __future__ import annotations

import copy
import itertools
import random
import zlib

import pytest
import torch
from helpers import message
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.comm.local_ops import in_order
from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.localize.infer_shapes import verify_memory_order
from torchgspmd.rules.registry import memory_order

FUNCTIONS = {
    "det": torch.linalg.det,
    "logdet": lambda a: torch.logdet(a @ a.mT),
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "solve": lambda a: torch.linalg.solve(a, torch.ones_like(a)),
    "inverse": torch.linalg.inv,
}
VIEWS = {
    "itself": lambda x: x,
    "transposed": lambda x: x.mT,
    "steps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "flipped": lambda x: x.flip(0),
    "a sum": lambda x: x.mT + 0.1,
    "a copy": lambda x: torch.empty_like(x).mT.clone().copy_(x),
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


def gradient(function, view):
    def of(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(view(x)).sum(), x)[0]

    return of


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_matrices_in_any_order(function, view):
    torch.manual_seed(0)
    rng = random.Random(zlib.crc32(f"{function} {view}".encode()))
    run = gradient(FUNCTIONS[function], VIEWS[view])
    x = torch.randn(4, 3, 3, dtype=torch.float64) + 2 * torch.eye(3, dtype=torch.float64)
    given = rng.choice((x, x.mT, x.movedim(0, -1).contiguous().movedim(-1, 0)))
    # With 4 devices each has one matrix, whose batch then has no order.
    mesh, spec = Mesh(a=rng.choice((2, 4))), rng.choice(("_ _ _", "a _ _", "_ a _", "_ _ a"))
    plan = gspmd.plan(run, given, mesh=mesh, in_specs=spec)
    torch.testing.assert_close(plan.simulate(given, _poison=True), run(given))


class Flow(nn.Module):
    """Glow's 1x1 convolution: its weight lies in memory by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).square().sum() + torch.linalg.slogdet(self.w + 0.1)[1]


def test_a_weight_in_fortran_order():
    torch.manual_seed(0)
    model, x = Flow(), torch.randn(8, 4, dtype=torch.float64)
    assert not model.w.is_contiguous()
    other = copy.deepcopy(model)
    other(x).backward()
    for spec in ("_ _", "a _", "_ a"):
        marked = gspmd.mark_sharding(model.w, Mesh(a=2), spec)
        assert marked is model.w
        plan = gspmd.plan(model, x, mesh=Mesh(a=2), grad=True, in_specs="a _")
        torch.testing.assert_close(plan.simulate(x)[1]["w"], other.w.grad)
        assert "by eager PyTorch" in str(plan.verify())


ASKING = {
    "is_contiguous": lambda x: x * 2 if x.is_contiguous() else x * 3,
    "stride": lambda x: x * x.stride(0),
    "as_strided": lambda x: x.as_strided((2, 3), (3, 1)) * 1,
    "resize_": lambda x: x.clone().resize_(2, 3),
    "view": lambda x: x.t().view(-1) * 1,
}


@pytest.mark.parametrize("asking", ASKING)
def test_a_program_that_asks_has_the_callers_order(asking):
    function, x = ASKING[asking], torch.randn(6, 4).t()
    for spec in ("_ _", "a _", "_ a"):
        plan = gspmd.plan(function, x, mesh=Mesh(a=2), in_specs=spec)
        torch.testing.assert_close(plan.simulate(x), function(x))


def test_another_order_is_refused_by_a_plan_that_asked():
    x = torch.ones(4, 6)
    plan = gspmd.plan(ASKING["as_strided"], x, mesh=Mesh(a=2), in_specs="a _")
    assert message(lambda: plan.simulate(torch.ones(6, 4).t())) == (
        "argument 'x' is a tensor with strides [1, 4], and was contiguous when this was planned\n"
        "  where test_memory_order.py:N\n"
        "  why   a plan has the numbers, flags and attributes that it was made with\n"
        "  fix   plan it again, with torchgspmd.plan(); or make it a tensor, which runs read"
    )


def test_memory_beside_a_tensor_is_refused():
    x, mesh = torch.randn(8, 6), Mesh(a=2)
    rows = x[::2]
    assert message(
        lambda: gspmd.plan(lambda x: x.as_strided((2, 2), (6, 1)) * 1, rows, mesh=mesh)
    ) == (
        "as_strided reads memory beside the elements of its tensor\n"
        "  where test_memory_order.py:N\n"
        "  why   a program knows the 24 elements of the tensor, and nothing around them\n"
        "  fix   call it on the tensor whose memory it reads, or index that tensor"
    )
    plan = gspmd.plan(lambda x: x.as_strided((2, 2), (12, 1)) * 1, rows, mesh=mesh, in_specs="a _")
    torch.testing.assert_close(plan.simulate(rows), rows[:2, :2])
    assert message(
        lambda: gspmd.plan(lambda x: x.as_strided((2, 2), (6, 1), 6) * 1, x[1:], mesh=mesh)
    ) == (
        "the program asks for a place in memory, and 'x' is a part of a tensor\n"
        "  where test_memory_order.py:N\n"
        "  why   its first element is number 6 in memory; a program has inputs of their own\n"
        "  fix   pass 'x' as a clone(), or leave storage_offset out"
    )


def test_in_order_is_never_contiguous():
    for shape in ((2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (3, 3)):
        for order in itertools.permutations(range(len(shape))):
            for x in (torch.randn(shape), torch.randn(*shape, 2)[..., 0]):
                y = in_order(x, order)
                dims = [d for d in order if shape[d] > 1]
                assert torch.equal(x, y) and not y.is_contiguous()
                assert [d for d in memory_order(y) if shape[d] > 1] == dims


def test_an_operand_whose_order_is_lost_is_a_fault():
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    plan = gspmd.plan(gradient(FUNCTIONS["det"], VIEWS["itself"]), x, mesh=Mesh(a=2))
    graph = copy.deepcopy(plan.program_graph)
    verify_memory_order(graph)
    for node in graph.find_nodes(op="call_function", target=aten.contiguous.default):
        node.replace_all_uses_with(node.args[0])
    with pytest.raises(AssertionError, match="A of %_linalg_det.* has to be contiguous"):
        verify_memory_order(graph)


def test_layer_norm_needs_no_copy():
    x = torch.randn(4, 6)
    plan = gspmd.plan(nn.LayerNorm(6), x, mesh=Mesh(a=2), grad=True, in_specs="a _")
    assert not plan.program_graph.find_nodes(op="call_function", target=aten.contiguous.default)
