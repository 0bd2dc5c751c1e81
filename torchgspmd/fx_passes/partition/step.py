"""Step: one move of a value from one layout to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...shard_spec import Axes, ShardSpec


@dataclass(frozen=True)
class Step:
    """One move of a value: all_to_all(x, 0, 1, data) leads from [data, _] to [_, data].

    kind: the name of the function. args: its arguments after the tensor. spec: the layout after it.
    """

    kind: str
    args: tuple[Any, ...]
    spec: ShardSpec
    axes: Axes
    payload: float  # bytes
    sent: float  # bytes a device sends

    @property
    def collective(self) -> str | None:
        """Return the kind that a plan reports; None if nothing is sent."""
        if self.kind in ("shard", "term", "window") or self.kind == "halo" and not self.sent:
            return None
        return "permute" if self.kind == "halo" else self.kind
