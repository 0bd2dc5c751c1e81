"""Split a joint program into the forward, and the backward of the values that it saves.

before   one graph whose nodes say whether they belong to the backward
after    forward: inputs -> outputs, saved values;  backward: saved values, cotangents -> gradients
needs    meta["backward"]; cotangents are the last inputs, gradients the last outputs

The recomputation of a checkpointed region is part of the backward already (capture records it so).
"""

from __future__ import annotations

from torch import fx


def split_joint(graph: fx.Graph, tangents: int, gradients: int) -> tuple[fx.Graph, fx.Graph]:
    """Return (forward, backward), given the numbers of cotangents and gradients."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    cotangents = set(placeholders[len(placeholders) - tangents :])
    returned = graph.output_node().args[0]
    outputs, grads = returned[: len(returned) - gradients], returned[len(returned) - gradients :]
    late = set(cotangents)
    for node in graph.nodes:
        if node.op == "call_function" and (
            node.meta.get("backward") or any(n in late for n in node.all_input_nodes)
        ):
            late.add(node)
    _move_to_forward(outputs, late)
    saved = _saved_values(graph, late, grads)
    forward, backward = fx.Graph(), fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output" and node not in late:
            new[node] = forward.node_copy(node, new.__getitem__)
    forward.output(
        (*(new[o] if isinstance(o, fx.Node) else o for o in outputs), *(new[s] for s in saved))
    )
    later = {}
    for value in (*saved, *placeholders[len(placeholders) - tangents :]):
        later[value] = backward.placeholder(value.name)
        later[value].meta = dict(value.meta)
    for node in graph.nodes:
        if node.op == "get_attr" and any(user in late for user in node.users):
            later[node] = backward.node_copy(node)
        elif node in late and node not in cotangents:
            later[node] = backward.node_copy(node, later.__getitem__)
    backward.output(tuple(later[g] if isinstance(g, fx.Node) else g for g in grads))
    forward.eliminate_dead_code()
    backward.eliminate_dead_code()
    return forward, backward


def _move_to_forward(outputs: tuple, late: set[fx.Node]) -> None:
    """Remove from `late` all that the outputs of the forward need, whatever their metadata says."""
    stack = [o for o in outputs if isinstance(o, fx.Node)]
    while stack:
        node = stack.pop()
        if node in late and node.op == "call_function":
            late.discard(node)
        stack.extend(n for n in node.all_input_nodes if n in late and n.op == "call_function")


def _saved_values(graph: fx.Graph, late: set[fx.Node], grads: tuple) -> list[fx.Node]:
    """Return the values of the forward that the backward uses, in program order."""
    returned = {g for g in grads if isinstance(g, fx.Node)}
    return [
        n
        for n in graph.nodes
        if n.op in ("placeholder", "call_function")
        and n not in late
        and (n in returned or any(user in late for user in n.users))
    ]
