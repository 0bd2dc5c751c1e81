"""Gathered weights are the same, by one copy or by one for each weight."""

from __future__ import annotations

import math
import operator
import random

import pytest
import torch
from torch import fx

from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.lower.reduce_in_bucket import Interleaved, interleave_rows

DTYPES = torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn


def gathered(count: int, shapes: list[tuple[int, int]], dims: list[int]) -> fx.Graph:
    """Return weights that `count` devices have shards of, as lowered all_gathers bring them."""
    graph, sizes = fx.Graph(), [*map(math.prod, shapes)]
    x = graph.placeholder("x")
    rows = graph.call_function(aten.reshape.default, (x, [count, sum(sizes)]))
    pieces = graph.call_function(aten.split_with_sizes.default, (rows, sizes, 1))
    results = []
    for i, ((n, m), dim) in enumerate(zip(shapes, dims)):
        piece = graph.call_function(operator.getitem, (pieces, i))
        if dim:
            stacked = graph.call_function(aten.reshape.default, (piece, [count, n, m]))
            piece = graph.call_function(aten.permute.default, (stacked, [1, 0, 2]))
        shape = [n, count * m] if dim else [count * n, m] if m > 1 else [count * n]
        whole = graph.call_function(aten.reshape.default, (piece, shape))
        results.append(graph.call_function(aten.contiguous.default, (whole,)))
    results.append(graph.call_function(aten.neg.default, (piece,)))
    graph.output(tuple(results))
    return graph


@pytest.mark.parametrize("seed", range(20))
def test_random_weights(seed: int) -> None:
    draw = random.Random(seed)
    count, together = draw.choice((2, 3, 4)), draw.choice((1, 16, 32))
    shapes = [(together * draw.randint(1, 4), draw.choice((1, 1, 8))) for _ in range(6)]
    graph = gathered(count, shapes, [draw.choice((0, 0, 1)) for _ in shapes])
    x = torch.arange(count * sum(map(math.prod, shapes)), dtype=torch.float32)
    wanted = fx.Interpreter(fx.GraphModule({}, graph)).run(x)
    interleave_rows(graph)
    graph.lint()
    found = fx.Interpreter(fx.GraphModule({}, graph)).run(x)
    assert all(map(torch.equal, found, wanted)) and all(each.is_contiguous() for each in found[:-1])
    is_one = any(isinstance(getattr(n.target, "__self__", 0), Interleaved) for n in graph.nodes)
    assert is_one == (math.gcd(*map(math.prod, shapes)) >= 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    rows = torch.arange(2 * 48).view(2, 48).to(dtype)
    found = Interleaved(2, [32, 16]).interleave(rows)
    wanted = torch.cat([rows[:, :32].reshape(-1), rows[:, 32:].reshape(-1)])
    assert found.dtype is dtype and torch.equal(found.float(), wanted.float())
