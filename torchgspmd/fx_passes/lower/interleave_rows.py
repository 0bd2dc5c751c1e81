"""Bring the shards that one gather brings together by one operation, not one a weight.

before   %p = split_with_sizes(%rows, [64, 32], 1)          rows: [2, 96], a row for each device
         %a = contiguous(reshape(%p[0], [16, 8]));  %b = contiguous(reshape(%p[1], [64]))
after    %v = interleave(%rows);  %p = split_with_sizes(%v, [128, 64])
         %a = reshape(%p[0], [16, 8]);  %b = %p[1]
before   %f = cat([%x, %y]);  %r = all_to_all_single(%f, ...)
after    %f = bucket.cat([%x, %y]);  ...
needs    one rank's program, lowered; no pass that looks for the copies comes after it
ensures  the same numbers; gathers of up to MOST elements, which are one tensor from here on

A copy takes 5 us, whatever its size: 69 small weights took 0.47 ms, and take 0.26. Both memories
are the last step's if they are free, as in reduce_in_bucket.py.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx

from ...comm.kinds import WIRE_OPS
from ...compat.operators import aten
from .reduce_in_bucket import BucketMemory

MOST = 2**20  # Elements: larger weights are freed one by one.
LEAST = 16  # Elements that stay together. With fewer, the copies are as fast.
FEW = 4  # weights


class Interleaved:
    """Rows [n, sum(sizes)] as a vector: all rows of the first size, then all of the second ..."""

    def __init__(self, count: int, sizes: list[int]) -> None:
        self.together = math.gcd(*sizes)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        blocks = [
            (row * sum(sizes) + start + first) // self.together
            for start, size in zip(starts, sizes)
            for row in range(count)
            for first in range(0, size, self.together)
        ]
        self.blocks, self.memory = torch.tensor(blocks), BucketMemory()

    def interleave(self, rows: Tensor) -> Tensor:
        """Return the vector."""
        if self.blocks.device != rows.device:
            self.blocks = self.blocks.to(rows.device)
        vector = self.memory.empty(rows, rows.numel(), rows.dtype)
        blocks = rows.reshape(-1, self.together)
        torch.index_select(blocks, 0, self.blocks, out=vector.view(-1, self.together))
        return vector

    vars(interleave)["owns"] = True  # see fx_nodes.allocates


def interleave_rows(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        if any(map(_sends, node.users)):
            node.target = BucketMemory().cat
    for node in graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
        rows, sizes, *dim = node.args
        if dim != [1] or rows.target is not aten.reshape.default or len(rows.args[1]) != 2:
            continue
        count = rows.args[1][0]
        if (
            len(sizes) >= FEW
            and all(type(n) is int for n in (count, *sizes))
            and count * sum(sizes) <= MOST
            and math.gcd(*sizes) >= LEAST
            and all(u.target is operator.getitem for u in node.users)
        ):
            _interleave(graph, node, count)
    return graph


def _interleave(graph: fx.Graph, split: fx.Node, count: int) -> None:
    """Split a vector, in which the shards of a weight follow each other."""
    rows, sizes, _ = split.args
    with graph.inserting_before(split):
        vector = graph.call_function(Interleaved(count, sizes).interleave, (rows,))
    split.args = vector, [count * size for size in sizes]
    for piece in [*split.users]:
        size = sizes[piece.args[1]]
        for user in [*piece.users]:
            if user.target is not aten.reshape.default:
                with graph.inserting_after(piece):
                    shaped = graph.call_function(aten.reshape.default, (piece, [count, size]))
                user.replace_input_with(piece, shaped)
                continue
            # The reshape is a view now, in contiguous memory.
            for copy in [u for u in user.users if _copies(u)]:
                copy.replace_all_uses_with(user)
                graph.erase_node(copy)
            if list(user.args[1]) == [count * size]:
                user.replace_all_uses_with(piece)
                graph.erase_node(user)


def _sends(node: fx.Node) -> bool:
    """Return whether a node sends what it is called with, or is contiguous already."""
    if node.target is aten.contiguous.default:
        return any(map(_sends, node.users))
    return node.target in WIRE_OPS


def _copies(node: fx.Node) -> bool:
    formats = (None, torch.contiguous_format)
    return node.target is aten.contiguous.default and node.kwargs.get("memory_format") in formats
