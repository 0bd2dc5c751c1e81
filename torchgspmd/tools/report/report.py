"""Report: a device's memory, work and bytes, with their places, and unrequested work."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from ...capture import ARGUMENT, BUFFER, GRADIENT, PARAMETER, Captured
from ...fx_passes.localize.sizes_in_a_run import shard_inputs
from ...fx_passes.replication_report import ReplicatedOp
from ...fx_passes.schedule.liveness import bytes_of
from ...fx_passes.units import count_text, short_source, size_text, table_text, time_text
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from .estimate import COMPUTE, Estimate

ROWS = 12  # rows in each table as text


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on one device, by purpose.

    optimizer: two float32 values a parameter, as in Adam. saved: from the forward, for the
    backward. peak: the most alive in a run, without the optimizer. where: the operation then, and
    its line.
    """

    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    saved: int
    peak: int
    where: str


@dataclass(frozen=True)
class CollectiveRow:
    """Like collectives: one kind over the same axes, at one line, with the same layout change.

    seconds: on the links, for all. reason: the layouts before and after. value: the first result's
    name.
    """

    kind: str
    axes: tuple[str, ...]
    backward: bool
    source: str
    reason: str
    count: int
    sent_bytes: float
    seconds: float
    value: str


@dataclass(frozen=True)
class TriedMark:
    """The gain from one more mark: a step's seconds, a device's bytes, bytes sent."""

    seconds: float
    memory: int
    sent_bytes: float

    def __str__(self) -> str:
        memory, sent = (_signed(size_text, n) for n in (self.memory, self.sent_bytes))
        return f"memory {memory}, sent {sent}, step {_signed(time_text, self.seconds)}"


def _signed(text: Callable[[float], str], change: float) -> str:
    return f"{'-' if change < 0 else '+'}{text(abs(change))}"


