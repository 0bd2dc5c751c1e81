"""separate_sums: a product in front of a message is not merged with a sum behind it."""

from __future__ import annotations

import torch
from torch import fx

from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.lower.local_rewrites import separate_sums


def program(far: bool, users: int = 1) -> fx.Graph:
    """A product, a message and a sum; far: the message stands between both."""
    graph = fx.Graph()
    a, b, y = (graph.placeholder(name) for name in "aby")

    def message() -> fx.Node:
        begun = graph.call_function(c10d.all_reduce.default, (y, "sum", "0"))
        return graph.call_function(c10d.wait_tensor.default, (begun,))

    arrived = None if far else message()
    product = graph.call_function(aten.mm.default, (a, b))
    arrived = arrived or message()
    total = graph.call_function(aten.add.Tensor, (product, y))
    graph.output((total, arrived, *[product] * (users - 1)))
    for node in graph.nodes:
        node.meta["dtype"] = torch.float32
    return graph


def text(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_a_message_between() -> None:
    got = separate_sums(program(far=True))
    assert text(got)[-2:] == ["aten.neg.default", "aten.sub.Tensor"]
    got.lint()


def test_other_sums_stay() -> None:
    for graph in (program(far=False), program(far=True, users=2)):
        assert text(separate_sums(graph)) == text(graph)
        assert text(graph)[-1] == "aten.add.Tensor"


def test_the_bits_are_the_same() -> None:
    """Of signed zeros and infinities too."""
    some = torch.tensor([0.0, -0.0, 1.5, -2.25, float("inf"), 1e-45])
    a, b = some.repeat(6), some.repeat_interleave(6)
    assert torch.equal((a - -b).view(torch.int32), (a + b).view(torch.int32))
