"""A plan's page: one HTML file that needs no network. page.html draws `page_data`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files

from torch import Tensor, fx

from ...capture import BUFFER, PARAMETER, Captured
from ...compiler.plan_summary import pipeline_pictures
from ...fx_passes import Layouts
from ...fx_passes.partition.explain_costs import explain_costs
from ...fx_passes.printer import call_text, type_text
from ...fx_passes.units import short_source, size_text, time_text
from ...shard_spec import ShardSpec
from .report import Report, step_text

COSTS = 40  # operations whose candidates are on the page: like ones count once


def page_text(data: dict[str, object]) -> str:
    """Return the text of an HTML file that draws `page_data`'s data."""
    template = files("torchgspmd.tools.report").joinpath("page.html").read_text()
    # A text with "</script>" would end the page's script.
    return template.replace("DATA", json.dumps(data).replace("</", "<\\/"), 1)


def page_data(
    title: str,
    captured: Captured,
    sharded: fx.Graph,
    program: fx.Graph,
    layouts: Layouts,
    report: Report,
) -> dict[str, object]:
    """Return the data that the page draws: strings, numbers, lists and dictionaries.

    sharded: the partitioned graph. program: the one-device program.
    """
    times, memory = report.estimate, report.memory
    values = _Values(sharded, layouts)
    tensors = [n for n in sharded.nodes if isinstance(n.meta.get("val"), Tensor)]
    rows = [values.row(node) for node in tensors]
    inputs = zip(sharded.find_nodes(op="placeholder"), captured.inputs)
    return {
        "title": title,
        "mesh": times.mesh.axes,
        "tiles": [
            ("step", time_text(times.seconds)),
            ("exposed communication", time_text(times.busy("exposed"))),
            ("MFU", f"{times.mfu:.1%}"),
            ("peak, with optimizer", size_text(memory.peak + memory.optimizer)),
            ("of a device", size_text(times.hardware.memory)),
            ("sent by a device", size_text(sum(row.sent_bytes for row in report.collectives))),
            ("hardware", times.hardware.name),
        ],
        "seconds": times.seconds,
        "memory": memory.peak,
        "report": str(report),
        "values": rows,
        "lines": list(values.lines),
        "costs": list(values.costs.values()),
        "tree": [(inp.name, node.name) for node, inp in inputs if inp.kind in (PARAMETER, BUFFER)],
        "events": [
            {
                "stream": e.stream,
                # page.html counts in microseconds.
                "begin": e.begin * 1e6,
                "seconds": e.seconds * 1e6,
                "name": e.name,
                "value": e.name.removesuffix("_start"),
                "source": short_source(e.source),
                "module": e.module,
                "backward": e.backward,
                "sent": sum(step.sent for step in e.steps),
                "alive": e.alive,
            }
            for e in times.events
        ],
        "collectives": [
            (
                row.kind,
                "+".join(row.axes),
                "backward" if row.backward else "forward",
                row.count,
                row.sent_bytes,
                row.seconds * 1e6,
                row.source,
                row.reason,
                row.value,
            )
            for row in report.collectives
        ],
        "pipelines": pipeline_pictures(program),
        "unasked": [(row.op, row.count, row.bytes, row.source, row.why) for row in report.unasked],
        "whole": [
            (row.name, row.count, str(list(row.shape)), row.bytes, row.proposal)
            for row in report.whole
        ],
    }


class _Values:
    """The rows for values. lines: all reasons, each once. costs: tables, by like operations."""

    def __init__(self, sharded: fx.Graph, layouts: Layouts) -> None:
        self.layouts = layouts
        self.decisions = sharded.output_node().meta.get("decisions")
        self.nodes = {node.name: node for node in layouts.spec}
        self.lines: dict[str, int] = {}
        self.costs: dict[tuple[str, str], str] = {}

    def row(self, node: fx.Node) -> dict[str, object]:
        spec = node.meta.get("spec") or ShardSpec.replicated(node.meta["val"].dim())
        val = node.meta["val"]
        return {
            "name": node.name,
            "type": type_text(val.dtype, val.shape, spec),
            "call": call_text(node),
            "source": short_source(node.meta.get("source")),
            "backward": bool(node.meta.get("backward")),
            "dims": [(int(n), axes) for n, axes in zip(val.shape, spec.dims)],
            "pending": spec.pending,
            "reduction": spec.reduction,
            "returned": any(user.op == "output" for user in node.users),
            "operands": [operand.name for operand in node.all_input_nodes],
            "why": list(self._why(node)),
            "costs": self._costs(node),
        }

    def _why(self, node: fx.Node) -> Iterator[int]:
        """Yield the line numbers that tell why a value has its layout."""
        value, step = self.nodes.get(node.name), node.meta.get("step")
        lines = self.layouts.explain(value) if value is not None else []
        if step is not None:
            before = node.args[0].meta.get("spec")
            lines = [f"a step between two layouts: {step_text(before, step.spec)}"]
        for line in lines or ["a part of a step between two layouts"]:
            # Many values share a reason: the page has each line once.
            yield self.lines.setdefault(line, len(self.lines))

    def _costs(self, node: fx.Node) -> int:
        """Return the number of an operation's table; -1 without one."""
        rule, value = node.meta.get("rule"), self.nodes.get(node.name)
        if not self.decisions or rule is None or value is None or not rule.contraction:
            return -1
        key = (
            str(rule),
            type_text(node.meta["val"].dtype, node.meta["val"].shape, node.meta["spec"]),
        )
        if key not in self.costs:
            if len(self.costs) >= COSTS:
                return -1
            self.costs[key] = explain_costs(self.decisions, value)
        return list(self.costs).index(key)
