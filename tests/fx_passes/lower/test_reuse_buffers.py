"""What is written over an operand, and what must not be: the same numbers, inputs and results
untouched.
"""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import TestCase
from torch import fx

from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.lower.reuse_buffers import ADAM, reuse_buffers
from torchgspmd.rules.custom_ops.updates import adam_

F32 = {"shape": (4, 6), "dtype": torch.float32}


class Program:
    """A graph over two inputs of 4 x 6 numbers; its values have that shape unless told."""

    def __init__(self):
        self.graph = fx.Graph()
        self.x, self.y = (self.graph.placeholder(name) for name in "xy")
        self.x.meta = self.y.meta = F32

    def __call__(self, op, *args, meta: dict = F32, **kwargs) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        node.meta = dict(meta)
        return node

    def written(self, *results: fx.Node) -> int:
        """How many results lie over an operand, after seeing that nothing else has changed."""
        self.graph.output(results)
        torch.manual_seed(0)
        inputs = torch.randn(4, 6), torch.randn(4, 6)
        want = fx.GraphModule({}, self.graph)(*inputs)
        kept = [t.clone() for t in (*inputs, *want)]
        module = fx.GraphModule({}, reuse_buffers(self.graph))
        module.graph.lint()
        got = module(*inputs)
        assert all(torch.equal(a, b) for a, b in zip((*inputs, *got), kept, strict=True))
        return sum(
            str(n.target).split(".")[1].endswith("_")
            for n in self.graph.nodes
            if str(n.target).startswith("aten.")
        )


def test_chain() -> None:
    p = Program()
    assert p.written(p(aten.tanh.default, p(aten.add.Tensor, p(aten.neg.default, p.x), p.y))) == 2


def test_second_operand_of_a_sum_but_not_of_a_difference() -> None:
    p = Program()
    assert p.written(p(aten.add.Tensor, p.x, p(aten.neg.default, p.y))) == 1
    p = Program()
    assert p.written(p(aten.sub.Tensor, p.x, p(aten.neg.default, p.y))) == 0


def test_through_views() -> None:
    p = Program()
    made = p(aten.reshape.default, p(aten.neg.default, p.x), [6, 4], meta={})
    assert p.written(p(aten.add.Tensor, p(aten.reshape.default, made, [4, 6]), p.y)) == 1


def test_scatter_into_zeros() -> None:
    p = Program()
    zeros = p(aten.full.default, [4, 6], 0.0)
    index = p(
        aten.zeros_like.default, p(aten.reshape.default, p.x, [4, 6]), dtype=torch.int64, meta={}
    )
    assert p.written(p(aten.scatter.src, zeros, 1, index, p.y)) == 1


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor])
def test_what_is_passed_in_is_kept(op) -> None:
    p = Program()
    assert p.written(p(op, p.x, p.y)) == 0
    p = Program()
    assert p.written(p(op, p(aten.reshape.default, p.x, [4, 6]), p.y)) == 0


def test_what_is_read_later_is_kept() -> None:
    p = Program()
    made = p(aten.neg.default, p.x)
    sums = p(aten.add.Tensor, made, p.y)
    assert p.written(p(aten.div.Tensor, sums, made)) == 1  # over `sums` alone


def test_what_is_read_later_under_another_name_is_kept() -> None:
    p = Program()
    made = p(aten.neg.default, p.x)
    view = p(aten.transpose.int, made, 0, 1, meta={})
    sums = p(aten.add.Tensor, made, p.y)
    assert p.written(sums, p(aten.exp.default, view, meta={})) == 0


def test_what_is_returned_is_kept() -> None:
    p = Program()
    made = p(aten.neg.default, p.x)
    assert p.written(made, p(aten.add.Tensor, made, p.y)) == 0
    p = Program()
    made = p(aten.neg.default, p.x)
    assert (
        p.written(p(aten.reshape.default, made, [24], meta={}), p(aten.add.Tensor, made, p.y)) == 0
    )


def test_what_a_result_lies_over_is_not_written_while_that_is_read() -> None:
    p = Program()
    sums = p(aten.add.Tensor, p(aten.neg.default, p.x), p.y)  # over the negation
    product = p(aten.mul.Tensor, p(aten.reshape.default, sums, [4, 6]), p.y)
    assert p.written(product, sums) == 1


