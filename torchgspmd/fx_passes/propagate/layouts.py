"""The propagated layouts, with the way that each axis came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

from torch import fx

from ...layout.mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..ir import Op
from .factors import project


@dataclass
class Layouts:
    """The propagated layouts.

    fixed: for each dimension of a value whether a mark closes it.
    origin: (value, axis) -> the value that the axis came from (None: a mark), and why.
    reserved: value -> axes on its dimensions that take part in a later round; see Rounds.
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


# Propagation rounds by mark priorities: batch before model before ZeRO.
#
#     %x : f32[64@data, 256]    %w : f32[512@data, 256], a mark "data:p1 _"    %y = linear(%x, %w)
#
# round 0  %w takes part as f32[512, 256], and may not take `data`: %y is f32[64@data, 512]
# round 1  %w is f32[512@data, 256]; %y has `data` on its rows already
# after    meta["pinned"] of %y: `data` shards the rows, whatever that costs, so %w is gathered
# source   user priorities in Shardy (docs/propagation.md)

Seed = tuple[fx.Node, ShardSpec, str]
PINNED = "pinned"
# The round of weights' marks along the axes of arguments, in pipelines. It pins nothing.
STORED = 0.5


class _Later(NamedTuple):
    """A mark on one dimension, propagated in a later round."""

    value: fx.Node
    dim: int
    axes: Axes
    is_fixed: bool


class Rounds:
    """The order in which marks are propagated.

    layouts: with all marks in place. stored: axes with which a weight's mark waits for others.
    """

    def __init__(
        self,
        layouts: Layouts,
        seeds: Iterable[Seed],
        stored: Mapping[fx.Node, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self.layouts = layouts
        self.later: dict[float, list[_Later]] = {}  # by priority
        self.round_of: dict[tuple[fx.Node, str], int] = {}  # of every axis of a value
        for value, spec, why in seeds:
            for d, (axes, priority) in enumerate(zip_longest(spec.dims, spec.priorities)):
                priority = priority or (STORED if stored.get(value, frozenset()) & {*axes} else 0)
                # Another mark may have won this dimension: then the priority is without effect.
                is_set = all(layouts.origin.get((value, axis)) == (None, why) for axis in axes)
                if priority and axes == layouts.spec[value].dims[d] and is_set:
                    row = _Later(value, d, axes, layouts.fixed[value][d])
                    self.later.setdefault(priority, []).append(row)
        self.count = 1 + len(self.later)
        self.pins = bool({*self.later} - {STORED})
        for rows in self.later.values():
            for row in rows:
                # Closed and without axes for now, so that no earlier round fills the dimension.
                self._set(row.value, row.dim, (), True)
                reserved = layouts.reserved.get(row.value, frozenset())
                layouts.reserved[row.value] = reserved.union(row.axes)

    def __iter__(self) -> Iterator[float]:
        """Yield the priorities, the strongest first; set the marks of each before it."""
        for priority in sorted({0, *self.later}):
            for value, d, axes, is_fixed in self.later.get(priority, ()):
                self._set(value, d, axes, is_fixed)
                self.layouts.reserved[value] -= frozenset(axes)
            yield priority
            if self.pins:
                self._note(int(priority))

    def _set(self, value: fx.Node, dim: int, axes: Axes, is_fixed: bool) -> None:
        layouts, fixed = self.layouts, list(self.layouts.fixed[value])
        fixed[dim] = is_fixed
        layouts.spec[value], layouts.fixed[value] = (
            layouts.spec[value].with_dim(dim, axes),
            tuple(fixed),
        )

    def _note(self, priority: int) -> None:
        """Note the round for every axis that a value got in it."""
        for key, (source, why) in self.layouts.origin.items():
            value, axis = key
            if key not in self.round_of and axis in self.layouts.spec[value].sharding_axes:
                self.round_of[key] = priority
                self.layouts.origin[key] = source, f"{why} (p{priority})"

    def staying(
        self, op: Op, mesh: Mesh, axes: Iterable[str]
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield (axis, its factor) for axes along which no value in an operation may move."""
        found: dict[str, dict[str, None]] = {axis: {} for axis in axes}
        for value, dims in op.tensors:
            of_value = project(dims, self.layouts.spec[value], op.rule.sizes, mesh)
            for factor, of_factor in of_value.items():
                for axis in of_factor:
                    if axis in found and factor not in op.rule.replicated:
                        found[axis][factor] = None
        # An axis on two factors moves anyhow, and pins neither.
        yield from ((axis, (*of_axis,)) for axis, of_axis in found.items() if len(of_axis) == 1)

    def as_laid_out(
        self, op: Op, mesh: Mesh, value: fx.Node
    ) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
        """Return each axis's effect where an operation's result has a given value's layout."""
        dims, spec = op.rule.results[0], self.layouts.spec[value]
        factor_of = {
            axis: factor
            for factor, axes in project(dims, spec, op.rule.sizes, mesh).items()
            for axis in axes
        }
        return tuple((axis, (factor_of.get(axis),)) for axis, size in mesh.axes if size > 1)

    def pinned(self, op: Op, mesh: Mesh) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return (axis, the factors in the earliest round) where layouts of several rounds meet."""
        rounds: dict[str, dict[str, int]] = {}  # axis -> factor -> the first round of the two
        for value, dims in op.tensors if self.pins else ():
            of_value = project(dims, self.layouts.spec[value], op.rule.sizes, mesh)
            for factor, axes in of_value.items():
                if factor not in op.rule.replicated:
                    for axis in axes:
                        of_axis = rounds.setdefault(axis, {})
                        number = self.round_of[value, axis]
                        of_axis[factor] = min(number, of_axis.get(factor, number))
        return tuple(
            (axis, tuple(f for f, number in of_axis.items() if number == min(of_axis.values())))
            for axis, of_axis in rounds.items()
            if len({*of_axis.values()}) > 1
        )
