"""Methods of Plan that estimate, verify, compare and show it; they load when one is called."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx

from ...comm.hardware import Hardware
from ...comm.local_ops import to_host
from ...compat.private_apis import OpOverload
from ...compiler.golden import COMMUNICATION, read, sources_of
from ...compiler.plan import Plan
from ...compiler.plan_summary import buckets_text, limits_text, recomputed_text
from ...errors import ShardingError
from ...fx_passes.loop_call import BodyCall, LoopCall
from ...rules.registry import HOST_READS
from ..certificate import Certificate, blamed, certify
from .diff import PlanDiff, layout_changes, try_marks
from .estimate import COMPUTE, Estimate, estimate
from .explanation import explain
from .kernels import Kernels
from .page import page_data, page_text
from .report import Report, report

# A device that waits computes nothing, so both share a row.
_ROWS = {COMPUTE: (1, "compute"), "exposed": (1, "compute"), "communication": (2, "communication")}


class PlanViews(Plan):
    """The definitions for Plan's ToolMethods, by name (compiler/__init__.py)."""

    def estimate(
        self, hardware: str | Hardware = "h100", kernels: Kernels | None = None
    ) -> Estimate:
        """Estimate a run's time on some hardware.

        Args:
            hardware: A preset, such as "h100", "gb300", "tpu_v5p" or "cpu_gloo", or a Hardware.
            kernels: A framework's fused kernels; by default one for each operation of PyTorch.

        Returns:
            The one-device program's time line, without the optimizer.

        Raises:
            ShardingError: There is no such preset.

        Example:
            >>> result = plan(torch.sum, torch.ones(4, 8), mesh=Mesh(data=2), in_specs="data _")
            >>> result.estimate("h100").seconds > result.estimate("h100").busy("compute")
            True
        """
        hardware, model = Hardware.of(hardware), self.captured.graph
        return estimate(self.program_graph, model, self.mesh, hardware, kernels)

    def verify(self) -> Certificate:
        """Check each value in the planned programs against the one-device program.

        All devices' programs run in this process, in lockstep, on random 64-bit numbers with NaN in
        all padding. Each value that says which plan value it is, and in which layout, is compared
        with it. docs/certificate.md has the method and what it leaves out.

        Returns:
            The Certificate; print it. It lists the values that could not be judged.

        Raises:
            ShardingError: A value differs: a fault in torchgspmd. It names the value, its line, and
                the pass that made it so, which planning again has shown.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> print(result.verify())
            certified 4 of 4 values and 1 result, in 2 trials, on 8 ranks, and by eager PyTorch
        """
        try:
            return certify(self)
        except ShardingError as error:
            raise blamed(self, error) from error

    def uncapturable(self) -> tuple[Uncapturable, ...]:
        """List the values that a CUDA graph cannot compute, where a whole step is captured.

        docs/gpu.md has the capture.

        Returns:
            For each such value its name, a reason, and the line in the model.

        Example:
            >>> result = plan(lambda x: x[x > 0].sum(), torch.ones(4), mesh=Mesh(data=2))
            >>> result.uncapturable()[0].why
            'its size is known only in a run'
        """
        return uncapturable(self.program_graph)

    def explain(self, name: str, costs: bool = False, hardware: str | Hardware = "h100") -> str:
        """Explain a line of the printed plan.

        Args:
            name: A name that the plan prints, with or without `%`, or an input's name.
            costs: Add a table with the layouts in which a value could be computed, and their costs.
            hardware: As for estimate; for the times that ways between two layouts take.

        Returns:
            For a value: one line for each axis and each operation back to a mark. For a step that
            moves a value: the operations that need it, the ways there with bytes and time, and the
            marks. docs/debugging_a_layout.md tells how to read it.

        Raises:
            ShardingError: The plan has no such name.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> result.explain("einsum").splitlines()[0]
            'data: %einsum [data _] <- einsum: m k, k n -> m n'
            >>> result.explain("einsum_r").splitlines()[0]
            '%einsum_r moves %einsum from [data _ sum@model] to [data _]'
        """
        return explain(self, name, costs, Hardware.of(hardware))

    def check(self, path: str | Path, update: bool = False) -> str:
        """Compare with the golden text in a file, which stands under version control.

        Args:
            path: The file, of this method or of `torchgspmd check`.
            update: Write the file, instead of raising an error.

        Returns:
            The lines that differ, if the file is written; "" if none does.

        Raises:
            ShardingError: A line differs: a collective (kind, axes, module, bytes), an input's
                layout, a replicated operation or the memory. Or there is no such file.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "plan.txt")
            >>> x, w, mesh = torch.ones(4, 8), torch.ones(8, 16), Mesh(data=2, model=4)
            >>> one = plan(torch.matmul, x, w, mesh=mesh, in_specs=("data _", "_ model"))
            >>> _ = one.check(path, update=True)
            >>> two = plan(torch.matmul, x, w, mesh=mesh, in_specs=("data model", "model _"))
            >>> try:
            ...     two.check(path)
            ... except ShardingError as error:
            ...     print(error.what.splitlines()[3])
            new      forward  all_reduce  model  f32  (outside)  192 B
        """
        path, now, places = Path(path), self.golden, sources_of(self.collectives)
        before = now if update and not path.exists() else read(path)
        changes = [replace(c, where=places.get(c.name)) for c in before.changes(now)]
        lines = "\n".join(f"  {change}" for change in changes)
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(now), encoding="utf-8")
        elif changes:
            sent = sum(each.section == COMMUNICATION for each in changes)
            raise ShardingError(
                f"the plan differs from {path}: {sent} of its collectives' lines, "
                f"{len(changes) - sent} others\n{lines}",
                fix="undo the change, or agree to it: plan.check(path, update=True), "
                "torchgspmd check ... --update",
            )
        return lines

    def trace(self, hardware: str | Hardware = "h100") -> str:
        """Return a run's time line as a trace, for Perfetto or chrome://tracing.

        Args:
            hardware: As for estimate.

        Returns:
            A JSON file's text.

        Raises:
            ShardingError: There is no such preset.

        Example:
            >>> result = plan(torch.sum, torch.ones(4, 8), mesh=Mesh(data=2), in_specs="data _")
            >>> "all_reduce" in result.trace()
            True
        """
        return trace_text(self.estimate(hardware))

    def diff(self, other: Plan, hardware: str | Hardware = "h100") -> PlanDiff:
        """Compare with another plan for the same model: with other marks, or on another mesh.

        Args:
            other: The other plan.
            hardware: As for estimate.

        Returns:
            The differences. Print it.

        Raises:
            ShardingError: There is no such preset.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> mesh = Mesh(data=2, model=4)
            >>> one = plan(torch.matmul, x, w, mesh=mesh, in_specs=("data model", "model _"))
            >>> two = plan(torch.matmul, x, w, mesh=mesh, in_specs=("data _", "_ model"))
            >>> len(one.diff(two).changes) > 1, len(one.diff(one).changes)
            (True, 0)
        """
        changes = layout_changes(self.sharded, other.sharded)
        return PlanDiff(self.report(hardware), other.report(hardware), changes)

    def html(
        self, path: str | Path, hardware: str | Hardware = "h100", title: str = "Plan"
    ) -> None:
        """Write a page that shows the plan: one HTML file, which needs no network.

        Args:
            path: The file.
            hardware: As for estimate.
            title: The page's title.

        Raises:
            ShardingError: There is no such preset.

        Example:
            >>> result = plan(torch.sum, torch.ones(4, 8), mesh=Mesh(data=2), in_specs="data _")
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "plan.html")
            >>> result.html(path)
            >>> os.path.exists(path)
            True
        """
        Path(path).write_text(self._page(title, self.report(hardware)), encoding="utf-8")

    def _page(self, title: str, report: Report) -> str:
        graphs = self.captured, self.sharded, self.program_graph
        return page_text(page_data(title, *graphs, self.layouts, report))

    def _repr_html_(self) -> str:
        """Return the page, framed, for notebooks."""
        # A frame keeps the page's style and script apart from the notebook's.
        page = self._page("Plan", self.report())
        return f'<iframe srcdoc="{html.escape(page)}" width="100%" height="700"></iframe>'

    def report(
        self,
        hardware: str | Hardware = "h100",
        tried: bool = True,
        kernels: Kernels | None = None,
    ) -> Report:
        """Report a device's memory, work and bytes, and unrequested work.

        Args:
            hardware: As for estimate.
            tried: Whether to plan the marks that are proposed for the three largest tensors that
                are whole, if these have 1 MiB and a 64th of the peak or more.
            kernels: As for estimate.

        Returns:
            The report. Print it, or read its parts.

        Raises:
            ShardingError: There is no such preset.

        Example:
            >>> result = plan(torch.sum, torch.ones(4, 8), mesh=Mesh(data=2), in_specs="data _")
            >>> result.report("h100").memory.inputs
            64
        """
        alone = report(
            self.captured,
            self.sharded,
            self.program_graph,
            self.replicated_ops,
            self.estimate(hardware, kernels),
        )
        asked = [] if self.request is None else [self.request.planned_for]
        buckets = [buckets_text(self.program_graph, self.mesh, each) for each in asked]
        again = recomputed_text(self.program_graph, self.counts)
        lines = [*again, *filter(None, buckets), *limits_text(self.counts)]
        alone = replace(alone, limits=tuple(lines))
        # A plan from a file cannot plan again.
        if self._replanner is None or not tried:
            return alone
        replan = self._replanner()
        whole = try_marks(alone, self.captured, lambda marked: replan(marked).report(hardware))
        return replace(alone, whole=whole)


