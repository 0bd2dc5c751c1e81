"""Copies that only make a value contiguous: none is made where it is so already.

before   %t = transpose(%attention, 1, 2);  %c = clone(%t, contiguous_format)        as captured on fake tensors
after    %t = transpose(%attention, 1, 2);  %c = contiguous(%t)                      free: the CPU's kernel returns it so
needs    the program of one device, before collectives are lowered: what shares memory is then never reduced in place
ensures  inputs and results of the program share no memory that they did not share before
"""

from __future__ import annotations

import torch
from torch import fx

from ...comm.collective import wait
from ...compat.operators import aten


def elide_copies(graph: fx.Graph) -> fx.Graph:
    """Rewrites the graph in place and returns it."""
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


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info for r in schema.returns)


def _reads_input(node: fx.Node) -> bool:
    """Whether a value may be (a view of) an input of the program. What was communicated has memory
    of its own.
    """
    source = node.args[0]
    while source.op == "call_function" and source.target is not wait and _is_view(source):
        source = source.args[0]
    return source.op != "call_function"


def _is_returned(node: fx.Node) -> bool:
    """Whether a value or a view of it may be a result of the program."""
    return any(user.op == "output" or _is_view(user) and _is_returned(user) for user in node.users)
