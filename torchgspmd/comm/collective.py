"""Collective, a plan's record of one; start and wait, by which one device's program has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn


@dataclass(frozen=True)
class Collective:
    """A collective at one line in the user's code, which every device runs `count` times.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
        axes: Mesh axes that a group runs over.
        group_size: Devices in a group.
        dtype: The dtype of the payload, such as "f32".
        payload_bytes: Bytes that one run carries; the kind's module names the tensor.
        sent_bytes: Bytes that one device sends in all `count` runs, padding included; where devices
            differ, by the busiest one.
        count: How often it runs in a call.
        source: file:line where the operation stands that needs it.
        module: Path of the module that computes the moved value; for a weight or another input its
            name.
        backward: Whether it belongs to the backward.
        value: Name of the moved value in the printed plan.
        named: Whether the source names it, by `reshard`.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> specs = ("data model", "model _")
        >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
        >>> [(c.kind, c.axes, c.sent_bytes) for c in result.collectives]
        [('all_reduce', ('model',), 192.0)]
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    payload_bytes: float
    sent_bytes: float
    count: int = 1
    source: str | None = None
    module: str = field(default="", compare=False)
    backward: bool = field(default=False, compare=False)
    value: str = field(default="", compare=False)
    named: bool = field(default=False, compare=False)


def start(kind: str, operands: tuple[Any, ...], arguments: tuple[tuple[Any, ...], ...]) -> NoReturn:
    """Start collectives, merged into one message; `arguments` has a tuple per operand.

    `wait` gives result number i. Between the two the device computes while it communicates.
    """
    # Calls of it only stand in a plan's graph; lowering replaces each by an operation of c10d.
    raise RuntimeError(
        "start is a node of a plan's graph; run it with Plan.simulate or parallelize"
    )


def wait(started: Any, index: int) -> Any:
    """Return result number `index` from the collectives that `start` began."""
    return started[index]


def split_axes(axes: str) -> tuple[str, ...]:
    """Split a text into its axes: 'data+model' gives ('data', 'model')."""
    return tuple(axes.split("+"))
