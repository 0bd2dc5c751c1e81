"""Split large collectives over gloo between hosts in two levels: inside hosts, and between them.

before   %r = all_gather_into_tensor(%x, 4, g);  %w = wait_tensor(%r)   # hosts of two ranks
after    %b = all_gather_into_tensor(%x, 2, across);  %y = wait_tensor(%b)
         %i = all_gather_into_tensor(%y, 2, inside);  %z = wait_tensor(%i)
         %w = permute(%z, ...)                                          # shards in order of ranks
needs    the program of one rank, before gloo_all_to_all; meta["shape"] and meta["dtype"] on
         collectives
ensures  a rank sends as many bytes, at most 1/n of them to other hosts that have n ranks each
source   2-D gradient summation of arXiv 2011.03641

Gloo knows no hosts: an exchange of n ranks a host sends each host a shard n times. NCCL's rings and
trees follow hosts by themselves.
"""

from __future__ import annotations

import math

from torch import fx

from ...comm.hosts import HostLevels, ranks_of_a_host
from ...comm.kinds import collective_kinds
from ...comm.process_groups import ProcessGroups

# Bytes of the payload. A further exchange inside a host takes 0.3 ms, as long as these bytes take
# at 7 Gbit/s.
LEAST = 2**18


def host_levels(graph: fx.Graph, groups: ProcessGroups) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    kinds = {w.op: k for k in collective_kinds().values() if k.over_hosts for w in k.wire}
    for node in list(graph.nodes) if groups.is_gloo and groups.hosts else ():
        if (kind := kinds.get(node.target)) is not None and kind.over_hosts is not None:
            name = node.args[-1]
            bytes_ = math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize
            is_large = kind.payload_from(bytes_, groups.size(name)) >= LEAST
            if is_large and (each := ranks_of_a_host(groups, name)):
                kind.over_hosts(HostLevels(graph, node, groups, each))
    return graph