def trace_text(estimate: Estimate) -> str:
    """Return a trace that Perfetto and chrome://tracing open. Times are in microseconds."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in sorted(set(_ROWS.values()))
    ]
    events = [
        {
            "name": ("wait for " if e.stream == "exposed" else "")
            + e.name
            + (f" x {e.runs}" if e.runs > 1 else ""),
            "cat": e.stream,
            "ph": "X",
            "pid": 0,
            "tid": _ROWS[e.stream][0],
            "ts": e.begin * 1e6,
            "dur": e.seconds * 1e6,
            "args": {
                "source": e.source,
                "phase": "backward" if e.backward else "forward",
                "sent_bytes": e.sent,
            },
        }
        for e in estimate.events
    ]
    memory = [
        # A counter, which Perfetto draws as a curve.
        {"name": "memory", "ph": "C", "pid": 0, "ts": e.begin * 1e6, "args": {"bytes": e.alive}}
        for e in estimate.events
    ]
    return json.dumps({"traceEvents": [*names, *events, *memory], "displayTimeUnit": "ms"})


# Values that a CUDA graph cannot capture: the host reads a value, or sends by itself.


_TAGS = {
    torch.Tag.data_dependent_output: "the host reads its value",
    torch.Tag.dynamic_output_shape: "its size is known only in a run",
    torch.Tag.cudagraph_unsafe: "the host reads values for it",
}


class Uncapturable(NamedTuple):
    """A value that a CUDA graph cannot compute: its name in the plan, a reason, the user's line."""

    name: str
    why: str
    where: str | None


