"""Sends numbers of types that gloo and NCCL do not know as others of the same size.

before   %r = all_to_all_single(%x, ...);  %w = wait_tensor(%r)                 # %x is int16
after    %v = view(%x, float16);  %r = all_to_all_single(%v, ...);  %y = wait_tensor(%r);  %w = view(%y, int16)
needs    the program of one rank; meta["dtype"] on collectives
ensures  nothing is computed with them on the way; reductions are left as they are
"""

from __future__ import annotations

import torch
from torch import fx

from ...compat.operators import aten, c10d

CARRIERS = {
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
} | {getattr(torch, name): torch.uint8 for name in dir(torch) if name.startswith("float8_")}


def wire_dtypes(graph: fx.Graph) -> fx.Graph:
    """Rewrites the graph in place and returns it."""
    for target in (c10d.all_to_all_single.default, c10d.all_gather_into_tensor.default):
        for node in graph.find_nodes(op="call_function", target=target):
            dtype = node.meta["dtype"]
            if dtype.is_complex:
                _carry(graph, node, (aten.view_as_real.default,), (aten.view_as_complex.default,))
            elif dtype in CARRIERS:
                _carry(graph, node, (aten.view.dtype, CARRIERS[dtype]), (aten.view.dtype, dtype))
    return graph


def _carry(graph: fx.Graph, node: fx.Node, there: tuple, back: tuple) -> None:
    """there, back: an operation on what is sent and on what arrives, with its arguments but the
    first.
    """
    with graph.inserting_before(node):
        node.update_arg(0, graph.call_function(there[0], (node.args[0], *there[1:])))
    wait = next(iter(node.users))
    users = list(wait.users)
    with graph.inserting_after(wait):
        arrived = graph.call_function(back[0], (wait, *back[1:]))
    for user in users:
        user.replace_input_with(wait, arrived)
