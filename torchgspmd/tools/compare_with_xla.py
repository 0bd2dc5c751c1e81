"""compare_with_xla: partition the same annotated program by XLA and compare it with ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx

from ..capture import ARGUMENT, BUFFER, PARAMETER
from ..comm.collective import Collective
from ..compiler.options import Options
from ..compiler.plan import Plan
from ..fx_passes.printer import type_text
from ..fx_passes.program import Request
from ..fx_passes.units import table_text
from ..shard_spec import ShardSpec
from ..xla_backend.hlo import collectives
from ..xla_backend.lower import annotate_for_xla, lower, on_device
from ..xla_backend.runtime import place_tensor, program_text, start, sync
from ..xla_backend.sharding import device_order, layout_text, spec_of_text


def compare_with_xla(plan: Plan, pin: str = "user") -> XlaComparison:
    """Compare XLA's layouts and collectives for a plan's program with the plan's.

    XLA gets the plan's layouts for inputs and results. The process needs as many XLA devices as the
    mesh has.

    Args:
        plan: A program's plan, from torchgspmd.plan.
        pin: Layouts that XLA gets besides: the marks ("user"), every layout that our partitioner
            chose ("all"), or nothing ("none").

    Returns:
        The XlaComparison, which prints as two tables. Sizes are in bytes that one device sends.

    Raises:
        ShardingError: The pin is unknown, torch_xla is missing, or the mesh does not have all XLA
            devices.

    Example:
        >>> import torch
        >>> from torchgspmd import Mesh, compare_with_xla, plan
        >>> x, w, mesh = torch.ones(4, 8), torch.ones(8, 16), Mesh(data=2, model=4)
        >>> ours = plan(torch.matmul, x, w, mesh=mesh, in_specs=("data model", "model _"))
        >>> try:
        ...     compare_with_xla(ours, pin="most")
        ... except ValueError as error:
        ...     print(error.what)
        there is no pin 'most'; there are 'user', 'all', 'none'
        >>> print(compare_with_xla(ours))  # doctest: +SKIP
    """
    Options.read("xla", {"advanced": {"pin": pin}})
    return XlaComparison(plan, pin)


@dataclass(frozen=True)
class LayoutDifference:
    """A value that has another layout in XLA's program than in the plan.

    type: element type and global shape. source: file:line. xla: None if no mesh axes express XLA's
    layout.
    """

    name: str
    type: str
    source: str | None
    ours: ShardSpec
    xla: ShardSpec | None


class XlaComparison:
    """A plan beside XLA's partition for the same program.

    ours, xla: one run's collectives. text: XLA's program.
    """

    def __init__(self, plan: Plan, pin: str) -> None:
        self.plan, self.pin, self.device = plan, pin, start(plan.mesh, backward=False)
        inputs = list(zip(plan.captured.inputs, plan.input_layouts))
        request = Request(
            plan.captured,
            plan.mesh,
            [spec for i, spec in inputs if i.kind == ARGUMENT],
            # The plan's layouts for weights, so that only values in between may differ.
            stored={i.name: spec for i, spec in inputs if i.kind in (PARAMETER, BUFFER)},
        )
        self.graph = annotate_for_xla(request, pin).graph
        self.ours: tuple[Collective, ...] = plan.collectives
        self.text = program_text(self._run(self._graph()))
        self.xla: tuple[Collective, ...] = collectives(self.text, plan.mesh)

    @property
    def bytes(self) -> tuple[float, float]:
        """Bytes that a device sends in a run: in our program, in XLA's."""
        return sum(c.sent_bytes for c in self.ours), sum(c.sent_bytes for c in self.xla)

    @cached_property
    def layouts(self) -> tuple[LayoutDifference, ...]:
        """Values that both programs have, in different layouts, in program order."""
        ours = {
            n.meta["captured"]: (n, _spec_after_reduction(n))
            for n in self.plan.sharded.nodes
            if "captured" in n.meta and "spec" in n.meta
        }
        graph = self._graph()
        values = [
            n for n in graph.nodes if n.meta.get("captured") in ours and n.op == "call_function"
        ]
        # As results, since XLA shows the layout of a result only.
        graph.output_node().args = ((*graph.output_node().args[0], *values),)
        tensors = self._run(graph)[-len(values) :] if values else []
        # Tensors are lazy: they have layouts once the program is compiled.
        sync()
        # XLA may number the devices in another order than the mesh.
        order, differences = tuple(device_order()), []
        for node, tensor in zip(values, tensors):
            our_node, spec = ours[node.meta["captured"]]
            theirs = spec_of_text(layout_text(tensor), tensor.dim(), self.plan.mesh, order)
            if our_node.meta["val"].shape != node.meta["val"].shape:
                continue  # XLA flattens what has its parts apart here
            if theirs is None or theirs != spec:
                val, source = node.meta["val"], node.meta.get("source")
                kind = type_text(val.dtype, val.shape, None)
                differences.append(LayoutDifference(our_node.name, kind, source, spec, theirs))
        return tuple(differences)

    def _graph(self) -> fx.Graph:
        """Return the program on XLA, with the plan's layouts for results."""
        results = {i: spec for i, spec in enumerate(self.plan.out_specs) if spec is not None}
        return lower(self.graph, self.plan.mesh, self.device, self.pin, results)

    def _run(self, graph: fx.Graph) -> list[Tensor]:
        """Return the results, still lazy, with zeros as inputs."""
        inputs = [
            place_tensor(torch.zeros(i.shape, dtype=i.dtype), spec, self.plan.mesh, self.device)
            for i, spec in zip(self.plan.captured.inputs, self.plan.input_layouts)
        ]
        with torch.no_grad():
            constants = on_device(self.plan.captured.constants, self.device)
            results = fx.GraphModule(constants, graph)(*inputs)
        return [r for r in results if isinstance(r, Tensor)]

    def __str__(self) -> str:
        """Collectives by kind and axes, then layouts."""
        ours, xla = _totals(self.ours), _totals(self.xla)
        rows = []
        for key in sorted({*ours, *xla}):
            (n, b), (m, c) = ours.get(key, (0, 0)), xla.get(key, (0, 0))
            rows.append((*key, str(n), f"{b:.0f}", str(m), f"{c:.0f}"))
        b, c = (f"{size:.0f}" for size in self.bytes)
        rows.append(("all", "", str(len(self.ours)), b, str(len(self.xla)), c))
        layouts = [
            (f"%{d.name}", d.type, f"[{d.ours}]", f"[{d.xla}]" if d.xla else "?", d.source or "")
            for d in self.layouts
        ]
        header = ("collective", "over", "ours", "bytes", "XLA", "bytes")
        lines = [f"mesh {self.plan.mesh}, pin {self.pin}: bytes sent by a device"]
        lines += [table_text(header, rows), "", f"{len(layouts)} values laid out otherwise"]
        lines += [table_text(("value", "type", "ours", "XLA", "where"), layouts)] * bool(layouts)
        return "\n".join(lines)


def _spec_after_reduction(node: fx.Node) -> ShardSpec:
    """Return a value's layout; for a pending one the layout after its reduction."""
    # XLA shows no pending values, but reduced ones.
    while node.meta["spec"].pending:
        steps = [user for user in node.users if "step" in user.meta]
        if not steps:
            return node.meta["spec"].with_pending(()).plain().closed()
        node = steps[0]
    return node.meta["spec"].plain().closed()


def _totals(collectives: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, float]]:
    """Return (count, bytes sent) for the collectives, by kind and axes."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for c in collectives:
        count, size = totals.get((c.kind, "+".join(c.axes)), (0, 0.0))
        totals[c.kind, "+".join(c.axes)] = (count + c.count, size + c.sent_bytes)
    return totals