def uncapturable(graph: fx.Graph) -> tuple[Uncapturable, ...]:
    """Return a program's values, loops included, that a CUDA graph cannot compute."""
    return tuple(dict.fromkeys(_found(graph)))


def _found(graph: fx.Graph) -> Iterator[Uncapturable]:
    for node in graph.nodes:
        if why := _reason(node):
            yield Uncapturable(node.name, why, node.meta.get("source"))
        if isinstance(node.target, BodyCall):
            for body in node.target.bodies:
                yield from _found(body.graph)


def _reason(node: fx.Node) -> str | None:
    """Return why a CUDA graph cannot compute a node; None if it can."""
    call = node.target
    if isinstance(call, BodyCall):
        # The other bodies are a pipeline's stages.
        if not isinstance(call, LoopCall):
            return "the host sends and receives between stages"
        return "the host reads the value that ends the loop" if call.loop.ends else None
    if call is to_host:
        return "the host allocates the memory where the value waits for the backward"
    if (reason := HOST_READS.get(call)) is not None:
        why = reason(node)
    else:
        tags = call.tags if isinstance(call, OpOverload) else ()
        why = next((_TAGS[tag] for tag in _TAGS if tag in tags), None)
    if why is None and node.meta.get("unknown"):
        return _TAGS[torch.Tag.dynamic_output_shape]
    return why
