"""Elide copies to contiguous memory for values that are contiguous at run time.

before   %t = transpose(%attention, 1, 2);  %c = clone(%t, contiguous_format)
after    %t = transpose(%attention, 1, 2);  %c = contiguous(%t)
needs    one device's program, before collectives are lowered, so that none reduces shared memory in
         place
ensures  inputs and results share no memory that they did not share before

The copy was captured on fake tensors. It is free here: the CPU's kernel returns %t contiguous.
"""

from __future__ import annotations

import torch
from torch import fx

from ...comm.collective import wait
from ...compat.fx_nodes import allocates
from ...compat.operators import aten


def elide_copies(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in graph.nodes:
        contiguous = node.kwargs.get("memory_format") is torch.contiguous_format
        if (
            node.target is aten.clone.default
            and contiguous
            and not _reads_input(node)
            and not _is_returned(node)
        ):
            node.target, node.kwargs = aten.contiguous.default, {}
    return graph


def _reads_input(node: fx.Node) -> bool:
    """Return True if a node may read (a view of) a program input.

    A collective's result has memory of its own.
    """
    source = node.args[0]
    while source.op == "call_function" and source.target is not wait and not allocates(source):
        if not isinstance(source.args[0], fx.Node):  # a loop, whose results may be inputs
            return True
        source = source.args[0]
    return source.op != "call_function"


def _is_returned(node: fx.Node) -> bool:
    """Return True if a value, or a view of it, may be a program result."""
    return any(
        user.op == "output" or not allocates(user) and _is_returned(user) for user in node.users
    )
