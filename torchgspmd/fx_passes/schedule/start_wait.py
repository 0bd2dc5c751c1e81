"""Split every collective into the start and the wait for its result.

before   %w_g = all_gather(%w, 0, data)
after    %w_g_start = start(all_gather, [%w], [[0, data]]);  %w_g = wait(%w_g_start, 0)
needs    one device's program
ensures  nothing but `start` communicates; the wait follows its start at once, and later passes move
         the two apart
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...comm.collective import start, wait
from ...comm.kinds import CollectiveKind
from ...compat.fx_nodes import origin_of
from ..units import size_text
from .liveness import bytes_of


def start_wait(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in list(graph.nodes):
        if isinstance(node.target, CollectiveKind):
            join(graph, [node])
    # In reverse: erasing a wait may leave its start without users.
    for node in reversed(graph.nodes):
        if node.target in (start, wait) and not node.users:
            graph.erase_node(node)
    return graph


def join(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    """Merge adjacent collectives of one kind into one start. Each becomes a wait.

    None uses another's result.
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
        "source": None,
        "backward": False,
        **origin_of(first),
        "dtype": first.meta["dtype"],
        "bytes": sum(map(bytes_of, run)),
    }
    started.meta["collective"] = label = _label(run)
    for i, node in enumerate(run):
        node.meta["collective"] = label
        node.target, node.args = wait, (started, i)


def _label(run: Sequence[fx.Node]) -> str:
    """Return a start's kind, first operand, result bytes and axes."""
    first, rest = run[0], f" and {len(run) - 1} more" if len(run) > 1 else ""
    step = first.meta.get("step")
    axes = ", " + "+".join(step.axes) if step is not None else ""
    size = size_text(sum(map(bytes_of, run)))
    return f"{first.target.name} {first.args[0]}{rest}, {size}{axes}"
