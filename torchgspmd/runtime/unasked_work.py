"""The first call's warning: replicated or gathered work that no mark asks for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..compiler.plan_summary import gathered_text, idle_axes_text
from ..errors import user_line
from ..fx_passes.replication_report import ReplicatedOp
from ..fx_passes.units import size_text
from ..layout.mesh import Mesh
from ..layout.spec_notation import SAME

LARGE_OP = 2**20  # Bytes. What is smaller takes no time that one would see in a step.
LARGE_WEIGHT = 2**16  # Bytes. Gathering fewer is a matter of latency, and marked biases are common.
SHOWN = 3


def warn_of_idle_axes(mesh: Mesh, idle: Sequence[str]) -> bool:
    """Warn about axes that divide nothing; return whether there are any."""
    for line in idle_axes_text(mesh, idle):
        warnings.warn(line, stacklevel=6)
    return bool(idle)


def warn_of_gathered_results(results: Sequence[tuple[str, float]]) -> bool:
    """Warn about large results; return whether there are any. results: a plan's."""
    large = [(name, sent) for name, sent in results if sent >= LARGE_OP]
    for line in gathered_text(large):
        warnings.warn(
            f"{line}, at every call, at {user_line()}; write "
            f'parallelize(..., out_specs="{SAME}"), or return only the loss from forward',
            stacklevel=6,
        )
    return bool(large)


def warn_of_unasked(replicated: Sequence[ReplicatedOp]) -> bool:
    """Warn about the largest of a plan's replicated_ops; return whether there was any.

    replicated: the largest is first.
    """
    large = [
        each for each in replicated if each.bytes >= (LARGE_WEIGHT if each.weight else LARGE_OP)
    ]
    if not large:
        return False
    # Three are shown: the first ones are most of the cost.
    count = f"{len(large)} operations and weights" if len(large) > 1 else "one operation or weight"
    lines = [
        f"no mark asks for it: {count} of this program, at {user_line()}, "
        "run whole on every device or are gathered",
        *(f"  {size_text(each.bytes)}  {_described(each)}" for each in large[:SHOWN]),
        "  all of them, with reasons: model.plan.replicated_ops; parallelize(..., strict=True) "
        "makes an error of it",
    ]
    warnings.warn("\n".join(lines), stacklevel=6)
    return True


def _described(each: ReplicatedOp) -> str:
    """Return the gathered or whole value, its operation, and where that is."""
    where = f" at {each.source}" if each.source else ""
    if each.weight is not None:
        return f"weight '{each.weight}', against its mark, for {each.op}{where}"
    value = f"%{each.value}, gathered for " if each.value else ""
    return f"{value}{each.op}{where}: {each.why}"