def test_an_operand_that_is_read_twice_at_once_is_kept() -> None:
    p = Program()
    made = p(aten.neg.default, p.x, meta={"shape": (4, 6), "dtype": torch.float32})
    other = p(aten.reshape.default, p(aten.transpose.int, made, 0, 1, meta={}), [4, 6])
    assert p.written(p(aten.add.Tensor, made, other)) == 0


def test_an_operand_that_is_read_elsewhere_at_once_is_kept() -> None:
    p = Program()
    made = p(aten.neg.default, p.x)
    index = p(aten.full.default, [4, 6], 2, meta={"shape": (4, 6), "dtype": torch.int64})
    assert p.written(p(aten.scatter.src, made, 1, index, made)) == 0
    p = Program()
    made = p(aten.full.default, [4], 2, meta={"shape": (4,), "dtype": torch.int64})
    numbers = p(aten.full.default, [4], 1, meta={"shape": (4,), "dtype": torch.int64})
    assert p.written(p(aten.index_put.default, made, [made], numbers, meta=made.meta)) == 0


def test_values_that_are_repeated_are_not_written() -> None:
    p = Program()
    row = p(aten.sum.dim_IntList, p.x, [0], True, meta={"shape": (1, 6), "dtype": torch.float32})
    assert p.written(p(aten.add.Tensor, p(aten.expand.default, row, [4, 6]), p.y)) == 0


def test_other_types_and_shapes_are_not_written() -> None:
    p = Program()
    row = p(aten.sum.dim_IntList, p.x, [0], True, meta={"shape": (1, 6), "dtype": torch.float32})
    assert p.written(p(aten.add.Tensor, row, p.y)) == 0
    p = Program()
    assert (
        p.written(
            p(
                aten.gt.Tensor,
                p(aten.neg.default, p.x),
                p.y,
                meta={"shape": (4, 6), "dtype": torch.bool},
            )
        )
        == 0
    )


def test_sizes_that_depend_on_values_are_not_trusted() -> None:
    p = Program()
    made = p(aten.neg.default, p.x, meta=F32 | {"dynamic": True})
    assert p.written(p(aten.add.Tensor, made, p.y)) == 0


def test_one_of_several_results() -> None:
    p = Program()
    norm = p(aten.native_layer_norm.default, p.x, [6], None, None, 1e-5, meta={})
    first, again, mean = (p(operator.getitem, norm, i) for i in (0, 0, 1))
    assert p.written(p(aten.add.Tensor, first, p.y), mean, again) == 0
    p = Program()
    norm = p(aten.native_layer_norm.default, p.x, [6], None, None, 1e-5, meta={})
    first, mean = (p(operator.getitem, norm, i) for i in (0, 1))
    assert p.written(p(aten.add.Tensor, first, p.y), mean) == 1


def test_what_is_on_its_way_is_kept() -> None:
    """Between the start of a collective and its wait its operand belongs to it, under all its
    names.
    """
    p = Program()
    made = p(aten.neg.default, p.x)
    started = p(c10d.all_gather_into_tensor.default, made, 2, "0", meta={})
    sums = p(aten.add.Tensor, made, p.y)
    p.graph.output((sums, p(c10d.wait_tensor.default, started, meta={})))
    assert (
        sums.target is aten.add.Tensor
        and reuse_buffers(p.graph) is p.graph
        and sums.target is aten.add.Tensor
    )


def test_after_the_wait_it_is_free() -> None:
    p = Program()
    made = p(aten.neg.default, p.x)
    waited = p(
        c10d.wait_tensor.default,
        p(c10d.all_gather_into_tensor.default, made, 2, "0", meta={}),
        meta={},
    )
    used = p(aten.exp.default, waited, meta={})
    sums = p(aten.add.Tensor, made, p.y)
    p.graph.output((sums, used))
    reuse_buffers(p.graph)
    assert sums.target is aten.add_.Tensor


