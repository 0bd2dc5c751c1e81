"""Calls for which the host reads a value: the operands decide, where operator tags cannot.

    @host_reads(op)
    def _(node): ...        why the host waits for this call, or None: then it does not

A CUDA graph cannot capture such a call (Plan.uncapturable).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

Reason = Callable[[fx.Node], str | None]
HOST_READS: dict[Any, Reason] = {}  # filled at import, and only read afterwards


def host_reads(*ops: object) -> Callable[[Reason], Reason]:
    """Register the reason for some operators."""

    def register(reason: Reason) -> Reason:
        HOST_READS.update(dict.fromkeys(ops, reason))
        return reason

    return register
