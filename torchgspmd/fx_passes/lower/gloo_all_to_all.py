"""Lower collectives over gloo to all_to_all and arithmetic.

Torch's own are slow or unsafe over gloo. Examples for two ranks, on rank 0:

before   %r = reduce_scatter_tensor(%x, sum, 2, g);  %w = wait_tensor(%r)
after    %r = all_to_all_single(%x, [1, 1], [1, 1], g);  %y = wait_tensor(%r)
         %w = sum(%y, [0], True)
before   %r = all_reduce_(%x, sum, g);  %w = wait_tensor(%r)         # of few bytes
after    %r = all_to_all_single(%x, [0, 8], [0, 8], g);  %y = wait_tensor(%r);  %w = add_(%x, %y)
before   %r = all_gather_into_tensor(%x, 2, g);  %w = wait_tensor(%r)
after    %r = all_to_all_single(%x, [0, 8], [0, 8], g);  %y = wait_tensor(%r);  %w = cat([%x, %y])
needs    the program of one rank, operands contiguous; meta["shape"] and meta["dtype"] on
         collectives
ensures  every rank has the same result, and sends the bytes that the plan says. One case sends
         more: an all_reduce of more than two ranks whose dtype no library reduces sends all terms
         to each.

Fast: over gloo torch computes a reduce_scatter by an all_reduce, which sends twice the bytes. 32 MB
between two processes take 53 ms that way, 24 ms this way. A small all_reduce takes a process 0.8
ms, an exchange 0.3.

Safe: gloo's two threads write the name of the work they finished into one string, without a lock
(ProcessGroupGloo::runLoop, lastCompletedWorkName). A name of more than 15 characters lies on the
heap, where one thread writes memory that the other has freed. The process dies of "malloc():
unaligned tcache chunk detected", once in some ten thousand overlapping collectives (torch 2.13.0
alone does). Of those in use only all_gather_into_tensor has such a name, ALLGATHER_COALESCED. With
tensors of CUDA that operation ends the process at once (torch 2.11).
"""

from __future__ import annotations

from torch import fx

from ...comm.gloo_rewriter import GlooLimits, GlooRewriter
from ...comm.hosts import crosses_hosts
from ...comm.kinds import WIRE_OPS
from ...comm.process_groups import ProcessGroups
from .wire_dtypes import CARRIERS

WITHIN = GlooLimits(few=2**21, many=2**62)  # for ranks that share memory
# A link between hosts is slow in both directions at once for one large message of gloo: of 4 MiB
# each way over 50 Mbit/s an exchange takes 0.9 to 1.3 s, in pieces 0.67, an all_reduce 0.66.
ACROSS = GlooLimits(few=2**18, many=2**18)


def gloo_all_to_all(graph: fx.Graph, groups: ProcessGroups) -> fx.Graph:
    """Rewrite the graph in place and return it.

    For other backends than gloo, only reductions that no library supports are rewritten.
    """
    for node in graph.nodes:
        wire = WIRE_OPS.get(node.target)
        if wire is not None and wire.over_gloo is not None:
            is_unsupported = wire.reduces and _is_unsupported(node)
            if groups.is_gloo or is_unsupported:
                limits = ACROSS if crosses_hosts(groups, node.args[-1]) else WITHIN
                wire.over_gloo(GlooRewriter(graph, node, groups, limits, is_unsupported))
    return graph


def _is_unsupported(reduction: fx.Node) -> bool:
    """Return True if neither gloo nor NCCL has this reduction for the node's dtype."""
    dtype = reduction.meta["dtype"]
    return dtype in CARRIERS or dtype.is_complex and reduction.args[1] != "sum"
