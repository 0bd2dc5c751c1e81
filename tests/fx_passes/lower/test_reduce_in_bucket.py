"""What is reduced together is computed in the bucket: the same numbers, where it can be."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, fx

from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.lower.reduce_in_bucket import BucketMemory, reduce_in_bucket


def gradients(columns: int = 8, used: bool = False) -> fx.Graph:
    """Of a weight, a bias and a norm, reduced in one bucket; used: the term of the weight's is used
    elsewhere as well.
    """
    graph = fx.Graph()

    def call(op, *args, shape: tuple | None = None, **kwargs) -> fx.Node:
        node = graph.call_function(op, args, kwargs)
        node.meta = {"shape": shape, "dtype": torch.float32} if shape else {}
        return node

    x, dy = graph.placeholder("x"), graph.placeholder("dy")
    weight = call(aten.mm.default, call(aten.transpose.int, dy, 0, 1), x, shape=(columns, 4))
    bias = call(aten.sum.dim_IntList, dy, [0], True, shape=(1, columns))
    norm = call(aten.amax.default, x, [0], shape=(4,))
    flat = call(
        aten.cat.default, [call(aten.reshape.default, g, [-1]) for g in (weight, bias, norm)]
    )
    total = call(c10d.wait_tensor.default, call(c10d.all_reduce_.default, flat, "sum", "0"))
    parts = call(aten.split_with_sizes.default, total, [columns * 4, columns, 4], 0)
    results = [
        call(aten.reshape.default, call(operator.getitem, parts, i), shape)
        for i, shape in enumerate(([columns, 4], [columns], [4]))
    ]
    graph.output((*results, call(aten.neg.default, weight)) if used else tuple(results))
    return graph


class AloneTwice(fx.Interpreter):
    """As if another rank had the same terms."""

    def call_function(self, target, args, kwargs):
        if target is c10d.all_reduce_.default:
            return args[0].mul_(2)
        return (
            args[0]
            if target is c10d.wait_tensor.default
            else super().call_function(target, args, kwargs)
        )


def run(graph: fx.Graph, columns: int) -> list[Tensor]:
    torch.manual_seed(0)
    graph.lint()
    return AloneTwice(fx.GraphModule({}, graph)).run(torch.randn(6, 4), torch.randn(6, columns))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("columns", [8, 5, 0])
def test_the_same_numbers(columns: int, used: bool) -> None:
    want, got = (
        run(graph, columns)
        for graph in (gradients(columns, used), reduce_in_bucket(gradients(columns, used)))
    )
    assert all(torch.equal(g, w) and g.is_contiguous() for g, w in zip(got, want, strict=True))


def targets(graph: fx.Graph) -> list:
    return [n.target for n in graph.nodes if n.op == "call_function"]


def test_what_another_one_uses_is_copied() -> None:
    assert aten.mm.default in targets(reduce_in_bucket(gradients(used=True)))


@pytest.mark.parametrize("columns, written", [(8, True), (5, False)])
def test_what_does_not_begin_at_a_multiple_of_sixteen_bytes_is_copied(
    columns: int, written: bool
) -> None:
    graph = gradients(columns)
    flat, split = (
        graph.find_nodes(op="call_function", target=t)[0]
        for t in (aten.cat.default, aten.split_with_sizes.default)
    )
    flat.args, split.args = (
        ([flat.args[0][i] for i in (1, 0, 2)],),
        (split.args[0], [columns, columns * 4, 4], 0),
    )
    assert (
        aten.mm.default not in targets(reduce_in_bucket(graph))
    ) == written  # it stands behind the bias


def test_memory_that_nobody_holds_is_used_again() -> None:
    kept, like = BucketMemory(), torch.empty(0)
    bucket = kept.empty(like, 8, torch.float64)
    assert bucket.shape == (8,) and bucket.dtype == torch.float64
    place, part = bucket.data_ptr(), bucket[2:4]
    del bucket
    held = kept.empty(like, 8, torch.float64)
    assert held.data_ptr() != place  # `part` lies in the first
    del part, held
    last = kept.empty(like, 8, torch.float64)
    place = last.data_ptr()
    del last
    assert kept.empty(like, 8, torch.float64).data_ptr() == place


def test_results_that_are_kept_stay_as_they_are() -> None:
    graph = reduce_in_bucket(gradients())
    module = AloneTwice(fx.GraphModule({}, graph))
    torch.manual_seed(0)
    first = module.run(torch.randn(6, 4), torch.randn(6, 8))
    copies = [t.clone() for t in first]
    views = [t[:1] for t in first]
    del first
    module.run(torch.randn(6, 4), torch.randn(6, 8))
    assert all(torch.equal(view, copy[:1]) for view, copy in zip(views, copies, strict=True))


class TestGolden(TestCase):
    maxDiff = None

    def test_code(self):
        self.assertExpectedInline(
            reduce_in_bucket(gradients()).python_code("self").src.strip(),
            """\
def forward(self, x, dy):
    transpose_int = torch.ops.aten.transpose.int(dy, 0, 1)
    empty = torchgspmd_fx_passes_lower_reduce_in_bucket_empty(transpose_int, 44, torch.float32)
    split_with_sizes_default_1 = torch.ops.aten.split_with_sizes.default(empty, [32, 8, 4])
    getitem_3 = split_with_sizes_default_1[0]
    getitem_4 = split_with_sizes_default_1[1]
    getitem_5 = split_with_sizes_default_1[2];  split_with_sizes_default_1 = None
    reshape_default_6 = torch.ops.aten.reshape.default(getitem_3, [8, 4]);  getitem_3 = None
    mm = torch.mm(transpose_int, x, out = reshape_default_6);  transpose_int = mm = None
    sum_1 = torch.sum(dy, [0], False, out = getitem_4);  dy = sum_1 = None
    amax_default = torch.ops.aten.amax.default(x, [0]);  x = None
    _foreach_copy_ = torch._foreach_copy_([getitem_5], [amax_default]);  amax_default = _foreach_copy_ = None
    all_reduce__default = torch.ops._c10d_functional.all_reduce_.default(empty, 'sum', '0');  empty = None
    wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(all_reduce__default);  all_reduce__default = wait_tensor_default = None
    return (reshape_default_6, getitem_4, getitem_5)""",
        )
