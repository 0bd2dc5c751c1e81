"""Moves at the end of a loop's body are behind it: what it adds up are products, as computed."""

import pytest
import torch
from torch import fx
from torch._higher_order_ops import scan

import torchgspmd as gspmd
from torchgspmd.compat.operators import aten
from torchgspmd.features.loops.outline_loops import sink_exits
from torchgspmd.fx_passes.loop_call import loop_calls
from torchgspmd.rules.custom_ops.loops import STACK, TOTAL

MESH = gspmd.Mesh(data=2)


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_rows_of_a_stack():
    """Each iteration uses both rows of w, one of them transposed."""
    torch.manual_seed(0)
    x, w = torch.randn(5, 4, 3).double(), torch.randn(2, 3, 3).double().requires_grad_()

    def step(h, row, w):
        return torch.tanh(h @ w[0].T + row @ w[1])

    def loss(x, w):
        def body(h, row):
            return step(h, row, w), h.new_zeros(())

        value = scan(body, torch.zeros_like(x[0]), x)[0].square().sum()
        return value, *torch.autograd.grad(value, w)

    h = torch.zeros_like(x[0])
    for row in x:
        h = step(h, row, w)
    expected = h.square().sum()
    expected.backward()
    plan = gspmd.plan(loss, x, w, mesh=MESH, in_specs=("_ data _", None))
    value, gradient = plan.simulate(x, w)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, w.grad, rtol=1e-10, atol=1e-12)
    *_, (_, backward) = loop_calls(plan.program.graph)
    in_body = {n.target for n in backward.graph.nodes}
    assert aten.select_backward.default not in in_body
    assert aten.select_backward.default in {n.target for n in plan.program.graph.nodes}


def _program(body, target, shape):
    """A graph with one exit of a loop, of what `body` adds to two of its rows."""
    graph = fx.Graph()
    stacked = [graph.placeholder(name) for name in "ab"]
    rows = [graph.call_function(torch.ops.torchgspmd.loop_row.default, (x, "1x4")) for x in stacked]
    for row in rows:
        row.meta = {"shape": [2, 3], "dtype": torch.float32}
    value = body(graph, *rows)
    end = graph.call_function(target, (value, "1x4"))
    end.meta = {"shape": shape, "dtype": torch.float32}
    graph.output((end,))
    return graph


def _call(graph, op, args, shape):
    node = graph.call_function(op, args)
    node.meta = {"shape": shape, "dtype": torch.float32}
    return node


def test_a_sum_stays_if_its_terms_are_larger():
    def added(graph, a, b):
        return _call(graph, aten.add.Tensor, (a, b), [2, 3])

    assert sink_exits(_program(added, TOTAL, [2, 3])) is None


def test_rows_of_a_sum():
    """Both terms are zero where the other one is not: nothing is added in the body."""

    def placed(graph, a, b):
        parts = [
            _call(graph, aten.select_backward.default, (x, [2, 2, 3], 0, i), [2, 2, 3])
            for i, x in enumerate((a, b))
        ]
        return _call(graph, aten.add.Tensor, tuple(parts), [2, 2, 3])

    graph = sink_exits(_program(placed, TOTAL, [2, 2, 3]))
    names = [n.target.__name__ for n in graph.nodes if n.op == "call_function"]
    assert names == [
        *("loop_row.default", "loop_row.default", "loop_total.default", "loop_total.default"),
        *("select_backward.default", "select_backward.default", "add.Tensor"),
    ]


def test_a_stack_of_views():
    def turned(graph, a, b):
        return _call(graph, aten.transpose.int, (a, 0, -1), [3, 2])

    graph = sink_exits(_program(turned, STACK, [4, 3, 2]))
    *_, stack, turn, _ = graph.nodes
    assert stack.target is STACK and stack.meta["shape"] == [4, 2, 3]
    assert turn.args == (stack, 1, -1) and turn.meta["shape"] == [4, 3, 2]


def test_what_reads_an_exit_stands_behind_the_last_one():
    """As after a pass that casts each gradient where it is computed."""
    graph = _program(
        lambda graph, a, b: graph.call_function(aten.mul.Tensor, (a, b)), TOTAL, [2, 3]
    )
    output = graph.output_node()
    (first,) = output.args[0]
    with graph.inserting_before(output):
        cast = graph.call_function(aten.neg.default, (first,))
        view = graph.call_function(aten.permute.default, (cast, [1, 0]))
        last = graph.call_function(STACK, first.args)
    cast.meta, view.meta = dict(first.meta), dict(first.meta) | {"shape": [3, 2]}
    last.meta = {"shape": [4, 2, 3], "dtype": torch.float32}
    output.args = ((view, last),)
    sink_exits(graph)
    names = [node.name for node in graph.nodes]
    assert names[-4:] == [last.name, cast.name, view.name, "output"]
    graph.lint()
