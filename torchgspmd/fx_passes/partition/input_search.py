"""Other layouts for open inputs, with all that one of their dimensions runs through.

before   %x : f32[64, 32, 16] is whole on all devices, as only the weights of experts are marked
after    %x : f32[64@expert, 32, 16], and so is all that follows, if that costs less in all
source   ours

No operation gains by dividing tokens alone, nor does a region between two contractions: what is
behind would gather them. So a dimension of an open input is laid out along an axis from its first
use to its last, and the search goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import fx

from ...shard_spec import ShardSpec
from .body_search import BodySearch
from .regions import Body, courses


class InputSearch:
    """Proposes layouts for dimensions of open inputs."""

    def __init__(self, bodies: BodySearch) -> None:
        self.bodies, self.assignment = bodies, bodies.assignment

    def proposals(self) -> Iterator[Callable[[], None]]:
        """Yield functions that propose an axis for dimensions of open inputs each.

        The axes are those that operations exchange values over.
        """
        at = self.assignment
        axes = [a for a in at.mesh.names if a in self.bodies.busy_axes()] if at.open_inputs else []
        share = self.bodies.constants.min_share * len(at.ops)
        for course, places in courses(at.ops, at.open_inputs) if axes else ():
            for axis in axes if len(course.ops) >= share else ():
                if specs := self._specs_with(axis, places):
                    yield partial(self._propose, course, axis, specs)

    def _specs_with(
        self, axis: str, places: Sequence[tuple[fx.Node, int]]
    ) -> dict[fx.Node, ShardSpec]:
        """Return the layouts of those inputs that can have the axis in these dimensions."""
        at, specs = self.assignment, {}
        for value, d in places:
            spec = at.layout_of[value]
            axes = (*spec.dims[d], axis)
            if axis not in spec.sharding_axes and at.mesh.count(axes) <= at.sizes[value][0][d]:
                specs[value] = spec.with_dim(d, axes)
        return specs

    def _propose(self, course: Body, axis: str, specs: Mapping[fx.Node, ShardSpec]) -> None:
        """Lay out inputs, and all that the dimension runs through, along the axis."""
        for value, spec in specs.items():
            self.assignment.set_layout(value, spec)
        self.bodies.force(course, axis, course.classes[0])
