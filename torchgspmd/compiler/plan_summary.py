"""A plan's summary: memory, weights against marks, pipelines, searches at their limit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..capture import BUFFER, PARAMETER
from ..capture.captured import Input
from ..comm.collective import Collective, split_axes, start
from ..comm.hardware import Hardware
from ..comm.kinds import KINDS, CollectiveKind
from ..comm.local_ops import from_host
from ..fx_passes.digest import module_path
from ..fx_passes.loop_call import BodyCall, loop_calls
from ..fx_passes.partition.cost_constants import RESHARD_LIMITED
from ..fx_passes.printer import dtype_name
from ..fx_passes.program import Request
from ..fx_passes.replication_report import ReplicatedOp, origin_input
from ..fx_passes.schedule.arithmetic import is_view
from ..fx_passes.schedule.liveness import bytes_of
from ..fx_passes.schedule.recompute import PEAK_BEFORE, RECOMPUTED_NS
from ..fx_passes.units import size_text, time_text
from ..layout.mark import NAMED, mark_sharding_op
from ..layout.mesh import Mesh
from ..layout.prefix_specs import BATCH_AXES
from ..layout.spec_notation import AUTO, SAME

_MOST_WEIGHTS = 3  # that a summary names
MARK = mark_sharding_op._opoverload
_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, padding included."""

    parameters: int
    inputs: int  # arguments and buffers
    peak: int  # the most alive at once during a run, parameters and inputs included

    def __str__(self) -> str:
        return (
            f"parameters {size_text(self.parameters)}, inputs {size_text(self.inputs)}, "
            f"peak {size_text(self.peak)}"
        )


def collectives_text(collectives: Sequence[Collective]) -> list[str]:
    """Return a summary line for each kind of collective and its axes."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.kind, "+".join(c.axes)), []).append(c)
    return [
        f"{kind:14} over {axes:12} {sum(c.count for c in group):4} x, "
        f"{size_text(sum(c.sent_bytes for c in group))} sent by a device"
        for (kind, axes), group in sorted(groups.items())
    ] or ["no communication"]


def weights_against_marks(replicated: Sequence[ReplicatedOp]) -> list[str]:
    """Return the summary lines for weights that are gathered against their marks."""
    weights = [each for each in replicated if each.weight is not None]
    lines = [
        f"gathered against its mark: '{each.weight}', {size_text(each.bytes)}"
        for each in weights[:_MOST_WEIGHTS]
    ]
    more = len(weights) - _MOST_WEIGHTS
    return lines + ([f"and {more} weights more: plan.replicated_ops"] if more > 0 else [])


def overruled_text(marks: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Yield a line for each axis from which a small batch is gathered. marks: the plan's."""
    for axis, names in marks:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"few rows: gathering the batch over '{axis}' sends less than '{names[0]}'{more}, "
            f"which it divides too; '{axis}:p1' in the marks, or a larger batch, keeps the batch "
            "divided"
        )


def propagated_weights(
    sharded: fx.Graph, inputs: Sequence[Input], request: Request | None
) -> list[str]:
    """Return the summary line for weights that parallelize would store otherwise."""
    if request is None:
        return []
    names = [
        each.name
        for node, each in zip(sharded.find_nodes(op="placeholder"), inputs)
        if each.kind in (PARAMETER, BUFFER)
        and each.mark is None
        and node.meta["spec"].sharding_axes
        # parallelize says how it stores each of them, or chooses the same (store_states).
        and each.name not in request.stored
        and "chosen" not in node.meta
    ]
    more = len(names) - _MOST_WEIGHTS
    listed = ", ".join(names[:_MOST_WEIGHTS]) + (f" and {more} more" if more > 0 else "")
    return [f"sharded without a mark; parallelize needs plan=plan: {listed}"] if names else []


def idle_axes_text(mesh: Mesh, idle: Sequence[str]) -> Iterator[str]:
    """Yield a line for each axis that divides nothing. idle: those axes."""
    for axis in idle:
        cure = (
            f'divide the batch: in_specs="{AUTO}"'
            if axis in BATCH_AXES
            else f'divide the batch, in_specs="{axis} _", or mark weights with it'
        )
        yield (
            f"axis '{axis}' divides no value: each of its {mesh.count([axis])} devices "
            f"computes the whole program; {cure}"
        )


def gathered_results(sharded: fx.Graph, results: Sequence[int]) -> tuple[tuple[str, float], ...]:
    """Return (value, bytes that a device sends) for each result that a caller gets whole.

    results: which outputs a caller gets; the others are gradients and state.
    """
    found: dict[str, float] = {}
    outputs = sharded.output_node().args[0]
    for node in (outputs[i] for i in results):
        sent, at_end = 0.0, node
        # Back through the reshards at the result's end, whose bytes add up.
        while isinstance(node, fx.Node) and "step" in node.meta:
            sent, node = sent + node.meta["step"].sent, node.args[0]
        if sent and {*node.meta["spec"].sharding_axes} - {*at_end.meta["spec"].sharding_axes}:
            found[node.name] = sent
    return tuple(found.items())


def gathered_text(results: Iterable[tuple[str, float]]) -> Iterator[str]:
    """Yield a line for each result that is gathered because no out_specs say otherwise."""
    for name, sent in results:
        yield (
            f"result %{name} is gathered for the caller: {size_text(sent)} sent by a device; "
            f'out_specs="{SAME}" leaves it sharded'
        )


