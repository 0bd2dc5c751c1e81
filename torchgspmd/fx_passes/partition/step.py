"""Step: one move of a value from one layout to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...shard_spec import Axes, ShardSpec


@dataclass(frozen=True)
class Step:
    """One move: the function's name, its arguments after the tensor, the layout it leads to, and
    what it sends.
    """

    kind: str
    args: tuple[Any, ...]
    spec: ShardSpec
    axes: Axes
    payload: float  # bytes
    sent: float  # bytes a device sends

    @property
    def collective(self) -> str | None:
        """The kind that a plan reports; None if nothing is sent."""
        if self.kind in ("shard", "term", "window") or self.kind == "halo" and not self.sent:
            return None
        return "permute" if self.kind == "halo" else self.kind
