"""Rows of a batch of one are indexed along the first dimension: the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.testing._internal.common_utils import TestCase

from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.lower.local_rewrites import index_rows


def program(batch: int, dim: int = 1, known: bool = True) -> fx.Graph:
    """x, index, source -> rows of x by the index, and x with the source added at the index."""
    graph = fx.Graph()
    x, index, source = map(graph.placeholder, ("x", "index", "source"))
    x.meta = {"shape": [batch, 5, 4], "dtype": torch.float32}
    source.meta = {"shape": [batch, 5, 4], "dtype": torch.float32} if known else {}
    index.meta = {"shape": [batch, 5, 1], "dtype": torch.int64}
    wide = graph.call_function(aten.expand.default, (index, [-1, -1, 4]))
    wide.meta = {"shape": [batch, 5, 4], "dtype": torch.int64}
    rows = graph.call_function(aten.gather.default, (x, dim, wide))
    added = graph.call_function(aten.scatter_add.default, (x, dim, wide, source))
    rows.meta = added.meta = dict(x.meta)
    graph.output((rows, added))
    return graph


def dims(graph: fx.Graph) -> list[int]:
    """Return the dimensions that are indexed, after seeing that the results are the same."""
    batch = next(iter(graph.nodes)).meta["shape"][0]
    torch.manual_seed(0)
    inputs = torch.randn(batch, 5, 4), torch.randint(4, (batch, 5, 1)), torch.randn(batch, 5, 4)
    want = fx.GraphModule({}, graph)(*inputs)
    index_rows(graph).lint()
    for got, expected in zip(fx.GraphModule({}, graph)(*inputs), want, strict=True):
        assert got.shape == expected.shape and torch.equal(got, expected)
    indexed = aten.gather.default, aten.scatter_add.default
    assert all("shape" in n.meta for n in graph.nodes if n.op == "call_function")
    return [n.args[1] for n in graph.nodes if n.target in indexed]


def test_a_batch_of_one() -> None:
    assert dims(program(1)) == [0, 0]


@pytest.mark.parametrize("options", [{"batch": 2}, {"batch": 1, "dim": 2}], ids=str)
def test_others_stay(options) -> None:
    assert dims(program(**options)) == [options.get("dim", 1)] * 2


def test_unknown_sizes_stay() -> None:
    assert dims(program(1, known=False)) == [0, 1]


class TestGolden(TestCase):
    maxDiff = None

    def test_code(self) -> None:
        self.assertExpectedInline(
            index_rows(program(1)).python_code("self").src.strip(),
            """\
def forward(self, x, index, source):
    expand_default = torch.ops.aten.expand.default(index, [-1, -1, 4]);  index = None
    squeeze_dims = torch.ops.aten.squeeze.dims(x, [0])
    squeeze_dims_1 = torch.ops.aten.squeeze.dims(expand_default, [0])
    gather_default_1 = torch.ops.aten.gather.default(squeeze_dims, 0, squeeze_dims_1);  squeeze_dims = squeeze_dims_1 = None
    unsqueeze_default = torch.ops.aten.unsqueeze.default(gather_default_1, 0);  gather_default_1 = None
    squeeze_dims_2 = torch.ops.aten.squeeze.dims(x, [0]);  x = None
    squeeze_dims_3 = torch.ops.aten.squeeze.dims(expand_default, [0]);  expand_default = None
    squeeze_dims_4 = torch.ops.aten.squeeze.dims(source, [0]);  source = None
    scatter_add_default_1 = torch.ops.aten.scatter_add.default(squeeze_dims_2, 0, squeeze_dims_3, squeeze_dims_4);  squeeze_dims_2 = squeeze_dims_3 = squeeze_dims_4 = None
    unsqueeze_default_1 = torch.ops.aten.unsqueeze.default(scatter_add_default_1, 0);  scatter_add_default_1 = None
    return (unsqueeze_default, unsqueeze_default_1)""",
        )
