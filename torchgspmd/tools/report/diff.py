"""PlanDiff: the differences between two plans for one model."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from ...fx_passes.units import size_text, table_text, time_text
from ...shard_spec import ShardSpec
from .report import ROWS, Report


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
                for c in self.changes[:ROWS]
            ]
            table = table_text(("value", "count", "before", "after", "source"), rows, "count")
            rest = len(self.changes) - ROWS
            tables.append(
                "values with another layout\n"
                + table
                + (f"\n  and {rest} more" if rest > 0 else "")
            )
        return "\n\n".join(tables)

    def _totals(self) -> str:
        rows: list[tuple[str, ...]] = [
            _row("step", lambda r: r.estimate.seconds, time_text, self.before, self.after),
            _row(
                "exposed", lambda r: r.estimate.busy("exposed"), time_text, self.before, self.after
            ),
            _row("sent by a device", _sent, size_text, self.before, self.after),
            _row("parameters", lambda r: r.memory.parameters, size_text, self.before, self.after),
            _row("peak of a run", lambda r: r.memory.peak, size_text, self.before, self.after),
        ]
        return table_text(("of a device", "before", "after", "ratio"), rows, "before after ratio")

    def _collectives(self) -> str:
        counts = [Counter[tuple[str, str]](), Counter[tuple[str, str]]()]
        sent = [Counter[tuple[str, str]](), Counter[tuple[str, str]]()]
        for i, report in enumerate((self.before, self.after)):
            for row in report.collectives:
                counts[i][row.kind, "+".join(row.axes)] += row.count
                sent[i][row.kind, "+".join(row.axes)] += round(row.sent_bytes)
        rows = [
            (
                kind,
                axes,
                *(f"{counts[i][kind, axes]} x {size_text(sent[i][kind, axes])}" for i in (0, 1)),
            )
            for kind, axes in sorted(counts[0] | counts[1])
            if (counts[0][kind, axes], sent[0][kind, axes])
            != (counts[1][kind, axes], sent[1][kind, axes])
        ]
        if not rows:
            return "the same communication"
        table = table_text(("kind", "axes", "before", "after"), rows, "before after")
        return "communication that differs\n" + table


def _sent(report: Report) -> float:
    return sum(row.sent_bytes for row in report.collectives)


def _row(
    name: str,
    measure: Callable[[Report], float],
    text: Callable[[float], str],
    before: Report,
    after: Report,
) -> tuple[str, ...]:
    old, new = measure(before), measure(after)
    return name, text(old), text(new), f"{new / old:.2f}" if old else "-"


def layout_changes(before: fx.Graph, after: fx.Graph) -> tuple[LayoutChange, ...]:
    """Return the values in both graphs that have another layout in the second.

    Args:
        before: A partitioned graph.
        after: Another one for the same program.

    Returns:
        Like values together, in program order.
    """
    others = dict(_layouts(after))
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key, node in ((_key(n), n) for n in before.nodes if "spec" in n.meta):
        old, new = node.meta["spec"], others.get(key)
        if new is not None and new is not old:
            # Layers differ in numbers alone: one row stands for all.
            name = re.sub(r"_\d+", "_*", node.name)
            groups[name, str(old), str(new)].append(node.meta.get("source") or "")
    return tuple(LayoutChange(*key, len(sources), sources[0]) for key, sources in groups.items())


def _key(node: fx.Node) -> tuple[str, tuple[int, ...]]:
    # With the shape: in another plan the name may stand for another value.
    return node.name, tuple(getattr(node.meta.get("val"), "shape", ()))


def _layouts(graph: fx.Graph) -> Iterable[tuple[tuple[str, tuple[int, ...]], ShardSpec]]:
    return ((_key(node), node.meta["spec"]) for node in graph.nodes if "spec" in node.meta)
