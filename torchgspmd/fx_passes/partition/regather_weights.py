"""Gather weights a second time for the backward, instead of keeping the forward's.

before   %w_g = all_gather(%w, 0, data);    %y = einsum(%x, %w_g);    %dx = einsum(%dy, %w_g)
after    %w_g = all_gather(%w, 0, data);    %y = einsum(%x, %w_g)
         %w_g_1 = all_gather(%w, 0, data);  %dx = einsum(%dy, %w_g_1)
needs    the partitioned program; meta["backward"]
ensures  no gathered input, nor a cast or view of one, lives from the forward to the backward
source   reshard_after_forward in PyTorch's FSDP2; ZeRO (arXiv 1910.02054), stage 3
"""

from __future__ import annotations

from torch import fx

from ...compat.fx_nodes import copy_node


def regather_weights(graph: fx.Graph, activations: bool = False) -> fx.Graph:
    """Rewrite the graph in place and return it.

    activations: also gather again the activations that the forward gathered, as a long context's
    keys.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    # gathered value -> the first node of the backward that needs it
    gathered: dict[fx.Node, fx.Node | None] = {}
    for node in order:
        if (
            node.op == "call_function"
            and not node.meta.get("backward")
            and (activations or _depends_on_one_input(node))
            and (
                _gathers(node)
                or node.args
                and node.args[0] in gathered
                and len(node.all_input_nodes) == 1
            )
        ):
            gathered[node] = None
    # Backwards: a gather is needed where the first of the values computed from it is.
    for node in reversed(gathered):
        needed = [
            gathered[u] if u in gathered else u
            for u in node.users
            if u in gathered or u.meta.get("backward")
        ]
        gathered[node] = min(filter(None, needed), key=order.__getitem__, default=None)
    copies: dict[fx.Node, fx.Node] = {}
    for node, before in gathered.items():
        if before is None:
            continue
        late = [u for u in node.users if u.meta.get("backward")]
        with graph.inserting_before(before):
            copies[node] = copy_node(graph, node, lambda n: copies.get(n, n))
        copies[node].meta = {**node.meta, "backward": True}
        for user in late:
            user.replace_input_with(node, copies[node])
    return graph


def _gathers(node: fx.Node) -> bool:
    """Return whether a collective gathers: a permutation may, from two axes to none."""
    if "step" not in node.meta:
        return False
    before, after = (value.meta["spec"].sharding_axes for value in (node.args[0], node))
    return {*after} < {*before}


def _depends_on_one_input(node: fx.Node) -> bool:
    """Return whether a value is computed from one input by operations on one tensor each."""
    while node.op == "call_function":
        if len(node.all_input_nodes) != 1 or node.args[0] is not node.all_input_nodes[0]:
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
