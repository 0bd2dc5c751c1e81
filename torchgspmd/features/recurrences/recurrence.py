"""A recurrence: a body that is computed for each part of a sequence, and what it passes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from ...fx_passes.ir import Op


class Carry(NamedTuple):
    """What an iteration hands to the next one. first: None for zeros. again: the next carry."""

    first: fx.Node | None
    again: fx.Node


@dataclass
class Recurrence:
    """One iteration's operations, in order, and how its values follow from outer ones.

    rows: a value of the iteration -> the values of all iterations, along a first dimension.
    carries: by the value in the iteration. vanishing: values that have to be zeros in the first
    iteration that is computed, where the program has nothing in their places.
    All other operands from outside are the same in each iteration.
    """

    count: int
    reverse: bool
    ops: list[Op]
    rows: dict[fx.Node, fx.Node] = field(default_factory=dict)
    carries: dict[fx.Node, Carry] = field(default_factory=dict)
    vanishing: list[fx.Node] = field(default_factory=list)
