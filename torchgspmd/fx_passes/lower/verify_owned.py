"""Verify that a program writes only to memory that it has allocated.

before   %x = input;  %y = add_(%x, 1)
after    an AssertionError: %y writes to %x, which may lie in the memory of %x
needs    the program of one rank, or the body of a loop in it
ensures  the same program; no operation writes to what may lie in the memory of an input or an
         attribute: arguments, parameters, saved values and gradients of outputs are the caller's
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ...compat.fx_nodes import viewed_operands, written_operands


def verify_owned(graph: fx.Graph, changed: Collection[fx.Node] = ()) -> fx.Graph:
    """Return the graph. Raise AssertionError, for a bug in torchgspmd, if it is not legal.

    changed: the inputs that the user's own program writes to.
    """
    owners: dict[fx.Node, frozenset[fx.Node]] = {}  # value -> the inputs that it may lie in
    faults: list[str] = []
    for node in graph.nodes:
        faults += [
            f"%{node} writes to %{operand}, which may lie in the memory of %{owner}"
            for operand in written_operands(node)
            for owner in owners[operand]
            if owner not in changed
        ]
        owners[node] = (
            frozenset([node])
            if node.op in ("placeholder", "get_attr")
            else frozenset().union(*(owners[x] for x in viewed_operands(node)))
        )
    if faults:
        raise AssertionError(
            "memory of the caller is written; please report this:\n  " + "\n  ".join(faults)
        )
    return graph
