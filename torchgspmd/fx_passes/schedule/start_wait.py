"""Every collective in two: where it begins, and where its result is needed.

before   %w_g = all_gather(%w, 0, data)
after    %w_g_start = start(all_gather, [%w], [[0, data]]);  %w_g = wait(%w_g_start, 0)
needs    the program of one device
ensures  nothing but `start` communicates; the wait follows its start at once. Passes behind move the two apart
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...comm.collective import SENDING, start, wait
from .liveness import bytes_of

_TARGETS = set(SENDING.values())


def start_wait(graph: fx.Graph) -> fx.Graph:
    """Rewrites the graph in place and returns it."""
    for node in list(graph.nodes):
        if node.target in _TARGETS:
            join(graph, [node])
    for node in reversed(graph.nodes):
        if node.target in (start, wait) and not node.users:
            graph.erase_node(node)
    return graph


def join(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    """One start in place of collectives of one kind that follow one another, none using another's
    result; they become waits.
    """
    first = run[0]
    with graph.inserting_before(first):
        operands, arguments = tuple(n.args[0] for n in run), tuple(tuple(n.args[1:]) for n in run)
        started = graph.create_node(
            "call_function",
            start,
            (first.target.__name__, operands, arguments),
            name=f"{first.name}_start",
        )
    started.meta = {
        "source": first.meta.get("source"),
        "backward": first.meta.get("backward", False),
        "dtype": first.meta["dtype"],
        "bytes": sum(map(bytes_of, run)),
    }
    for i, node in enumerate(run):
        node.target, node.args = wait, (started, i)
