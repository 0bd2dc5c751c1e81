"""No program writes to memory of its caller."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.lower.reduce_in_bucket import BucketMemory
from torchgspmd.fx_passes.lower.verify_in_flight import verify_owned
from torchgspmd.rules.custom_ops.updates import adam_

VIEWS = (
    lambda g, x: x,
    lambda g, x: g.call_function(aten.reshape.default, (x, [-1])),
    lambda g, x: g.call_function(aten.contiguous.default, (x,)),
    lambda g, x: g.call_function(aten._unsafe_view.default, (x, [-1])),
    lambda g, x: g.call_function(
        operator.getitem, (g.call_function(aten.split_with_sizes.default, (x, [2, 2])), 1)
    ),
    lambda g, x: g.call_function(len, (x,)),  # any function of Python
)
WRITES = (
    lambda g, x: g.call_function(aten.add_.Tensor, (x, 1)),
    lambda g, x: g.call_function(torch.Tensor.mul_, (x, 1)),
    lambda g, x: g.call_function(torch.ops._c10d_functional.all_reduce_.default, (x, "sum", "0")),
    lambda g, x: (
        g.call_function(torch.mm, (g.call_function(aten.ones.default, ([2, 2],)),) * 2)
        and g.call_function(torch.mm, (1, 2), {"out": x})
    ),
    lambda g, x: g.call_function(torch._foreach_copy_, ([x], [1])),
    lambda g, x: g.call_function(adam_, ([1], [2], [x], [3])),
)


def graph_of(view, write, allocate: bool, source: str = "placeholder"):
    g = fx.Graph()
    x = getattr(g, source)("x")
    base = g.call_function(aten.relu.default, (x,)) if allocate else x
    g.output((write(g, view(g, base)),))
    return g, x


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_through_any_view_of_an_input_is_refused(view, write):
    verify_owned(graph_of(view, write, allocate=True)[0])
    g, x = graph_of(view, write, allocate=False)
    with pytest.raises(AssertionError, match="which may lie in the memory of %x"):
        verify_owned(g)
    verify_owned(g, changed=[x])


def test_what_is_beside_a_written_operand_stays():
    g = fx.Graph()
    x = g.placeholder("x")
    y = g.call_function(aten.add_.Tensor, (g.call_function(aten.relu.default, (x,)), x))
    z = g.call_function(aten.mul_.Tensor, (y, x))
    bucket = g.call_function(BucketMemory().empty, (x, 4, torch.float32))
    g.output((g.call_function(aten.add_.Tensor, (bucket, z)),))
    verify_owned(g)
