"""compare_with_xla: the same annotated program partitioned by XLA, beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from .annotated_program import decide, lay_out
from .capture import ARGUMENT, BUFFER, PARAMETER
from .comm.collective import Collective
from .errors import ShardingError, user_line
from .fx_passes.printer import type_text
from .plan import Plan
from .shard_spec import ShardSpec
from .xla_backend.hlo import collectives
from .xla_backend.lower import PINS, lower, on_device, unpartitioned
from .xla_backend.runtime import start
from .xla_backend.sharding import device_order, layout_text, spec_of_text
from .xla_backend.state import place_tensor, program_text, sync


def compare_with_xla(plan: Plan, pin: str = "user") -> Comparison:
    """Where XLA's layouts and collectives for a plan's program differ from the plan's. Print it.

    Inputs and results are laid out as in the plan. pin: what XLA is told besides, as in
    parallelize. The process must have as many XLA devices as the mesh; raises ShardingError
    otherwise.
    """
    if pin not in PINS:
        raise ShardingError(
            f"there is no pin '{pin}'; there are {', '.join(map(repr, PINS))}", where=user_line()
        )
    return Comparison(plan, pin)


@dataclass(frozen=True)
class LayoutDifference:
    """A value that XLA lays out otherwise than the plan."""

    name: str
    type: str  # element type and global shape
    source: str | None  # file:line
    ours: ShardSpec
    xla: ShardSpec | None  # None: no axes of the mesh express it


class Comparison:
    """ours, xla: collectives of one run of the program; text: XLA's program; layouts: the values on
    which we differ.
    """

    def __init__(self, plan: Plan, pin: str):
        self.plan, self.pin, self.device = plan, pin, start(plan.mesh, backward=False)
        inputs = list(zip(plan.captured.inputs, plan.input_layouts))
        annotated = lay_out(
            plan.captured,
            plan.mesh,
            [spec for i, spec in inputs if i.kind == ARGUMENT],
            stored={i.name: spec for i, spec in inputs if i.kind in (PARAMETER, BUFFER)},
            parts=pin == "all",
            expand=unpartitioned,
        )
        self.graph = decide(annotated, keep_marks=True) if pin == "all" else annotated.graph
        self.ours: tuple[Collective, ...] = plan.collectives
        self.text = program_text(self._run(self._graph()))
        self.xla: tuple[Collective, ...] = collectives(self.text, plan.mesh)

    @property
    def bytes(self) -> tuple[float, float]:
        """What a device sends in a run: ours, XLA's."""
        return sum(c.sent_bytes for c in self.ours), sum(c.sent_bytes for c in self.xla)

    @cached_property
    def layouts(self) -> tuple[LayoutDifference, ...]:
        """In program order; values that only one of the two programs has are left out."""
        ours = {
            n.meta["captured"]: (n, _resolved(n))
            for n in self.plan.sharded.nodes
            if "captured" in n.meta and "spec" in n.meta
        }
        graph = self._graph()
        values = [
            n for n in graph.nodes if n.meta.get("captured") in ours and n.op == "call_function"
        ]
        graph.output_node().args = ((*graph.output_node().args[0], *values),)
        tensors = self._run(graph)[-len(values) :] if values else []
        sync()
        order, found = tuple(device_order()), []
        for node, tensor in zip(values, tensors):
            mine, spec = ours[node.meta["captured"]]
            theirs = spec_of_text(layout_text(tensor), tensor.dim(), self.plan.mesh, order)
            if theirs is None or theirs != spec:
                val = node.meta["val"]
                found.append(
                    LayoutDifference(
                        mine.name,
                        type_text(val.dtype, val.shape, None),
                        node.meta.get("source"),
                        spec,
                        theirs,
                    )
                )
        return tuple(found)

    def _graph(self) -> fx.Graph:
        results = {i: spec for i, spec in enumerate(self.plan.out_specs) if spec is not None}
        return lower(self.graph, self.plan.mesh, self.device, self.pin, results)

    def _run(self, graph: fx.Graph) -> list[Tensor]:
        """Results, still lazy, for inputs of zeros."""
        inputs = [
            place_tensor(torch.zeros(i.shape, dtype=i.dtype), spec, self.plan.mesh, self.device)
            for i, spec in zip(self.plan.captured.inputs, self.plan.input_layouts)
        ]
        with torch.no_grad():
            results = fx.GraphModule(on_device(self.plan.captured.constants, self.device), graph)(
                *inputs
            )
        return [r for r in results if isinstance(r, Tensor)]

    def __str__(self) -> str:
        """Collectives by kind and axes, then layouts."""
        ours, xla = _totals(self.ours), _totals(self.xla)
        rows = [("collective", "over", "ours", "bytes", "XLA", "bytes")]
        for key in sorted({*ours, *xla}):
            (n, b), (m, c) = ours.get(key, (0, 0)), xla.get(key, (0, 0))
            rows.append((*key, str(n), f"{b:.0f}", str(m), f"{c:.0f}"))
        rows.append(
            (
                "all",
                "",
                str(len(self.ours)),
                f"{self.bytes[0]:.0f}",
                str(len(self.xla)),
                f"{self.bytes[1]:.0f}",
            )
        )
        layouts = [("value", "type", "ours", "XLA", "where")]
        layouts += [
            (
                f"%{d.name}",
                d.type,
                f"[{d.ours}]",
                "?" if d.xla is None else f"[{d.xla}]",
                d.source or "",
            )
            for d in self.layouts
        ]
        return "\n".join(
            [
                f"mesh {self.plan.mesh}, pin {self.pin}: bytes sent by a device",
                *_table(rows),
                "",
                f"{len(self.layouts)} values laid out otherwise",
                *(_table(layouts) if len(layouts) > 1 else ()),
            ]
        )


def _resolved(node: fx.Node) -> ShardSpec:
    """The layout of a value; of a pending one that in which its sum is first had."""
    while node.meta["spec"].pending:
        steps = [user for user in node.users if "step" in user.meta]
        if not steps:
            return node.meta["spec"].with_pending(()).plain().closed()
        node = steps[0]
    return node.meta["spec"].plain().closed()


def _totals(found: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, float]]:
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for c in found:
        count, size = totals.get((c.kind, "+".join(c.axes)), (0, 0.0))
        totals[c.kind, "+".join(c.axes)] = (count + c.count, size + c.sent_bytes)
    return totals


def _table(rows: Sequence[Sequence[Any]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip()
        for row in rows
    ]
