"""PlanDiff: the differences between two plans for one model, and between a plan and more marks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from ...capture import BUFFER, PARAMETER, Captured
from ...fx_passes.units import size_text, table_text, time_text
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from .report import Report, TriedMark, WholeTensor, mark_largest, section


@dataclass(frozen=True)
class LayoutChange:
    """Like values with another layout. name: with * for numbers. source: the first one's line."""

    name: str
    before: str
    after: str
    count: int
    source: str


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans. It prints as tables.

    Args:
        before: The plan's report.
        after: The other plan's report.
        changes: Values that have another layout.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> mesh = Mesh(data=2, model=4)
        >>> one = plan(torch.matmul, x, w, mesh=mesh, in_specs=("data model", "model _"))
        >>> two = plan(torch.matmul, x, w, mesh=mesh, in_specs=("data _", "_ model"))
        >>> [(c.before, c.after) for c in one.diff(two).changes][:2]
        [('data model', 'data _'), ('model _', '_ model')]
    """

    before: Report
    after: Report
    changes: tuple[LayoutChange, ...]

    def __str__(self) -> str:
        tables = [self._totals(), self._collectives()]
        if self.changes:
            rows = [
                (c.name, f"{c.count} x", f"[{c.before}]", f"[{c.after}]", c.source)
                for c in self.changes
            ]
            header = ("value", "count", "before", "after", "source")
            tables.append(section("values with another layout", header, rows, "count"))
        return "\n\n".join(tables)

    def _totals(self) -> str:
        rows = []
        for name, measure, text in MEASURES:
            old, new = measure(self.before), measure(self.after)
            rows.append((name, text(old), text(new), f"{new / old:.2f}" if old else "-"))
        return table_text(("of a device", "before", "after", "ratio"), rows, "before after ratio")

    def _collectives(self) -> str:
        found = [defaultdict[tuple[str, str], list[int]](lambda: [0, 0]) for _ in range(2)]
        for groups, report in zip(found, (self.before, self.after)):
            for row in report.collectives:
                group = groups[row.kind, "+".join(row.axes)]
                group[0], group[1] = group[0] + row.count, group[1] + round(row.sent_bytes)
        old, new = found
        rows = [
            (*key, *(f"{count} x {size_text(sent)}" for count, sent in (old[key], new[key])))
            for key in sorted({**old, **new})
            if old[key] != new[key]
        ]
        if not rows:
            return "the same communication"
        table = table_text(("kind", "axes", "before", "after"), rows, "before after")
        return "communication that differs\n" + table


MEASURES: tuple[tuple[str, Callable[[Report], float], Callable[[float], str]], ...] = (
    ("step", lambda r: r.estimate.seconds, time_text),
    ("exposed", lambda r: r.estimate.busy("exposed"), time_text),
    ("sent by a device", lambda r: sum(row.sent_bytes for row in r.collectives), size_text),
    ("parameters", lambda r: r.memory.parameters, size_text),
    ("peak of a run", lambda r: r.memory.peak, size_text),
)


def layout_changes(before: fx.Graph, after: fx.Graph) -> tuple[LayoutChange, ...]:
    """Return the values in two partitioned graphs whose layouts differ, like ones together."""
    others = {_key(node): node.meta["spec"] for node in after.nodes if "spec" in node.meta}
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for node in before.nodes:
        old, new = node.meta.get("spec"), others.get(_key(node))
        if old is not None and new is not None and new is not old:
            # Layers differ in numbers alone: one row stands for all.
            name = re.sub(r"_\d+", "_*", node.name)
            groups[name, str(old), str(new)].append(node.meta.get("source") or "")
    return tuple(LayoutChange(*key, len(sources), sources[0]) for key, sources in groups.items())


def _key(node: fx.Node) -> tuple[str, tuple[int, ...]]:
    # With the shape: in another plan the name may stand for another value.
    return node.name, tuple(getattr(node.meta.get("val"), "shape", ()))


# Marks that a report proposes for values that every device holds whole, and their effects.


TRIES = 3  # marks that are planned for a report
MIN_BYTES = 2**20  # a smaller tensor's mark is not planned
MIN_SHARE = 1 / 64  # nor is a tensor's with a smaller share in the device's peak


def try_marks(
    report: Report, captured: Captured, judge: Callable[[Captured], Report]
) -> tuple[WholeTensor, ...]:
    """Return the tensors that are whole; the largest with the mark that gives the shortest step.

    judge: returns the report for a program with other marks.
    """

    def best(tensor: WholeTensor) -> WholeTensor:
        tried = [
            (mark, _difference(judge(_marked(captured, tensor, mark)), report))
            for mark in _marks(tensor, report.estimate.mesh)
        ]
        mark, change = min(tried, key=lambda pair: (pair[1].seconds, pair[1].memory))
        return replace(tensor, mark=mark, tried=change)

    least = max(MIN_BYTES, MIN_SHARE * report.memory.peak)
    large = [tensor for tensor in report.whole if tensor.bytes >= least][:TRIES]
    return (*map(best, large), *report.whole[len(large) :])


def _marks(tensor: WholeTensor, mesh: Mesh) -> list[str]:
    """Return marks on a tensor's largest dimension along each axis, and the one it has."""
    marks = [mark_largest(tensor.shape, axis) for axis, size in mesh.axes if size > 1]
    return list(dict.fromkeys([tensor.mark, *marks]))


def _marked(captured: Captured, tensor: WholeTensor, mark: str) -> Captured:
    inputs = [
        replace(inp, mark=ShardSpec.parse(mark))
        if inp.kind in (PARAMETER, BUFFER) and tensor.is_like(inp.name, inp.shape)
        else inp
        for inp in captured.inputs
    ]
    return replace(captured, inputs=inputs)


def _difference(new: Report, old: Report) -> TriedMark:
    return TriedMark(
        new.estimate.seconds - old.estimate.seconds,
        new.memory.peak + new.memory.optimizer - old.memory.peak - old.memory.optimizer,
        sum(row.sent_bytes for row in new.collectives)
        - sum(row.sent_bytes for row in old.collectives),
    )
