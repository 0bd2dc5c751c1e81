"""The first call's warning: replicated or gathered work that no mark asks for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from ..compiler.plan import Plan
from ..compiler.plan_summary import gathered_text, idle_axes_text
from ..errors import user_line
from ..fx_passes.replication_report import ReplicatedOp
from ..fx_passes.units import size_text
from ..layout.spec_notation import SAME

LARGE_OP = 2**20  # Bytes. What is smaller takes no time that one would see in a step.
LARGE_WEIGHT = 2**16  # Bytes. Gathering fewer is a matter of latency, and marked biases are common.
SHOWN = 3


def warn_of_work(plan: Plan, has_inputs: bool, has_outputs: bool) -> bool:
    """Warn about idle axes, gathered results and replicated work; return whether there is any.

    has_inputs, has_outputs: whether in_specs and out_specs are given.
    """
    results = () if has_outputs else plan.gathered_results
    large = [(name, sent) for name, sent in results if sent >= LARGE_OP]
    texts = [
        *idle_axes_text(plan.mesh, () if has_inputs else plan.idle_axes),
        *(
            f"{line}, at every call, at {user_line()}; write "
            f'parallelize(..., out_specs="{SAME}"), or return only the loss from forward'
            for line in gathered_text(large)
        ),
        *unasked_text(plan.replicated_ops),
    ]
    for text in texts:
        warnings.warn(text, stacklevel=6)
    return bool(texts)


def unasked_text(replicated: Sequence[ReplicatedOp]) -> Iterator[str]:
    """Yield a text about the largest of a plan's replicated_ops, if one is large.

    replicated: the largest is first.
    """
    large = [
        each for each in replicated if each.bytes >= (LARGE_WEIGHT if each.weight else LARGE_OP)
    ]
    if not large:
        return
    # Three are shown: the first ones are most of the cost.
    count = f"{len(large)} operations and weights" if len(large) > 1 else "one operation or weight"
    lines = [
        f"no mark asks for it: {count} of this program, at {user_line()}, "
        "run whole on every device or are gathered",
        *(f"  {size_text(each.bytes)}  {_described(each)}" for each in large[:SHOWN]),
        "  all of them, with reasons: model.plan.replicated_ops; parallelize(..., strict=True) "
        "makes an error of it",
    ]
    yield "\n".join(lines)


def _described(each: ReplicatedOp) -> str:
    """Return the gathered or whole value, its operation, and where that is."""
    where = f" at {each.source}" if each.source else ""
    if each.weight is not None:
        return f"weight '{each.weight}', against its mark, for {each.op}{where}"
    value = f"%{each.value}, gathered for " if each.value else ""
    return f"{value}{each.op}{where}: {each.why}"
