"""Decompositions are traced: the operations called, at the shapes of fake tensors."""

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchgspmd.compat.operators import aten
from torchgspmd.rules import trace


def fakes(*shapes):
    with FakeTensorMode():
        return [torch.empty(shape) for shape in shapes]


def steps(graph):
    """The operations in order, with the shapes of what they make."""
    return [
        (node.target, tuple(node.meta["val"].shape))
        for node in graph.nodes
        if node.op == "call_function"
    ]


def test_composite_operations_are_taken_apart_and_detach_is_nothing():
    (x,) = fakes((2, 3, 4))
    graph = trace(lambda x: torch.flatten(x.detach(), 1).square(), (x,), {})
    assert steps(graph) == [(aten.view.default, (2, 12)), (aten.pow.Tensor_Scalar, (2, 12))]


def test_several_results_are_taken_by_their_place():
    (x,) = fakes((2, 3))
    nodes = {node.target: node for node in trace(lambda x: torch.sort(x, 1)[1], (x,), {}).nodes}
    assert nodes[operator.getitem].args == (nodes[aten.sort.default], 1)
    assert nodes["output"].args == (nodes[operator.getitem],)


def test_what_is_changed_in_place_is_the_changed_value_from_then_on():
    (x,) = fakes((2, 3))

    def doubled(x):
        made = torch.zeros_like(x)
        made.add_(x)
        return made + made

    *_, changed, total, out = trace(doubled, (x,), {}).nodes
    assert (
        changed.target is aten.add_.Tensor
        and total.args == (changed, changed)
        and out.args == (total,)
    )


def test_one_tensor_given_twice_stands_for_any_two():
    (x,) = fakes((2, 3))
    first, second, product, _ = trace(torch.mul, (x, x), {}).nodes
    assert product.args == (first, second)


def test_tensors_of_values_of_their_own_have_no_graph():
    (x,) = fakes((2,))
    inside = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError):
        trace(lambda x: x + inside, (x,), {})


def test_autocast_around_it_is_not_seen():
    x, w = fakes((2, 3), (3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = trace(torch.mm, (x, w), {})
    assert steps(product) == [(aten.mm.default, (2, 4))]
