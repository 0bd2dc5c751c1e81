"""Strategies, and the layouts around an operation, by which they are chosen.

%b = relu(%a)      strategy {d0: data}: [data, _] -> [data, _]
                   neighborhood: %a exists as [data, _]; %b is used as [_, model]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from ...shard_spec import Axes, ShardSpec

Terms = tuple[tuple[int, Axes], ...]


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
    layouts: tuple[ShardSpec, ...] = field(init=False)  # of results, then of operands
    terms: Terms = field(init=False)  # operands that have to be pending, and over which axes

    def __post_init__(self) -> None:
        terms = tuple([(i, s.pending) for i, s in enumerate(self.operands) if s.pending])
        object.__setattr__(self, "layouts", (*self.results, *self.operands))
        object.__setattr__(self, "terms", terms)


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
    """Returns one object per content, so that caches compare identities. Pass all arguments."""

    def __init__(self) -> None:
        self.operand_layouts, self.neighborhood = cache(OperandLayouts), cache(Neighborhood)
        self.kinds: dict[tuple, int] = {}

    def kind(self, *value: object) -> int:
        """Return a number that is equal for values with the same moves at the same cost."""
        return self.kinds.setdefault(value, len(self.kinds))
