"""One process plans: rank 0, unless the plan of an earlier start is there; the others receive it.

before   every rank has checked that all call the module alike
after    every rank has the plan; a rank for which rank 0's does not hold has planned for itself
ensures  all ranks take part in one broadcast, whatever fails

What rank 0 sends is text (plan_cache/), in which nothing is evaluated. Each rank compares what its
own model and code are before it takes the plan. Afterwards all ranks compare their programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from ..capture import State
from ..comm.process_groups import ProcessGroups
from ..plan import Plan
from ..plan_cache import files
from ..plan_cache.identity import Identity
from ..plan_cache.plans import decode_plan, encode_plan
from ..plan_cache.values import Stale, Unshareable
from ..without_gc import without_gc

Text = dict[str, Any]
PlanHere = Callable[[Callable[[], None]], Plan]


def shared_plan(
    groups: ProcessGroups,
    model: nn.Module,
    state: State,
    identity: Identity | None,
    plan_here: PlanHere,
) -> Plan:
    """Return the plan of a call. identity: None if the plan is for this rank alone.

    plan_here: plans in this process; it calls its argument before it communicates, so that the
    other ranks do not wait for rank 0, but plan too.
    """
    if groups.rank == 0:
        return _Sender(groups, model, state).plan(identity, plan_here)
    sent = _broadcast(groups, None)
    if sent is None or identity is None:
        return plan_here(_nothing)
    call, code, text = sent
    try:
        if call != identity.call:
            raise Stale("the calls differ")
        identity.check_code(code)
        return _decode(text, model, groups)
    except Stale:
        return plan_here(_nothing)


def _nothing() -> None:
    """Do nothing: this rank has received the message of rank 0."""


class _Sender:
    """Rank 0, which sends exactly one message for a plan."""

    def __init__(self, groups: ProcessGroups, model: nn.Module, state: State) -> None:
        self.groups, self.model, self.state, self.has_sent = groups, model, state, False

    def plan(self, identity: Identity | None, plan_here: PlanHere) -> Plan:
        """Return the plan, and send it; nothing is sent if each rank has to plan."""
        text = files.read(identity.text) if identity is not None else None
        if identity is None or text is not None and "why" in text:
            self._send(None)
            return plan_here(_nothing)
        if text is not None:
            try:
                plan = _decode(text, self.model, self.groups)
                self._send((identity.call, identity.code, text))
                return plan
            except Stale:
                text = None
        try:
            plan = plan_here(lambda: self._send(None))
            if not self.has_sent:
                text = self._encode(plan)
                self._send(text and (identity.call, identity.code, text))
        finally:
            self._send(None)
        files.write(identity.text, text or {"why": "it has no text"})
        return plan

    def _encode(self, plan: Plan) -> Text | None:
        """Return the text of a plan, None if it has none."""
        if not self.state.is_fresh:
            return None
        try:
            return encode_plan(plan, self.model)
        except Unshareable:
            return None

    def _send(self, message: Any) -> None:
        """Send a message unless one was sent."""
        if not self.has_sent:
            self.has_sent = True
            _broadcast(self.groups, message)


def _broadcast(groups: ProcessGroups, message: Any) -> Any:
    """Return the message of rank 0."""
    messages, group = [message], cast("dist.ProcessGroup | None", groups.checks)
    if groups.mesh.size > 1:
        dist.broadcast_object_list(messages, src=groups.processes[0], group=group)
    return messages[0]


@without_gc()
def _decode(text: Text, model: nn.Module, groups: ProcessGroups) -> Plan:
    """Return the plan of a text.

    Raises:
        Stale: It is not for this process.
    """
    try:
        return decode_plan(text, model, groups.mesh, Plan)
    except (Stale, Unshareable) as error:
        raise Stale(str(error)) from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Stale(f"the text is no plan: {error}") from error
