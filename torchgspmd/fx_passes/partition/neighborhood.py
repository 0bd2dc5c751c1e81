"""Search candidates: an operation's strategies, and the layouts around it.

Equal content is one object, so that caches compare identities.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ...shard_spec import Axes, ShardSpec


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """Operand and result layouts under an assignment of axes to factors.

    Like operations share one object for equal strategies.
    """

    assignment: tuple[tuple[str, Axes], ...]
    operands: tuple[ShardSpec, ...]
    results: tuple[ShardSpec, ...]
    work: float  # of one device, in bytes on the wire
    pending: float = 0.0  # bytes of its results that are left pending


@dataclass(frozen=True, slots=True, eq=False)
class OperandLayouts:
    """The layouts in which an operand exists.

    layouts: the first is the one that it is produced in.
    sharers: how many operations share the cost of a new layout.
    deferrable: axes over which the operand could be left pending.
    """

    layouts: tuple[ShardSpec, ...]
    sharers: int
    deferrable: Axes


@dataclass(frozen=True, slots=True, eq=False)
class Neighborhood:
    """The layouts around an operation.

    required: for each result the layouts in which it is used.
    first: whether these are the propagated layouts, before any choice.
    only_inputs: whether all operands are program inputs.
    """

    operands: tuple[OperandLayouts, ...]
    required: tuple[tuple[ShardSpec, ...], ...]
    first: bool
    only_inputs: bool


class Interner:
    """Returns one object per content. All arguments have to be passed."""

    def __init__(self) -> None:
        self.operand_layouts, self.neighborhood = cache(OperandLayouts), cache(Neighborhood)
