"""Each value that is saved for the backward is a tensor."""

from operator import getitem

import torch
from torch import fx

from torchgspmd.fx_passes.lower.convert_boundary import split_joint

aten = torch.ops.aten


def test_results_of_an_operation_are_saved_one_by_one():
    """It is marked as one of the backward, but the forward returns a result of it."""
    graph = fx.Graph()
    x, tangent = map(graph.placeholder, ("x", "tangent"))
    both = graph.call_function(aten.sort.default, (x,))
    both.meta["backward"] = True
    values, places = (graph.call_function(getitem, (both, i)) for i in (0, 1))
    gradient = graph.call_function(aten.gather.default, (tangent, 0, places))
    graph.output((values, gradient))
    forward, backward = split_joint(graph, tangents=1, gradients=1)
    assert [n.name for n in forward.output_node().args[0]] == [values.name, places.name]
    assert [n.name for n in backward.find_nodes(op="placeholder")] == [places.name, "tangent"]
