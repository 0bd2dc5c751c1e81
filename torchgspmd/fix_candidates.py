"""What would cure an error of strict=True: marks that are tried before they are proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from .annotate import mark_sharding_op
from .capture import Captured
from .errors import ShardingError
from .fx_passes.replication_report import ReplicatedOp
from .mesh import Mesh
from .plan import Plan
from .shard_spec import ShardSpec


@dataclass(frozen=True)
class Cure:
    """A mark on one value, and the plan of the program with it."""

    value: str
    spec: ShardSpec
    plan: Plan

    @property
    def fix(self) -> str:
        return f'mark_sharding(%{self.value}, mesh, "{self.spec}") before it'

    @property
    def tried(self) -> str:
        kinds: dict[str, int] = {}
        for c in self.plan.collectives:
            kinds[c.kind] = kinds.get(c.kind, 0) + c.count
        moved = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no communication"
        left = len(self.plan.replicated_ops)
        return f"{moved}, {self.plan.sent_bytes:.0f} bytes sent, {left or 'nothing'} replicated or gathered unasked"


def report_replicated(plan: Plan, again: Callable[[Captured], Plan]) -> ShardingError:
    """The error for a plan that has replicated_ops. again: plans a changed program as this one was
    planned.
    """
    first, count = plan.replicated_ops[0], len(plan.replicated_ops)
    cures = [
        Cure(first.value, spec, again(_marked(plan.captured, first.value, plan.mesh, spec)))
        for spec in _candidates(plan, first)
    ]
    cures = [c for c in cures if len(c.plan.replicated_ops) < count]
    best = min(cures, key=lambda c: (len(c.plan.replicated_ops), c.plan.sent_bytes), default=None)
    return ShardingError(
        f"{first.op} replicates or gathers {first.bytes} bytes on every device, which strict does not allow",
        where=first.source,
        why=first.why + (f"; {count - 1} more" if count > 1 else ""),
        fix=best.fix
        if best
        else "mark its operands so that this dimension is whole, or see plan.replicated_ops "
        "without strict",
        tried=best.tried if best else None,
    )


def _candidates(plan: Plan, found: ReplicatedOp) -> Iterator[ShardSpec]:
    """Other layouts of the value that was gathered: its axes on another dimension that they divide,
    or on none.
    """
    node = next((n for n in plan.sharded.nodes if n.name == found.value), None)
    if node is None or not any(
        n.name == found.value and not n.meta.get("backward") for n in plan.captured.graph.nodes
    ):
        return
    held, shape = node.meta["spec"], node.meta["val"].shape
    if not {a for axes in held.dims for a in axes} <= set(plan.mesh.names):
        return
    axes = held.dims[found.dim]
    left = [() if d == found.dim else held.dims[d] for d in range(held.rank)]
    for d in range(held.rank):
        if d != found.dim and not held.dims[d] and shape[d] % plan.mesh.count(axes) == 0:
            yield ShardSpec(tuple(axes if i == d else rest for i, rest in enumerate(left)))
    yield ShardSpec(tuple(left))


def _marked(captured: Captured, name: str, mesh: Mesh, spec: ShardSpec) -> Captured:
    """The program with a mark on one of its values, as mark_sharding would put it there."""
    graph, new = fx.Graph(), {}
    for node in captured.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        if node.name == name:
            new[node] = graph.call_function(
                mark_sharding_op._opoverload, (new[node], str(mesh), str(spec))
            )
            new[node].meta = dict(node.meta)
    return replace(captured, graph=graph)