@dataclass(frozen=True)
class WholeTensor:
    """Like parameters or buffers that every device holds whole, and a mark that divides them.

    name: with * for a layer's number. tried: the mark's effect, if it was planned.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    bytes: int
    mark: str
    tried: TriedMark | None = None

    def is_like(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.name == _like(name) and self.shape == shape

    @property
    def proposal(self) -> str:
        """Return the mark, with its effect."""
        return f"{self.mark} ({self.tried})" if self.tried else self.mark


def _like(name: str) -> str:
    # Numbers between dots are those of layers.
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@dataclass(frozen=True)
class UnaskedRow:
    """Like gathers, or like operations that run whole, at one line: all layers together."""

    op: str
    source: str
    why: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """A report's parts. Print it for all.

    Args:
        estimate: A step's time.
        memory: The bytes that a device holds.
        collectives: Like ones together; those that take longest first.
        whole: Tensors that every device holds whole, largest first.
        unasked: Gathers and whole operations that no mark asks for, largest first.
        limits: Lines about values that the backward recomputes for a memory budget, the largest
            buckets, and searches that ended at their limit.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> specs = ("data model", "model _")
        >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
        >>> [row.kind for row in result.report("h100").collectives]
        ['all_reduce']
    """

    estimate: Estimate
    memory: MemoryReport
    collectives: tuple[CollectiveRow, ...]
    whole: tuple[WholeTensor, ...]
    unasked: tuple[UnaskedRow, ...]
    limits: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join(
            [
                self._step(),
                self._memory(),
                self._collectives(),
                *([self._whole()] if self.whole else []),
                *([self._unasked()] if self.unasked else []),
                *self.limits,
            ]
        )

    def _step(self) -> str:
        times, mesh = self.estimate, self.estimate.mesh
        even = times.model_flops / mesh.size
        arithmetic = f"{count_text(times.flops)} operations of a device in products" + (
            f", {times.flops / even:.2f} of an even split" if even else ""
        )
        return (
            f"{mesh.size} devices ({' '.join(f'{n}={s}' for n, s in mesh.axes)}) of "
            f"{times}\n{arithmetic}"
        )

    def _memory(self) -> str:
        usage, total = self.memory, self.estimate.hardware.memory
        rows = [
            ("parameters", size_text(usage.parameters)),
            ("gradients", size_text(usage.gradients)),
            ("optimizer states (Adam)", size_text(usage.optimizer)),
            ("inputs and buffers", size_text(usage.inputs)),
            ("kept for the backward", size_text(usage.saved)),
            ("peak of a run", f"{size_text(usage.peak)} at {usage.where}"),
            (
                "with optimizer",
                f"{size_text(usage.peak + usage.optimizer)} of {size_text(total)}"
                + (": TOO MUCH" if usage.peak + usage.optimizer > total else ""),
            ),
        ]
        return "memory of a device\n" + table_text(("", ""), rows).split("\n", 1)[1]

    def _collectives(self) -> str:
        if not self.collectives:
            return "no communication"
        rows = [
            (
                row.kind,
                "+".join(row.axes),
                "backward" if row.backward else "forward",
                f"{row.count} x",
                size_text(row.sent_bytes),
                time_text(row.seconds),
                row.source,
                row.reason,
            )
            for row in self.collectives
        ]
        header = ("kind", "axes", "phase", "count", "sent", "time", "source", "layout")
        return section("communication of a device", header, rows, "count sent time")

    def _whole(self) -> str:
        rows = [
            (t.name, f"{t.count} x", str(list(t.shape)), size_text(t.bytes), t.proposal)
            for t in self.whole
        ]
        header = ("name", "count", "shape", "bytes", "a mark that divides it")
        return section("whole on every device", header, rows, "count bytes")

    def _unasked(self) -> str:
        rows = [
            (row.op, f"{row.count} x", size_text(row.bytes), row.source, row.why)
            for row in self.unasked
        ]
        header = ("operation", "count", "bytes", "source", "why")
        return section("gathered or whole, and no mark asks for it", header, rows, "count bytes")


def section(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], right: str = ""
) -> str:
    """Return a titled table with the first ROWS rows, and the number of the others."""
    rest = [f"  and {len(rows) - ROWS} more"] if len(rows) > ROWS else []
    return "\n".join([title, table_text(header, rows[:ROWS], right), *rest])


def report(
    captured: Captured,
    sharded: fx.Graph,
    program: fx.Graph,
    replicated: Sequence[ReplicatedOp],
    estimate: Estimate,
) -> Report:
    """Return a plan's report. program: the one-device program. replicated: the replicated_ops."""
    return Report(
        estimate,
        _memory_report(captured, program, estimate),
        _collective_rows(sharded, estimate),
        _whole_tensors(captured, sharded, estimate.mesh),
        _unasked_rows(replicated),
    )


def _memory_report(captured: Captured, program: fx.Graph, estimate: Estimate) -> MemoryReport:
    placeholders = shard_inputs(program, estimate.mesh)
    parameters = inputs = states = 0
    # Adam has states for trained parameters alone.
    trained = {out.input for out in captured.outputs if out.kind == GRADIENT}
    for i, (node, inp) in enumerate(zip(placeholders, captured.inputs)):
        if inp.kind == PARAMETER:
            parameters += bytes_of(node)
            # Adam's two states, 4 bytes each.
            states += 2 * 4 * math.prod(node.meta["shape"]) if i in trained else 0
        elif inp.kind in (ARGUMENT, BUFFER):
            inputs += bytes_of(node)
    results = program.output_node().args[0]
    gradients = sum(
        bytes_of(node)
        for node, out in zip(results, captured.outputs)
        if out.kind == GRADIENT and isinstance(node, fx.Node)
    )
    stored = parameters + inputs
    # Kept for the backward: alive at its first event, besides the inputs.
    first = next((e for e in estimate.events if e.backward), None)
    peak = max(estimate.events, key=lambda e: e.alive, default=None)
    where = (
        f"%{peak.name}" + (f" ({short_source(peak.source)})" if peak.source else "")
        if peak
        else "no event"
    )
    return MemoryReport(
        parameters=parameters,
        gradients=gradients,
        optimizer=states,
        inputs=inputs,
        saved=max(first.alive - stored, 0) if first else 0,
        # A program without events holds its inputs all the same.
        peak=max(peak.alive if peak else 0, stored),
        where=where,
    )


