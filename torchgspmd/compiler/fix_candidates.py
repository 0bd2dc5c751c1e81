"""Marks that are tried before an error proposes them, and the errors that do.

The errors are about unrequested work, and about communication that is not agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from torch import fx

from ..capture import BUFFER, PARAMETER, Captured
from ..comm.collective import Collective
from ..errors import ShardingError
from ..fx_passes.replication_report import ReplicatedOp
from ..layout.mark import mark_sharding_op
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .agreement import Agreement
from .plan import Plan
from .plan_summary import moved_by

_WEIGHTS = (PARAMETER, BUFFER)


@dataclass(frozen=True)
class FixCandidate:
    """A mark on a value, and the program's plan with it. weight: the name, if it is a weight."""

    value: str
    spec: ShardSpec
    plan: Plan
    weight: str | None = None

    @property
    def fix(self) -> str:
        if self.weight is not None:
            return f"""annotate(model, mesh, {{"{self.weight}": "{self.spec}"}})"""
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
    marks = ((first.value or "", spec) for spec in _candidate_specs(plan, first))
    best = best_mark(plan, replan, marks, lambda other: len(other.replicated_ops))
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


def best_mark(
    plan: Plan,
    replan: Callable[[Captured], Plan],
    marks: Iterable[tuple[str, ShardSpec]],
    faults: Callable[[Plan], int],
) -> FixCandidate | None:
    """Return the mark with the fewest faults, of those that leave fewer; then with fewer bytes.

    marks: values in the partitioned graph, and layouts for them. faults: counts those in a plan.
    """
    weights = weights_of(plan.captured)
    candidates = []
    for value, spec in dict.fromkeys(marks):
        try:
            marked = _insert_mark(plan.captured, value, plan.mesh, spec)
            candidates.append(FixCandidate(value, spec, replan(marked), weights.get(value)))
        except ShardingError:  # the program refuses this layout: it is no way out
            continue
    # A mark that moves the fault elsewhere cures nothing: only fewer faults count.
    counts = [(faults(each.plan), each.plan.sent_bytes) for each in candidates]
    fewer = [i for i, (count, _) in enumerate(counts) if count < faults(plan)]
    return candidates[min(fewer, key=counts.__getitem__)] if fewer else None


def specs_without(plan: Plan, moved: fx.Node, after: ShardSpec) -> Iterator[tuple[str, ShardSpec]]:
    """Yield marks that may avoid a collective: (value, layout).

    moved: the value in the partitioned graph that it moves. after: the layout that is needed.
    """
    before: ShardSpec = moved.meta["spec"]
    if not before.pending:
        yield from _markable(plan, moved, after)
        for d, axes in enumerate(before.dims):
            if axes != after.dims[d]:
                for other in range(before.rank):
                    moves = {d: (), other: axes} if other != d and not before.dims[other] else {}
                    dims = [moves.get(i, axes) for i, axes in enumerate(before.dims)]
                    yield from _markable(plan, moved, ShardSpec(tuple(dims)))
        return
    # A sum is pending because an operand is sharded along the dimension that is summed.
    for operand in moved.all_input_nodes:
        while "step" in operand.meta:
            operand = operand.all_input_nodes[0]
        spec = operand.meta.get("spec")
        if spec is not None and {*before.pending} & {*spec.sharding_axes}:
            dims = (tuple(a for a in axes if a not in before.pending) for axes in spec.dims)
            yield from _markable(plan, operand, ShardSpec(tuple(dims)))


def weights_of(captured: Captured) -> dict[str, str]:
    """Return the names of parameters and buffers, by their nodes' names."""
    nodes = captured.graph.find_nodes(op="placeholder")
    pairs = zip(nodes, captured.inputs)
    return {node.name: each.name for node, each in pairs if each.kind in _WEIGHTS}


def _markable(plan: Plan, value: fx.Node, spec: ShardSpec) -> Iterator[tuple[str, ShardSpec]]:
    """Yield a value and a layout, if a user can give it to that value."""
    node = next((n for n in plan.captured.graph.nodes if n.name == value.name), None)
    # Parts of axes come from split_axes, and values of the backward have no name in the source.
    whole = {*spec.sharding_axes} <= {*plan.mesh.names} and not spec.windows
    if node is not None and whole and spec != value.meta["spec"] and not node.meta.get("backward"):
        yield value.name, ShardSpec(spec.dims)


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
    if (weight := weights_of(captured).get(name)) is not None:
        inputs = [
            replace(each, mark=spec) if each.name == weight and each.kind in _WEIGHTS else each
            for each in captured.inputs
        ]
        return replace(captured, inputs=inputs)
    graph, new = fx.Graph(), {}
    for node in captured.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        if node.name == name:
            new[node] = graph.call_function(
                mark_sharding_op._opoverload, (new[node], str(mesh), str(spec))
            )
            new[node].meta = dict(node.meta)
    return replace(captured, graph=graph)


_LARGEST = 20  # lines for which marks are proposed
_TRIED = 6  # marks that are planned


def check_communication(
    agreement: Agreement, plan: Plan, replan: Callable[[Captured], Plan]
) -> None:
    """Raise ShardingError for communication that is not agreed. replan: plans other marks."""
    agreement.check_axes(plan.mesh)
    faults = agreement.faults(plan.collectives)
    if not faults:
        return
    lines = [f"  {fault}" for fault in faults.values()]

    def count(other: Plan) -> int:
        return sum(fault.count for fault in agreement.faults(other.collectives).values())

    largest = sorted(faults.values(), key=lambda fault: -fault.each.sent_bytes)
    moves = [ExchangeSite.of(plan, fault.each) for fault in largest[:_LARGEST]]
    # A mark that sends less elsewhere cures no budget.
    over = agreement.golden is None and bool(largest[0].why)
    # Two marks for each: one fault may follow from another.
    marks = [
        mark
        for move in filter(None, () if over else moves)
        for mark in islice(specs_without(plan, move.moved, move.after), 2)
    ]
    weights = weights_of(plan.captured)
    # Weights first: most marks are on them.
    marks.sort(key=lambda mark: mark[0] not in weights)
    best, move, first = best_mark(plan, replan, marks[:_TRIED], count), moves[0], largest[0]
    agree = agreement.way_out(first.each, move and move.after, over, first.each.value in weights)
    raise ShardingError(
        "\n".join([f"communication that is not agreed, {count(plan)} x in a run", *lines]),
        where=first.each.source,
        why="; ".join(filter(None, (first.why, str(move or "")))) or None,
        fix=f"{best.fix}, or {agree}" if best else agree,
        tried=best.tried if best else None,
    )


class ExchangeSite(NamedTuple):
    """An exchange: the value before it, the layout that it leads to, and what needs that."""

    moved: fx.Node
    after: ShardSpec
    user: fx.Node

    @classmethod
    def of(cls, plan: Plan, each: Collective) -> ExchangeSite | None:
        """Return a collective's exchange; None if the value is computed again in the backward."""
        for node in plan.sharded.nodes:
            step = node.meta.get("step")
            if step is None or (step.collective, step.axes) != (each.kind, each.axes):
                continue
            if (moved := moved_by(node)).name == each.value:
                while (user := next(iter(node.users))).meta.get("step"):
                    node = user
                return cls(moved, node.meta["spec"], user)
        return None

    def __str__(self) -> str:
        rule = self.user.meta.get("rule")
        needs = "the result" if self.user.op == "output" else f"%{self.user.name} '{rule}'"
        before = self.moved.meta["spec"]
        return f"%{self.moved.name} is [{before}], and {needs} needs [{self.after}]"
