"""The propagated layouts, with the way that each axis came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec


@dataclass
class Layouts:
    """The propagated layouts.

    fixed: for each dimension of a value whether a mark closes it.
    origin: (value, axis) -> the value that the axis came from (None: a mark), and why.
    reserved: value -> axes on its dimensions that take part in a later round; see rounds.py.
    """

    mesh: Mesh
    spec: dict[fx.Node, ShardSpec]
    fixed: dict[fx.Node, tuple[bool, ...]]
    origin: dict[tuple[fx.Node, str], tuple[fx.Node | None, str]] = field(default_factory=dict)
    reserved: dict[fx.Node, frozenset[str]] = field(default_factory=dict)

    def seed(self, value: fx.Node, spec: ShardSpec, why: str) -> None:
        """Set a layout from outside; fix its closed dimensions, and keep those fixed before."""
        dims, fixed = list(self.spec[value].dims), list(self.fixed[value])
        taken = {axis for d, axes in enumerate(dims) if fixed[d] for axis in axes}
        for d, axes in enumerate(spec.dims):
            # First come: several marks may lie on one value, and an axis shards one dimension.
            if not fixed[d] and not taken & set(axes):
                dims[d] = axes
                taken |= set(axes)
                fixed[d] = not spec.open[d]
                self.origin.update({(value, axis): (None, why) for axis in axes})
        self.spec[value], self.fixed[value] = ShardSpec(tuple(dims)), tuple(fixed)

    def of(self, new: Mapping[fx.Node, fx.Node]) -> Layouts:
        """Return the layouts for a copied graph. new: the copy's nodes."""
        return Layouts(
            self.mesh,
            {new[value]: spec for value, spec in self.spec.items()},
            {new[value]: fixed for value, fixed in self.fixed.items()},
            {
                (new[value], axis): (source and new[source], why)
                for (value, axis), (source, why) in self.origin.items()
            },
        )

    def explain(self, value: fx.Node) -> list[str]:
        """Return, for every axis, the chain from a value back to the mark, one line per step."""
        lines = []
        for axis in self.spec[value].sharding_axes:
            at: fx.Node | None = value
            while at is not None:
                before, why = self.origin.get((at, axis), (None, "an input that was left open"))
                lines.append(f"{axis}: %{at.name} {self.describe(at)} <- {why}")
                at = before
        return lines or [f"%{value.name} {self.describe(value)}: no mark reaches it"]

    def root(self, value: fx.Node, axis: str) -> fx.Node:
        """Return the value whose mark gave this value the axis."""
        while (before := self.origin.get((value, axis), (None, ""))[0]) is not None:
            value = before
        return value

    def describe(self, value: fx.Node) -> str:
        """Return a value's layout as text, in brackets."""
        return f"[{self.spec[value]}]"