def _collective_rows(sharded: fx.Graph, estimate: Estimate) -> tuple[CollectiveRow, ...]:
    """Return the partitioned graph's collectives, like ones together.

    A collective has a share in its message's time, by bytes.
    """
    nodes = [node for node in sharded.nodes if node.meta.get("step") is not None]
    # Scheduling merges messages, but keeps the Step objects.
    before = {id(node.meta["step"]): node.args[0].meta.get("spec") for node in nodes}
    sources = {id(node.meta["step"]): _source(node) for node in nodes}
    firsts = {id(node.meta["step"]): node.name for node in nodes}
    groups: dict[tuple[str, tuple[str, ...], bool, str, str], list] = defaultdict(list)
    for event in estimate.events:
        total = sum(step.sent for step in event.steps) or 1.0
        for step in event.steps:
            if not step.collective:
                continue
            reason, source = step_text(before.get(id(step)), step.spec), sources.get(id(step))
            key = (step.collective, step.axes, event.backward, short_source(source), reason)
            # A fused product's time is the device's, not the links'.
            share = event.seconds * step.sent / total if event.stream != COMPUTE else 0.0
            name = firsts.get(id(step), event.name)
            groups[key].append((step.sent * event.runs, share, name, event.runs))
    rows = []
    for key, group in groups.items():
        sent, seconds, names, counts = zip(*group)
        rows.append(CollectiveRow(*key, sum(counts), sum(sent), sum(seconds), names[0]))
    return tuple(sorted(rows, key=lambda row: (-row.seconds, -row.sent_bytes)))


def _unasked_rows(replicated: Sequence[ReplicatedOp]) -> tuple[UnaskedRow, ...]:
    """Return like operations together: value names differ in their numbers alone."""
    groups: dict[tuple[str, str, str], list[ReplicatedOp]] = defaultdict(list)
    for op in replicated:
        # Layers differ in numbers alone: one row stands for all.
        value = re.sub(r"_\d+", "_*", op.value or "")
        why = op.why.replace(f"%{op.value}", f"%{value}") if op.value else op.why
        groups[op.op, short_source(op.source), why].append(op)
    rows = [
        UnaskedRow(*key, len(group), sum(op.bytes for op in group)) for key, group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _source(node: fx.Node) -> str | None:
    while node.meta.get("source") is None and node.users:
        node = next(iter(node.users))
    return node.meta.get("source")


def step_text(before: ShardSpec | None, after: ShardSpec) -> str:
    return f"[{before}] -> [{after}]" if before is not None else f"-> [{after}]"


def _whole_tensors(captured: Captured, sharded: fx.Graph, mesh: Mesh) -> tuple[WholeTensor, ...]:
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for node, inp in zip(sharded.find_nodes(op="placeholder"), captured.inputs):
        # A number without dimensions cannot be sharded.
        whole = not any(node.meta["spec"].dims) and inp.shape
        if inp.kind in (PARAMETER, BUFFER) and whole:
            groups[_like(inp.name), inp.shape].append(math.prod(inp.shape) * inp.dtype.itemsize)
    axis = max(mesh.axes, key=lambda pair: pair[1])[0]
    tensors = [
        WholeTensor(name, shape, len(sizes), sum(sizes), mark_largest(shape, axis))
        for (name, shape), sizes in groups.items()
    ]
    return tuple(sorted(tensors, key=lambda tensor: -tensor.bytes))


def mark_largest(shape: tuple[int, ...], axis: str) -> str:
    """Return the mark that divides the largest dimension along an axis."""
    largest = max(range(len(shape)), key=shape.__getitem__)
    return " ".join(axis if d == largest else "_" for d in range(len(shape)))
