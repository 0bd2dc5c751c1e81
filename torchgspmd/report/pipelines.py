"""What the pipelines of a plan wait for, and what they keep: bubble against memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ..comm.list_scheduler import curve
from ..comm.loop_call import loop_calls
from ..comm.stage_call import StageCall
from .units import size_text


def pipelines_text(program: fx.Graph) -> Iterator[str]:
    """Yield two lines for each pipeline of a program of one device that has a backward.

    The second one has other points of the curve, if pieces of work take as long.
    """
    for call in _pipelines(program):
        yield from _lines(call)


def pipeline_pictures(program: fx.Graph) -> list[tuple[str, str]]:
    """Return for each such pipeline what it is, and an SVG of what each device does when."""
    return [(next(_lines(call)), call.order.schedule.svg()) for call in _pipelines(program)]


def _pipelines(program: fx.Graph) -> Iterator[StageCall]:
    for _, call in loop_calls(program):
        if isinstance(call, StageCall) and call.order.name != "forward":
            yield call


def _lines(call: StageCall) -> Iterator[str]:
    order, kept = call.order, call.most_kept
    yield (
        f"pipeline over {call.axis}: {order}, {order.schedule.idle:.0%} of the time idle, "
        f"activations of {kept} x {size_text(call.kept_bytes)}"
    )
    limits = [n for n, _ in curve(order.devices, order.microbatches, rounds=order.rounds)]
    shares = [f"{order.zero_bubble(limit).schedule.idle:.0%}" for limit in limits]
    yield f"  zero_bubble with activations of {limits[0]} to {limits[-1]}: {', '.join(shares)} idle"
