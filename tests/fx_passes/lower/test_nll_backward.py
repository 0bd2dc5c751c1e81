"""The gradient of cross entropy without its zeros: the same numbers, and only where a row has one
of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx

from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.lower.local_rewrites import nll_backward


def program(
    shape: list[int],
    dim: int,
    dtype: torch.dtype = torch.float32,
    per_row: int = 1,
    fill: float = 0.0,
    used: bool = False,
) -> fx.Graph:
    """y, index, value -> the gradient that has the values at these places, before the log softmax
    along dim that gave y.
    """
    graph = fx.Graph()
    y, index, value = map(graph.placeholder, ("y", "index", "value"))
    part = [*shape]
    part[dim] = per_row
    y.meta, index.meta, value.meta = (
        {"shape": s, "dtype": t} for s, t in ((shape, dtype), (part, torch.int64), (part, dtype))
    )
    zeros = graph.call_function(aten.full.default, (shape, fill), {"dtype": dtype})
    scattered = graph.call_function(aten.scatter.src, (zeros, dim, index, value))
    result = graph.call_function(
        aten._log_softmax_backward_data.default, (scattered, y, dim, dtype)
    )
    for node in (zeros, scattered, result):
        node.meta = dict(y.meta)
    graph.output((result, scattered) if used else (result,))
    return graph


def compared(graph: fx.Graph) -> bool:
    """Whether it was rewritten, after seeing that its results are the same up to the rounding of a
    product.
    """
    y, index, value = (n.meta for n in graph.find_nodes(op="placeholder"))
    torch.manual_seed(0)
    inputs = [
        torch.randn(y["shape"], dtype=y["dtype"]).log_softmax(1),
        torch.randint(y["shape"][1], index["shape"]),
        torch.randn(value["shape"], dtype=y["dtype"]),
    ]
    inputs[2].flatten()[0] = 0  # a row that is ignored
    want, kept = fx.GraphModule({}, graph)(*inputs), [x.clone() for x in inputs]
    nll_backward(graph).lint()
    for got, expected in zip(fx.GraphModule({}, graph)(*inputs), want, strict=True):
        four_roundings = 4 * torch.finfo(y["dtype"]).eps * inputs[2].abs().max().item()
        assert got.dtype == expected.dtype and torch.allclose(
            got, expected, rtol=0, atol=four_roundings
        )
    assert all(map(torch.equal, inputs, kept))
    return not graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [[6, 9], [2, 9, 3, 4]])
def test_one_number_a_row(shape, dtype):
    assert compared(program(shape, 1, dtype))


@pytest.mark.parametrize(
    "options", [{"dtype": torch.bfloat16}, {"per_row": 2}, {"fill": 1.0}, {"used": True}], ids=str
)
def test_others_stay(options):
    assert not compared(program([6, 9], 1, **options))
