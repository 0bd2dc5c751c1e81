"""Nodes of torch.fx graphs, added without torch's search of their arguments for symbols.

`Graph.create_node` of torch 2.13 flattens all arguments to warn of symbols among them: 6 of 10 us.
Programs have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx


def add_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    name: str | None = None,
) -> fx.Node:
    """Add a node at the insert point of a graph, as `Graph.create_node` does."""
    node: Any = graph.create_node(op, target, None, None, name)
    node._update_args_kwargs(args, kwargs)
    return node


def copy_node(
    graph: fx.Graph, node: fx.Node, new: Callable[[fx.Node], Any] = lambda node: node
) -> fx.Node:
    """Add a copy of a node, as `Graph.node_copy` does. new: what its operands are there."""
    args, kwargs = fx.map_arg(node.args, new), fx.map_arg(node.kwargs, new)
    result = add_node(graph, node.op, node.target, args, kwargs, node.name)
    result.meta.update(node.meta)
    return result


def drop_unused(graph: fx.Graph) -> None:
    """Erase nodes without users, as `Graph.eliminate_dead_code` does, which checks all first."""
    nodes: Any = graph.nodes
    for node in reversed(nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def inline(
    graph: fx.Graph, inner: fx.Graph, inputs: Sequence[fx.Node], meta: Mapping[str, Any]
) -> Any:
    """Copy a graph of calls to the insert point of another one. Return what its output has.

    inputs: in place of its placeholders. meta: of all copies, besides their values.
    """
    values: dict[fx.Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), inputs))
    for step in inner.nodes:
        if step.op == "call_function":
            values[step] = graph.node_copy(step, values.__getitem__)
            values[step].meta = {**meta, "val": step.meta["val"]}
    return fx.map_arg(inner.output_node().args[0], values.__getitem__)