def buckets_text(program: fx.Graph, mesh: Mesh, hardware: Hardware) -> str:
    """Return a line for the largest buckets of a program's joined collectives; "" without one."""
    starts = program.find_nodes(op="call_function", target=start)
    found: dict[tuple[str, str], float] = {}
    for name, joined, arguments in (node.args for node in starts if hardware.beside):
        kind = KINDS[name]
        if len(joined) > 1 and isinstance(kind, CollectiveKind) and kind.merged is not None:
            axes = arguments[0][kind.merged.shared[-1]]
            sent = hardware.bucket_bytes(mesh, split_axes(axes), name, kind.relays)
            found[name, axes] = sent
    rows = [f"{size_text(sent)} of {name} over {axes}" for (name, axes), sent in found.items()]
    return (
        f"in a bucket for {hardware.name} a device sends at most {', '.join(rows)}" if rows else ""
    )


def limits_text(counts: Mapping[str, int]) -> list[str]:
    """Return a line about searches that ended at their limit, if any did. counts: the plan's."""
    limited = counts.get(RESHARD_LIMITED, 0)
    searches = "1 search" if limited == 1 else f"{limited} searches"
    line = (
        f"{searches} of steps between layouts ended at the limit, with the best steps up to there; "
        "advanced={'costs': {'max_layouts': ...}} raises it"
    )
    return [line] if limited else []


def recomputed_nodes(program: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield each node that the backward has for a memory budget, and how often it runs."""
    return ((node, runs) for node, runs in _nodes(program) if "recomputed" in node.meta)


def _nodes(
    program: fx.Graph, target: object = None, runs: int = 1
) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes of a program and of its loops, and how often they run. target: of these."""
    for node in program.nodes:
        if isinstance(node.target, BodyCall):
            for body in node.target.bodies:
                yield from _nodes(body.graph, target, runs * node.target.runs_of(body))
        if target is None or node.target is target:
            yield node, runs


def recomputed_text(program: fx.Graph, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the line of a summary for recomputed values, like ones together, if there are any."""
    kinds: Counter[str] = Counter()
    for node, runs in recomputed_nodes(program):
        if bytes_of(node) and not is_view(node):
            kinds[_NUMBER.sub("", node.meta["recomputed"])] += runs
    moved = sum(runs for _, runs in _nodes(program, from_host))
    if not kinds and not moved:
        return
    listed = ", ".join(f"{n} x {kind}" for kind, n in kinds.most_common()) or "nothing"
    listed += f"; {moved} values wait in the memory of the host" if moved else ""
    effect = ""
    if PEAK_BEFORE in counts:  # a plan of another process has no counts
        before, time = size_text(counts[PEAK_BEFORE]), time_text(counts[RECOMPUTED_NS] * 1e-9)
        effect = f"; peak {before} without, time {time} more"
    yield f"recomputed in the backward: {listed}{effect}"


def pipelines_text(program: fx.Graph) -> Iterator[str]:
    """Yield the lines that calls in a device's program have, such as pipelines."""
    for _, lines in _described(program):
        yield from lines


def pipeline_pictures(program: fx.Graph) -> list[tuple[str, str]]:
    """Return each such call's description, and an SVG with each device's work over time."""
    pictures = ((lines, call.picture()) for call, lines in _described(program))
    return [(lines[0], svg) for lines, svg in pictures if svg is not None]


def _described(program: fx.Graph) -> Iterator[tuple[BodyCall, list[str]]]:
    """Yield the calls that have lines, with these; else the calls in their bodies."""
    for _, call in loop_calls(program):
        if lines := [*call.summary()]:
            yield call, lines
        else:
            for body in call.bodies:
                yield from _described(body.graph)


def is_named(node: fx.Node) -> bool:
    """Return whether a step leads to a layout that the source names by `reshard`.

    The name may stand behind the call that has the step. A linear layer adds its bias to the sum; a
    loss divides a pending sum by the count.
    """
    return any(
        user.args[1] == NAMED
        if user.target is MARK
        else ("step" in user.meta or _place(user) == _place(node)) and is_named(user)
        for user in node.users
    )


def _place(node: fx.Node) -> list[object]:
    """Return where a value is computed, and how its dimensions are laid out."""
    spec = node.meta.get("spec")
    return [*map(node.meta.get, ("source", "module")), getattr(spec, "dims", spec)]


def moved_by(node: fx.Node) -> fx.Node:
    """Return the value that a step, or several in a row, move."""
    while "step" in node.meta:
        (node,) = node.all_input_nodes
    return node


def collective_of(
    node: fx.Node, mesh: Mesh, count: int, moved: fx.Node, inputs: Mapping[fx.Node, str]
) -> Collective:
    """Return the Collective for a node with a step that communicates.

    count: how often it runs. moved: the step in the partitioned graph. inputs: that graph's, with
    their names.
    """
    step, val = node.meta["step"], node.meta.get("val")
    named, moved = is_named(moved), moved_by(moved)
    # A weight that is cast first is still the weight.
    origin = inputs.get(origin_input(moved))
    return Collective(
        kind=step.collective,
        axes=step.axes,
        group_size=mesh.count(step.axes),
        dtype=dtype_name(node.meta["dtype"] if val is None else val.dtype),
        payload_bytes=step.payload,
        sent_bytes=step.sent * count,
        count=count,
        source=node.meta.get("source"),
        module=module_path(moved) if origin is None else origin,
        backward=bool(node.meta.get("backward")),
        value=moved.name,
        named=named,
    )