def changing(p: Program, changed: dict[fx.Node, fx.Node]) -> set[str]:
    """Names of the inputs that lie where they were after a run, which computes their new values."""
    values = tuple(changed.values())
    p.graph.output(values)
    inputs = [torch.rand(4, 6), torch.rand(4, 6)]
    want = fx.GraphModule({}, p.graph)(*(t.clone() for t in inputs))
    module = fx.GraphModule({}, reuse_buffers(p.graph, changed))
    module.graph.lint()
    placed = dict(zip((p.x, p.y), inputs))
    for old, new, expected in zip(changed, module(*inputs), want, strict=True):
        placed[old].copy_(new)  # as the caller does, in this order
        torch.testing.assert_close(placed[old], expected)
    values = p.graph.output_node().args[0]
    return {old.name for old, new in zip(changed, values) if _written_over(new) is old}


def _written_over(value: fx.Node) -> fx.Node:
    while "_." in str(value.target):
        value = value.args[0]
    return value


def test_new_values_of_inputs_are_written_over_them() -> None:
    p = Program()
    moved = p(aten.add.Tensor, p(aten.mul.Tensor, p.x, 0.9), p.y)
    assert changing(p, {p.x: moved}) == {"x"}


def test_rows_of_a_cache_are_written_to_the_cache() -> None:
    p = Program()
    row = p(aten.arange.default, 1, meta={"shape": (1,), "dtype": torch.int64})
    new = p(aten.narrow.default, p.y, 0, 2, 1, meta={"shape": (1, 6), "dtype": torch.float32})
    assert changing(p, {p.x: p(aten.index_copy.default, p.x, 0, row, new)}) == {"x"}


def test_an_input_is_not_written_before_it_is_read() -> None:
    p = Program()
    new = p(aten.add.Tensor, p.x, p.y)
    assert changing(p, {p.x: new, p.y: p(aten.mul.Tensor, p.y, p.x)}) == {"y"}


def test_an_input_is_not_written_by_the_value_of_another() -> None:
    p = Program()
    new = {p.x: p(aten.neg.default, p.y)}
    assert changing(p, new | {p.y: p(aten.neg.default, p.x)}) == set()


def stepped(p: Program, w: fx.Node, g: fx.Node) -> dict[int, fx.Node]:
    one = p(aten.full.default, [], 1.0, meta={"shape": (), "dtype": torch.float32})
    one = next((n for n in p.graph.nodes if n.target is aten.full.default), one)
    u = p(ADAM, w, g, p.y, p.y, one, one, 0.9, 0.99, 0.0, 1e-8, True, False, meta={})
    return {i: p(operator.getitem, u, i) for i in range(3)}


def test_a_step_of_adam_is_in_place() -> None:
    p = Program()
    g = p(aten.neg.default, p.x)
    assert changing(p, {p.x: stepped(p, p.x, g)[0]}) == {"x"}
    (call,) = [n for n in p.graph.nodes if n.target is adam_]
    assert [n.target for n in (*call.args[2], *call.args[3])] == [aten.clone.default] * 2


def test_steps_between_two_waits_are_one_call() -> None:
    for waits in (0, 1):
        p = Program()
        first = stepped(p, p.x, p(aten.neg.default, p.x))[0]
        for _ in range(waits):
            p(c10d.wait_tensor.default, p.y, meta={})
        second = stepped(p, p(aten.exp.default, p.y), p(aten.neg.default, p.y))[0]
        assert changing(p, {p.x: first, p.y: second}) == {"x"}
        assert sum(n.target is adam_ for n in p.graph.nodes) == 1 + waits


class TestGolden(TestCase):
    maxDiff = None

    def test_code(self):
        p = Program()
        made = p(
            aten.mm.default,
            p(aten.transpose.int, p.x, 0, 1, meta={}),
            p.y,
            meta={"shape": (6, 6), "dtype": torch.float32},
        )
        p.graph.output(
            (p(aten.add.Tensor, p.x, p(aten.mul.Tensor, p(aten.neg.default, p.y), 2.0)), made)
        )
        self.assertExpectedInline(
            reuse_buffers(p.graph).python_code("self").src.strip(),
            """\
def forward(self, x, y):
    transpose_int = torch.ops.aten.transpose.int(x, 0, 1)
    mm_default = torch.ops.aten.mm.default(transpose_int, y);  transpose_int = None
    neg_default = torch.ops.aten.neg.default(y);  y = None
    mul_tensor = torch.ops.aten.mul_.Tensor(neg_default, 2.0);  neg_default = None
    add_tensor = torch.ops.aten.add_.Tensor(mul_tensor, x);  mul_tensor = x = None
    return (add_tensor, mm_default)""",
        )
