"""Fix candidates for an error with strict=True: marks that are tried before they are proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from ..capture import Captured
from ..errors import ShardingError
from ..fx_passes.replication_report import ReplicatedOp
from ..layout.mark import mark_sharding_op
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .plan import Plan


@dataclass(frozen=True)
class FixCandidate:
    """A mark on one value, and the program's plan with that mark."""

    value: str
    spec: ShardSpec
    plan: Plan

    @property
    def fix(self) -> str:
        return f'call mark_sharding(%{self.value}, mesh, "{self.spec}") before it'

    @property
    def tried(self) -> str:
        kinds: dict[str, int] = {}
        for c in self.plan.collectives:
            kinds[c.kind] = kinds.get(c.kind, 0) + c.count
        moved = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no communication"
        left = len(self.plan.replicated_ops)
        return (
            f"{moved}, {self.plan.sent_bytes:.0f} bytes sent, "
            f"{left or 'nothing'} replicated or gathered unasked"
        )


def report_replicated(plan: Plan, replan: Callable[[Captured], Plan]) -> ShardingError:
    """Return the error for a plan that has replicated_ops, with the best fix.

    replan: plans a changed program with this plan's options.
    """
    first, count = plan.replicated_ops[0], len(plan.replicated_ops)
    value = first.value or ""  # without one there are no candidates
    candidates = [
        FixCandidate(value, spec, replan(_insert_mark(plan.captured, value, plan.mesh, spec)))
        for spec in _candidate_specs(plan, first)
    ]
    # A mark that moves the gather elsewhere cures nothing: only fewer such operations count.
    candidates = [c for c in candidates if len(c.plan.replicated_ops) < count]
    best = min(
        candidates, key=lambda c: (len(c.plan.replicated_ops), c.plan.sent_bytes), default=None
    )
    return ShardingError(
        f"{first.op} replicates or gathers {first.bytes} bytes on every device, "
        "which strict does not allow",
        where=first.source,
        why=first.why + (f"; {count - 1} more" if count > 1 else ""),
        fix=best.fix
        if best
        else "mark its operands so that this dimension is whole, or see plan.replicated_ops "
        "without strict",
        tried=best.tried if best else None,
    )


def _candidate_specs(plan: Plan, gathered: ReplicatedOp) -> Iterator[ShardSpec]:
    """Yield other layouts for a gathered value.

    The axes on its gathered dimension move to another dimension that they divide, or to none.
    """
    node = next((n for n in plan.sharded.nodes if n.name == gathered.value), None)
    # The user can only mark values that forward names: none that a pass or backward made.
    if node is None or not any(
        n.name == gathered.value and not n.meta.get("backward") for n in plan.captured.graph.nodes
    ):
        return
    spec, shape = node.meta["spec"], node.meta["val"].shape
    # Only whole axes are proposed: parts come from split_axes, not from users.
    if not {a for axes in spec.dims for a in axes} <= set(plan.mesh.names):
        return
    axes = spec.dims[gathered.dim]
    others = [() if d == gathered.dim else spec.dims[d] for d in range(spec.rank)]
    for d in range(spec.rank):
        if d != gathered.dim and not spec.dims[d] and shape[d] % plan.mesh.count(axes) == 0:
            yield ShardSpec(tuple(axes if i == d else other for i, other in enumerate(others)))
    yield ShardSpec(tuple(others))


def _insert_mark(captured: Captured, name: str, mesh: Mesh, spec: ShardSpec) -> Captured:
    graph, new = fx.Graph(), {}
    for node in captured.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        if node.name == name:
            new[node] = graph.call_function(
                mark_sharding_op._opoverload, (new[node], str(mesh), str(spec))
            )
            new[node].meta = dict(node.meta)
    return replace(captured, graph=graph)
