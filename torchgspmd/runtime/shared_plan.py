"""One process plans: rank 0, unless an earlier start's plan is there; the others receive it.

before   every rank has checked that all call the module alike
after    every rank has the plan; a rank for which rank 0's does not hold has planned for itself
ensures  all ranks take part in one broadcast, whatever fails

Rank 0 sends text (plan_cache/), in which nothing is evaluated. Each rank compares its own model and
code before it takes the plan. Afterwards all ranks compare their programs. Why a process plans is a
line in the log "torchgspmd", at level INFO.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from ..capture import State
from ..capture.trace_context import without_gc
from ..comm.json_rows import conforms
from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import check_ranks
from ..compiler.plan import Plan
from ..compiler.plan_cache import files, json_text
from ..compiler.plan_cache.files import Identity
from ..compiler.plan_cache.json_text import Stale, Unshareable
from ..compiler.plan_cache.plans import decode_plan, encode_plan

PlanHere = Callable[[Callable[[], None]], Plan]
_LOG = logging.getLogger("torchgspmd")
_NO_TEXT = "no text: "  # begins a file that says why a program has none


class SharedPlan(NamedTuple):
    """A plan, and its text's checksum; None if it is not from the text that rank 0 sent."""

    plan: Plan
    checksum: str | None = None


def shared_plan(
    groups: ProcessGroups,
    model: nn.Module,
    state: State,
    identity: Identity | str,
    plan_here: PlanHere,
    holds: Callable[[Plan], bool],
) -> SharedPlan:
    """Return a call's plan. identity: a text says why the plan is for this rank alone.

    plan_here: plans in this process; it calls its argument before it communicates, so that the
    other ranks do not wait for rank 0, but plan too. holds: whether a plan's guards hold for the
    call, as it may compare sizes and values.
    """
    receiver = _Receiver(model, groups, holds)
    if groups.rank == 0:
        return _Sender(receiver, state, plan_here).plan(identity)
    sent = broadcast_text(groups, None)
    if isinstance(identity, str):
        _log(model, identity)
    elif sent is None:
        _log(model, "rank 0 sends no plan")
    else:
        try:
            call, code, text = unpacked(sent)
            if call != identity.call:
                raise Stale("the calls differ")
            identity.check_code(code)
            return SharedPlan(receiver.decode(text), _checksum(text))
        except Stale as stale:
            _log(model, f"of the plan of rank 0, {stale}")
    return SharedPlan(plan_here(_nothing))


def compare(
    groups: ProcessGroups, number: int, detailed: Callable[[], int], on_difference: Callable
) -> int:
    """Return the number that all ranks have: the first one, or if these differ the detailed one.

    on_difference: called on every rank if the detailed ones differ too.
    """
    differs: list[bool] = []
    check_ranks(groups, number, lambda: differs.append(True))
    if differs:
        number = detailed()
        check_ranks(groups, number, on_difference)
    return number


def _nothing() -> None:
    """Do nothing: this rank has received rank 0's message."""


class _Receiver(NamedTuple):
    """A rank that takes a text's plan for a call."""

    model: nn.Module
    groups: ProcessGroups
    holds: Callable[[Plan], bool]

    @without_gc()
    def decode(self, text: str) -> Plan:
        """Return a text's plan.

        Raises:
            Stale: It is not for this process, or not for this call.
        """
        try:
            plan = decode_plan(text, self.model, self.groups.mesh, Plan)
        except Unshareable as error:
            raise Stale(str(error)) from error
        if not self.holds(plan):
            raise Stale("the call takes another branch")
        return plan


class _Sender:
    """Rank 0, which sends exactly one message for a plan."""

    def __init__(self, receiver: _Receiver, state: State, plan_here: PlanHere) -> None:
        self.receiver, self.groups, self.model = receiver, receiver.groups, receiver.model
        self.state, self.plan_here, self.has_sent = state, plan_here, False

    def plan(self, identity: Identity | str) -> SharedPlan:
        """Return the plan, and send it; nothing is sent if each rank has to plan."""
        if isinstance(identity, str):
            return self._alone(identity)
        text = files.read(identity.text)
        if text is not None and text.startswith(_NO_TEXT):
            return self._alone(text.removeprefix(_NO_TEXT))
        if text is not None:
            try:
                plan = self.receiver.decode(text)
                self._send(identity, text)
                return SharedPlan(plan, _checksum(text))
            except Stale as stale:
                _log(self.model, f"of the plan that was there, {stale}")
        else:
            _log(self.model, f"no plan for it is in {files.folder() or 'a folder: none is named'}")
        return self._planned(identity)

    def _alone(self, why: str) -> SharedPlan:
        """Return a plan for this rank, as all ranks do."""
        self._send(None, "")
        _log(self.model, why)
        return SharedPlan(self.plan_here(_nothing))

    def _planned(self, identity: Identity) -> SharedPlan:
        """Plan, send the text and write it."""
        text = ""
        try:
            # Whatever has failed, the other ranks wait for one message.
            plan = self.plan_here(lambda: self._send(None, ""))
            why = "it stores arguments" if self.has_sent else ""
            if not why:
                why = self.state.learnt
                try:
                    text = "" if why else encode_plan(plan, self.model)
                except Unshareable as error:
                    why = str(error)
                self._send(identity if text else None, text)
        finally:
            self._send(None, "")
        if why:
            _log(self.model, f"the other ranks plan too: {why}")
        # Written also without a text, so that the next start does not try.
        files.write(identity.text, text or f"{_NO_TEXT}{why}")
        return SharedPlan(plan, _checksum(text) if text else None)

    def _send(self, identity: Identity | None, text: str) -> None:
        """Send a plan, or that there is none, unless one was sent."""
        if not self.has_sent:
            # Before the send: a second message would be taken for the next plan's.
            self.has_sent = True
            broadcast_text(self.groups, packed(identity, text) if identity else None)


def _log(model: nn.Module, why: str) -> None:
    """Say why this process plans."""
    _LOG.info("%s is planned: %s", type(model).__name__, why)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def broadcast_text(groups: ProcessGroups, message: str | None) -> str | None:
    if groups.mesh.size == 1:
        return message
    group, first = cast("dist.ProcessGroup | None", groups.checks), groups.processes[0]
    data = bytearray((message or "").encode())
    size = torch.tensor([len(data)], device=groups.checked_on)
    dist.broadcast(size, src=first, group=group)
    # The size goes first, since the others do not know it.
    if not (count := int(size)):
        return None
    content = torch.empty(count, dtype=torch.uint8)
    if data:
        content = torch.frombuffer(data, dtype=torch.uint8)
    content = content.to(groups.checked_on)
    dist.broadcast(content, src=first, group=group)
    return message or content.cpu().numpy().tobytes().decode(errors="replace")


def packed(key: Identity, text: str) -> str:
    """Return a plan's message: a checksum, and behind it the key and the text."""
    content = f"{json.dumps([key.call, key.code])}\n{text}"
    return f"{_checksum(content)}\n{content}"


def unpacked(message: str) -> tuple[str, dict[str, str], str]:
    """Return Identity.call, Identity.code and the text from a message.

    Raises:
        Stale: It is not as it was sent.
    """
    checksum, _, content = message.partition("\n")
    if _checksum(content) != checksum:
        raise Stale("the message is damaged")
    first, _, text = content.partition("\n")
    key = json_text.load(first)
    if not conforms(key, list) or not conforms(tuple(key), tuple[str, dict[str, str]]):
        raise Stale("its key is none")
    return key[0], key[1], text
