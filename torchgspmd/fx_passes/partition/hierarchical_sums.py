"""Reduce over several axes in steps, the slow links last, where that takes less time.

before   %w_r    : f32[8, 6]                = all_reduce(%w, sum, host+core)
after    %w_r_rs : f32[8@core, 6] sum@host  = reduce_scatter(%w, sum, 0, core)
         %w_r_r  : f32[8@core, 6]           = all_reduce(%w_r_rs, sum, host)
         %w_r_g  : f32[8, 6]                = all_gather(%w_r_r, 0, core)
needs    the partitioned program, and hardware whose links say which axes leave a host
ensures  equal layouts; over the links between n devices of a host each sends 1/n of what it did
source   2-D gradient summation of arXiv 2011.03641

A dimension has to divide by the fast axes. Latencies count: small sums stay one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

from torch import fx

from ...comm.collective import split_axes
from ...comm.hardware import Hardware
from ...comm.kinds import Step, all_gather, all_reduce, reduce_scatter
from ...layout.mesh import Mesh
from ...shard_spec import Axes, ShardSpec


def hierarchical_sums(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> fx.Graph | None:
    """Rewrite the graph in place and return it. None if nothing changed."""
    changed = False
    for node in graph.find_nodes(op="call_function", target=all_reduce):
        ways = [(node.meta["step"],), *_ways(node, mesh)]
        steps = min(ways, key=lambda steps: _seconds(steps, mesh, hardware))
        if len(steps) > 1:
            _replace(graph, node, steps)
            changed = True
    return graph if changed else None


def _ways(node: fx.Node, mesh: Mesh) -> Iterator[tuple[Step, ...]]:
    """Yield the steps for each part of the axes that is reduced first, and gathered last."""
    axes: Axes = split_axes(node.args[2])
    parts = chain.from_iterable(combinations(axes, k) for k in range(1, len(axes)))
    for fast in parts if not node.meta.get("dynamic") else ():
        yield from _way(node, mesh, fast, tuple(a for a in axes if a not in fast))


def _way(node: fx.Node, mesh: Mesh, fast: Axes, slow: Axes) -> Iterator[tuple[Step, ...]]:
    """Yield the steps over `fast`, `slow` and `fast` again, if a dimension divides."""
    before: ShardSpec = node.args[0].meta["spec"]
    after: ShardSpec = node.meta["spec"]
    payload, reduction = node.meta["step"].payload, node.args[1]
    for dim, size in enumerate(node.meta["val"].shape):
        fine = before.dims[dim] + fast
        # Any dimension will do, as all ways send the same bytes: the first that divides is taken.
        if size and size % mesh.count(fine) == 0:
            pending = tuple(a for a in before.pending if a not in fast)
            scattered = before.with_pending(pending).with_dim(dim, fine)
            part, over = payload / mesh.count(fast), ("+".join(fast), "+".join(slow))
            yield (
                reduce_scatter.step(mesh, (reduction, dim, over[0]), scattered, fast, payload),
                all_reduce.step(mesh, (reduction, over[1]), after.with_dim(dim, fine), slow, part),
                all_gather.step(mesh, (dim, over[0]), after, fast, payload),
            )
            return


def _seconds(steps: tuple[Step, ...], mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds that steps take, one after the other.

    A message's latency counts once: how it grows with the devices is much the same either way.
    """
    # Measured collectives first, if the hardware has this one: links are only an estimate.
    links = [
        hardware.measured(mesh, step.axes, step.kind)
        or hardware.link(mesh, step.axes, step.target.relays)
        for step in steps
    ]
    return sum(link.latency + step.sent / link.bandwidth for link, step in zip(links, steps))


def _replace(graph: fx.Graph, node: fx.Node, steps: tuple[Step, ...]) -> None:
    value = node.args[0]
    with graph.inserting_before(node):
        for step in steps:
            name, args = f"{node.name}_{step.target.suffix}", (value, *step.args)
            value = graph.create_node("call_function", step.target, args, name=name)
            value.meta = {**node.meta, "spec": step.spec, "step": step}
    node.replace_all_uses_with(value)
    graph.erase_node(node)
