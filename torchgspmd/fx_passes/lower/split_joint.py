"""Split a joint program into the forward, and the backward from the values that it saves.

before   one graph whose nodes say whether they belong to the backward
after    forward: inputs -> outputs, saved values;  backward: saved values, cotangents -> gradients
needs    meta["backward"]; cotangents are the last inputs, gradients the last outputs

A checkpointed region's recomputation is part of the backward already (capture records it so).
"""

from __future__ import annotations

from operator import getitem

from torch import fx

from ...compat.fx_nodes import copy_node, drop_unused


def split_joint(graph: fx.Graph, tangents: int, gradients: int) -> tuple[fx.Graph, fx.Graph]:
    """Return (forward, backward), given how many cotangents and gradients there are."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    cotangents = set(placeholders[len(placeholders) - tangents :])
    returned = graph.output_node().args[0]
    outputs, grads = returned[: len(returned) - gradients], returned[len(returned) - gradients :]
    backward_nodes = set(cotangents)
    for node in graph.nodes:
        # A recomputed node depends on no cotangent; its mark says where it belongs.
        if node.op == "call_function" and (
            node.meta.get("backward") or any(n in backward_nodes for n in node.all_input_nodes)
        ):
            backward_nodes.add(node)
    # An output is returned before any backward runs, whatever its mark says.
    _move_to_forward(outputs, backward_nodes)
    _move_results(graph, backward_nodes)
    saved = _saved_values(graph, backward_nodes, grads)
    forward, backward = fx.Graph(), fx.Graph()
    in_forward: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output" and node not in backward_nodes:
            in_forward[node] = copy_node(forward, node, in_forward.__getitem__)
    forward.output(
        (
            *(in_forward[o] if isinstance(o, fx.Node) else o for o in outputs),
            *(in_forward[s] for s in saved),
        )
    )
    in_backward = {}
    for value in (*saved, *placeholders[len(placeholders) - tangents :]):
        in_backward[value] = backward.placeholder(value.name)
        in_backward[value].meta = dict(value.meta)
    for node in graph.nodes:
        # A constant is not saved: each half reads it.
        if node.op == "get_attr" and any(user in backward_nodes for user in node.users):
            in_backward[node] = copy_node(backward, node)
        elif node in backward_nodes and node not in cotangents:
            in_backward[node] = copy_node(backward, node, in_backward.__getitem__)
    backward.output(tuple(in_backward[g] if isinstance(g, fx.Node) else g for g in grads))
    drop_unused(forward)
    drop_unused(backward)
    return forward, backward


def _move_to_forward(outputs: tuple, backward_nodes: set[fx.Node]) -> None:
    """Remove from `backward_nodes` the forward's results, and all their operands."""
    stack = [o for o in outputs if isinstance(o, fx.Node)]
    while stack:
        node = stack.pop()
        if node in backward_nodes and node.op == "call_function":
            backward_nodes.discard(node)
        stack.extend(
            n for n in node.all_input_nodes if n in backward_nodes and n.op == "call_function"
        )


def _move_results(graph: fx.Graph, backward_nodes: set[fx.Node]) -> None:
    """Remove results of forward operations, which are saved one by one."""
    for node in graph.nodes:
        # A tuple cannot be saved, only the tensors in it.
        if node.target is getitem and node.args[0] not in backward_nodes:
            backward_nodes.discard(node)


def _saved_values(graph: fx.Graph, backward_nodes: set[fx.Node], grads: tuple) -> list[fx.Node]:
    """Return the forward values that the backward uses, in program order."""
    returned = {g for g in grads if isinstance(g, fx.Node)}
    return [
        n
        for n in graph.nodes
        if n.op in ("placeholder", "call_function")
        and n not in backward_nodes
        and (n in returned or any(user in backward_nodes for user in n.users))
    ]
