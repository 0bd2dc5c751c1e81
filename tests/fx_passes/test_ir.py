"""Operations of a graph are looked up once, and again where something has changed."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torchgspmd import Mesh
from torchgspmd.capture import capture
from torchgspmd.fx_passes.ir import Op, Rules


def test_operations_of_one_graph_are_looked_up_again_where_they_changed() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu().exp()

    graph = capture(program, (torch.ones(2, 4), torch.ones(4, 8)), {}, Mesh(data=2)).graph
    rules = Rules()

    def ops() -> dict[str, Op]:
        return {op.node.name: op for op in rules.ops(graph)}

    def changed(before: dict[str, Op], after: dict[str, Op]) -> list[str]:
        return [name for name, op in after.items() if before.get(name) is not op]

    first = ops()
    assert len(first) == 3 and changed(first, ops()) == []

    *_, relu, exp = first.values()
    with graph.inserting_after(relu.node):  # another argument, of the same shape
        other = graph.call_function(torch.ops.aten.neg.default, (relu.node,))
    other.meta = dict(relu.node.meta)
    exp.node.args = (other,)
    second = ops()
    assert changed(first, second) == ["neg_default", "exp"]
    assert second["exp"].operands == (other,)

    exp.node.meta["val"] = exp.node.meta["val"].double()  # another result
    third = ops()
    assert changed(second, third) == ["exp"]

    other.meta["val"] = other.meta["val"].double()  # of a node, and of who uses it
    fourth = ops()
    assert changed(third, fourth) == ["neg_default", "exp"]
    assert fourth["exp"].key != third["exp"].key

    exp.node.meta["runs"] = 4
    assert ops()["exp"].key != fourth["exp"].key
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    assert not {*rules.ops(copy)} & {*rules.ops(graph)}
