"""A trace of an estimate in Chrome's format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json

from .estimate import COMPUTE, Estimate

_ROWS = {COMPUTE: (1, "compute"), "exposed": (1, "compute"), "communication": (2, "communication")}


def trace_text(estimate: Estimate) -> str:
    """Return the events of an estimate as JSON. Times are in microseconds.

    Args:
        estimate: Of a plan.

    Returns:
        The text of a file.
    """
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
        {"name": "memory", "ph": "C", "pid": 0, "ts": e.begin * 1e6, "args": {"bytes": e.alive}}
        for e in estimate.events
    ]
    return json.dumps({"traceEvents": [*names, *events, *memory], "displayTimeUnit": "ms"})
