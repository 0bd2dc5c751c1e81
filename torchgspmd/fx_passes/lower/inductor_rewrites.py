"""Rewrites of one rank's program for Inductor."""

from __future__ import annotations

from bisect import bisect

from torch import fx

from ...comm.kinds import WIRE_OPS
from ...compat.operators import aten, c10d


def functional_reductions(graph: fx.Graph) -> fx.Graph:
    """Replace in-place reductions, which Inductor does not functionalize.

    before   %r = all_reduce_(%x, sum, g)
    after    %r = all_reduce(%x, sum, g)
    needs    one rank's program
    """
    for node in graph.nodes:
        if node.target in WIRE_OPS and (op := WIRE_OPS[node.target].functional):
            node.target = op
    return graph


def separate_sums(graph: fx.Graph) -> fx.Graph:
    """Keep a product at its place, in front of a sum that Inductor would merge it with.

    before   %p = mm(%a, %b);  %w = wait_tensor(%r);  %s = add(%p, %y)
    after    %p = mm(%a, %b);  %w = wait_tensor(%r);  %n = neg(%p);  %s = sub(%y, %n)
    needs    one rank's program
    ensures  no sum has an operand that was computed on the other side of a start or wait

    Inductor merges a product and a sum into addmm, at the sum's place. Then a product that hides a
    message no longer does. `y - (-p)` has the bits of `y + p`, and no Inductor pattern takes it.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    messages = [order[n] for n in order if n.target in WIRE_OPS or n.target is _WAIT]
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        operands = node.args
        if node.kwargs or not all(isinstance(x, fx.Node) for x in operands):
            continue
        # Only a value with one use is merged: Inductor would have to compute others twice.
        own = [x for x in operands if len(x.users) == 1 and x.op == "call_function"]
        far = [x for x in own if bisect(messages, order[x]) < bisect(messages, order[node])]
        if far and node.meta["dtype"].is_floating_point:
            # Both operands may be the term: x + x has no other one.
            other = next((x for x in operands if x is not far[0]), far[0])
            with graph.inserting_before(node):
                negated = graph.call_function(aten.neg.default, (far[0],))
            negated.meta = dict(far[0].meta)
            node.target, node.args = aten.sub.Tensor, (other, negated)
    return graph


_WAIT = c10d.wait_tensor.default
