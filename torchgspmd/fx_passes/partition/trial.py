"""The entries that a trial changes in an assignment, as they were before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from ...shard_spec import ShardSpec
from .neighborhood import Neighborhood, Strategy

K = TypeVar("K")
V = TypeVar("V")


@dataclass
class Trial:
    """An assignment's entries before their first change; None for those that were not there.

    waits: whether operations were on the worklist. window_costs: None until a layout changes.
    """

    version: int
    strategies: dict[fx.Node, Strategy | None] = field(default_factory=dict)
    layouts: dict[fx.Node, ShardSpec | None] = field(default_factory=dict)
    required: dict[fx.Node, dict[tuple[fx.Node, int], ShardSpec] | None] = field(
        default_factory=dict
    )
    views: dict[fx.Node, dict | None] = field(default_factory=dict)
    stamps: dict[fx.Node, int | None] = field(default_factory=dict)
    neighborhoods: dict[fx.Node, Neighborhood | None] = field(default_factory=dict)
    waits: dict[fx.Node, bool] = field(default_factory=dict)
    window_costs: dict[tuple[fx.Node, ShardSpec], float] | None = None


def restore_entries(table: dict[K, V], before: dict[K, V | None]) -> None:
    """Give entries their former values; remove those that were not there."""
    for key, value in before.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
