"""Send dtypes that gloo and NCCL do not support as others of the same size.

before   %r = all_to_all_single(%x, ...);  %w = wait_tensor(%r)                 # %x is int16
after    %v = view(%x, float16);  %r = all_to_all_single(%v, ...)
         %y = wait_tensor(%r);  %w = view(%y, int16)
needs    one rank's program; meta["dtype"] on collectives
ensures  reductions keep their dtype, but for complex sums: they are sums of real numbers
"""

from __future__ import annotations

import torch
from torch import fx

from ...comm.kinds import WIRE_OPS
from ...compat.operators import aten

CARRIERS = {
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
} | {getattr(torch, name): torch.uint8 for name in dir(torch) if name.startswith("float8_")}


def wire_dtypes(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in graph.nodes:
        if node.target not in WIRE_OPS:
            continue
        dtype, reduces = node.meta["dtype"], WIRE_OPS[node.target].reduces
        # Both parts of a complex sum add up by themselves; those of a product do not.
        if dtype.is_complex and (not reduces or node.args[1] == "sum"):
            _convert(graph, node, (aten.view_as_real.default,), (aten.view_as_complex.default,))
        # Bits are copied unchanged, but added as numbers: a reduction needs the true dtype.
        elif dtype in CARRIERS and not reduces:
            _convert(graph, node, (aten.view.dtype, CARRIERS[dtype]), (aten.view.dtype, dtype))
    return graph


def _convert(graph: fx.Graph, node: fx.Node, encode: tuple, decode: tuple) -> None:
    """Encode a collective's operand and decode its result.

    encode and decode are an operation and its arguments after the first.
    """
    with graph.inserting_before(node):
        node.update_arg(0, graph.call_function(encode[0], (node.args[0], *encode[1:])))
    wait = next(iter(node.users))
    users = list(wait.users)
    with graph.inserting_after(wait):
        arrived = graph.call_function(decode[0], (wait, *decode[1:]))
    for user in users:
        user.replace_input_with(wait, arrived)
