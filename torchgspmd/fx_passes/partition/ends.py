"""The layouts in which a program's inputs and outputs pass its boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from ...shard_spec import ShardSpec
from .assignment import Assignment

Cotangents = dict[fx.Node, tuple[fx.Node, ShardSpec]]
Storable = Callable[[ShardSpec, tuple[int, ...]], ShardSpec]


class Ends:
    """A program's boundary.

    outputs: output layouts by position; a node stands for that input's layout.
    storable: maps the layout that an open output would have to the one it is to have.
    cotangents: input -> (the output whose layout it comes in, the open layout requested for it).
    """

    def __init__(
        self,
        assignment: Assignment,
        outputs: Mapping[int, ShardSpec | fx.Node],
        storable: Storable | None,
        cotangents: Cotangents,
    ) -> None:
        self.assignment, self.outputs = assignment, outputs
        self.storable, self.cotangents = storable, cotangents

    def open_outputs(self) -> list[tuple[fx.Node, ShardSpec]]:
        """Return the outputs whose layout is the search's choice, with these layouts."""
        at = self.assignment
        return [
            (value, at.required[value][at.output, i])
            for i, value in enumerate(at.output.args[0])
            if isinstance(value, fx.Node) and i not in self.outputs
        ]

    def require(self) -> None:
        """Require every output's layout."""
        output = self.assignment.output
        for i, value in enumerate(output.args[0]):
            if isinstance(value, fx.Node):
                self.assignment.require(value, output, i, self._output_spec(i, value))

    def _output_spec(self, i: int, value: fx.Node) -> ShardSpec:
        """Return the layout in which output i leaves the program.

        An open output leaves as it is produced, except that a pending sum is reduced.
        """
        requested = self.outputs.get(i)
        if isinstance(requested, fx.Node):
            return self.assignment.layout_of[requested]
        if requested is not None and not any(requested.open):
            return requested
        layout = self.assignment.layout_of[value]
        target = (
            value.meta["spec"].closed() if layout.pending else layout.with_pending(())
        ).map_axes(self.assignment.mesh.whole)
        return target if requested is None else self.fill_open(requested, target, value)

    def fill_open(self, requested: ShardSpec, target: ShardSpec, value: fx.Node) -> ShardSpec:
        """Return the requested layout, with `target`'s axes in its open dimensions."""
        # An axis shards one dimension: those that the request fixes are no more free.
        fixed = {
            a for axes, is_open in zip(requested.dims, requested.open) if not is_open for a in axes
        }
        spec = ShardSpec(
            tuple(
                tuple(a for a in t if a not in fixed) if is_open else w
                for w, is_open, t in zip(requested.dims, requested.open, target.dims)
            )
        )
        return (
            self.storable(spec, self.assignment.sizes[value][0])
            if self.storable is not None
            else spec
        )
