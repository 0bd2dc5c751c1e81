"""Replace in-place reductions, which Inductor does not functionalize.

before   %r = all_reduce_(%x, sum, g)
after    %r = all_reduce(%x, sum, g)
needs    the program of one rank
"""

from __future__ import annotations

from torch import fx

from ...compat.operators import c10d


def functional_reductions(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce_.default):
        node.target = c10d.all_reduce.default
    return graph
