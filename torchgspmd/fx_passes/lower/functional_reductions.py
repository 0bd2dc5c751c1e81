"""Replace in-place reductions, which Inductor does not functionalize.

before   %r = all_reduce_(%x, sum, g)
after    %r = all_reduce(%x, sum, g)
needs    one rank's program
"""

from __future__ import annotations

from torch import fx

from ...comm.kinds import WIRE_OPS


def functional_reductions(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in graph.nodes:
        if node.target in WIRE_OPS and (op := WIRE_OPS[node.target].functional):
            node.target = op
    return graph
