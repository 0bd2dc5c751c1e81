"""Split every collective into the start and the wait for its result.

before   %w_g = all_gather(%w, 0, data)
after    %w_g_start = start(all_gather, [%w], [[0, data]]);  %w_g = wait(%w_g_start, 0)
needs    the program of one device
ensures  nothing but `start` communicates; the wait follows its start at once, and later passes move
         the two apart
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...comm.collective import start, wait
from ...comm.kinds import CollectiveKind
from .liveness import bytes_of


def start_wait(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in list(graph.nodes):
        if isinstance(node.target, CollectiveKind):
            join(graph, [node])
    for node in reversed(graph.nodes):
        if node.target in (start, wait) and not node.users:
            graph.erase_node(node)
    return graph


def join(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    """Merge adjacent collectives of one kind into one start. They become its waits.

    None of them uses the result of another.
    """
    first = run[0]
    with graph.inserting_before(first):
        operands, arguments = tuple(n.args[0] for n in run), tuple(tuple(n.args[1:]) for n in run)
        started = graph.create_node(
            "call_function",
            start,
            (first.target.name, operands, arguments),
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
