"""Copies that the lowered program does not make."""

from __future__ import annotations

import torch
from torch import fx

from torchgspmd.fx_passes.lower.local_rewrites import aten, elide_copies


def targets(build) -> list[str]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    clone = lambda value: graph.call_function(  # noqa: E731
        aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
    )
    graph.output(build(graph, x, clone))
    elide_copies(graph).lint()
    return [
        str(n.target)
        for n in graph.nodes
        if n.op == "call_function" and "relu" not in str(n.target)
    ]


def test_a_copy_of_a_value_is_made_only_where_it_is_not_contiguous():
    def build(graph, x, clone):
        view = graph.call_function(
            aten.transpose.int, (graph.call_function(aten.relu.default, (x,)), 0, 1)
        )
        return graph.call_function(aten.relu.default, (clone(view),))

    assert targets(build) == ["aten.transpose.int", "aten.contiguous.default"]


def test_results_and_inputs_stay_apart():
    def returned(graph, x, clone):
        return graph.call_function(
            aten.reshape.default, (clone(graph.call_function(aten.relu.default, (x,))), [-1])
        )

    assert targets(returned) == ["aten.clone.default", "aten.reshape.default"]

    def of_input(graph, x, clone):
        return graph.call_function(
            aten.relu.default, (clone(graph.call_function(aten.reshape.default, (x, [-1]))),)
        )

    assert targets(of_input) == ["aten.reshape.default", "aten.clone.default"]
