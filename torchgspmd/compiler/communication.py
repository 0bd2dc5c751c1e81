"""The error for communication that is not agreed: each collective, its reason, and a mark."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from torch import fx

from ..capture import Captured
from ..comm.collective import Collective
from ..errors import ShardingError
from ..shard_spec import ShardSpec
from .agreement import Agreement
from .fix_candidates import best_mark, specs_without, weights_of
from .plan import Plan
from .plan_summary import moved_by

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
    agree = agreement.way_out(first.each, move and move.after, over)
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
