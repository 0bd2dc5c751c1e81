"""A program's collectives as torch.distributed's functional collectives, for one rank.

before   %s = start(all_gather, [%x], [[0, data]]);  ...;  %y = wait(%s, 0)
after    %s = all_gather_into_tensor(%x, 2, g);  ...;  %y = wait_tensor(%s)
needs    start_wait, localize: the first inputs are a device's coordinates
ensures  coordinates are numbers, and arithmetic on them alone is done here

At its `start` a collective becomes the reshapes that bring its dimension to the front, and the
call. At its first `wait` it becomes torch.distributed's wait and the reshapes back. These are plain
nodes; no Python runs beside them. If only a run knows the operand's size, the collective is one
call that does all this, and waits.

Memory in flight: between its start and its wait a collective reads its operand and writes its
result. Nobody writes the operand, since programs do not write in place. The in-place all_reduce_
does, and is used only where nobody else reads the operand's memory. Only the wait reads the result.
torch.distributed keeps both alive. verify_in_flight.py checks this.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from ...comm.collective import CollectiveBuilder, Lowering, MergedLowering, start, wait
from ...comm.kinds import FusedKind, collective_kinds
from ...comm.process_groups import ProcessGroups
from ...compat.fx_nodes import add_node
from ...compat.operators import c10d
from ..loop_call import BodyCall
from .gloo_all_to_all import gloo_all_to_all
from .host_levels import host_levels
from .wire_dtypes import wire_dtypes

_MANY = 64  # lowered programs that a collective of any size keeps
_ARITHMETIC = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
}


def lower_collectives(
    graph: fx.Graph, groups: ProcessGroups, carriers: Collection[str] = ()
) -> fx.Graph:
    """Return one rank's program; its inputs are the input shards. carriers: see the builder."""
    return _Lowerer(graph, groups, carriers).run()


class _Lowerer(CollectiveBuilder):
    """Builder for one rank's program, node by node along the source graph."""

    def __init__(
        self, source: fx.Graph, groups: ProcessGroups, carriers: Collection[str] = ()
    ) -> None:
        super().__init__(groups, carriers)
        self.source = source

    def run(self) -> fx.Graph:
        new: dict[fx.Node, Any] = {}
        coordinates = dict(
            zip((n for n in self.source.nodes if n.op == "placeholder"), self.mesh.names)
        )
        for node in self.source.nodes:
            self.node = node
            if node in coordinates:
                new[node] = self.groups.coordinates[coordinates[node]]
            elif node.target is start:
                new[node] = self._start(node, new)
            elif node.target is wait:
                new[node] = self._with_meta(new[node.args[0]].results(self)[node.args[1]])
            elif isinstance(node.target, FusedKind):
                new[node] = self._with_meta(
                    node.target.lower(self, *fx.map_arg(node.args, new.__getitem__))
                )
            # Folded here, as every rank has its own program: nothing is left to compute per step.
            elif node.target in _ARITHMETIC and not any(
                isinstance(new.get(a, a), fx.Node) for a in node.args
            ):
                new[node] = node.target(
                    *(new.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
                )
            else:
                new[node] = self._copy(node, new)
        return self.graph

    def _start(self, node: fx.Node, new: dict[fx.Node, object]) -> _CollectiveInFlight:
        """Lower a start to the nodes up to its collective's call."""
        name, operands, arguments = node.args
        kind = collective_kinds()[name]
        shapes = [list(x.meta["shape"]) for x in operands]
        # The lowering needs numbers for its reshapes, so it has to wait for the run.
        if any(x.meta.get("unknown") for x in operands):
            arguments = fx.map_arg(arguments[0], new.__getitem__)
            collective = CollectiveOfAnySize(name, self.groups, operands[0].meta["dtype"])
            return _CollectiveInFlight(
                _at_once(self.call(collective, new[operands[0]], *arguments))
            )
        if len(operands) > 1:
            assert kind.merged is not None, f"no bucket has several {name}"
            lowering = kind.merged.lower(self, [new[x] for x in operands], shapes, arguments)
        else:
            lowering = _as_merged(kind.lower(self, new[operands[0]], shapes[0], *arguments[0]))
        return _CollectiveInFlight(lowering)

    def _copy(self, node: fx.Node, new: dict[fx.Node, object]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), new.__getitem__)
        copy = add_node(self.graph, node.op, node.target, args, kwargs, node.name)
        copy.meta.update(node.meta)
        if isinstance(node.target, BodyCall):
            node.target.connect(self.groups)
        return copy

    def _with_meta(self, result: fx.Node) -> fx.Node:
        """Give a lowering's result the lowered node's metadata."""
        result.meta = dict(self.node.meta)
        return result


class _CollectiveInFlight:
    """A collective between its start and its wait."""

    def __init__(self, lowering: MergedLowering) -> None:
        self.lowering = lowering
        self.output: list[fx.Node] | None = None
        try:
            self.begun = next(lowering)
        except StopIteration as done:  # This rank sends nothing.
            self.output = done.value

    def results(self, builder: CollectiveBuilder) -> list[fx.Node]:
        """Return the results, after a wait that the first caller adds."""
        if self.output is None:
            try:
                # The lowering is a generator: it yields the message, and goes on with the received
                # tensor.
                self.lowering.send(builder.call(c10d.wait_tensor.default, self.begun))
            except StopIteration as done:
                self.output = done.value
        assert self.output is not None, "a lowering sends one message"
        return self.output


class CollectiveOfAnySize:
    """A collective on values whose size only a run knows: it is lowered when the size is known."""

    sends = True

    def __init__(self, kind: str, groups: ProcessGroups, dtype: torch.dtype) -> None:
        self.kind, self.groups, self.dtype = kind, groups, dtype
        self.__name__ = f"{kind}_of_any_size"
        self.programs: dict[tuple, fx.GraphModule] = {}  # by shape and arguments

    def __call__(self, x: Tensor, *args: object) -> Tensor:
        """Return the collective's result. args: those of its kind."""
        key = (tuple(x.shape), repr(args))
        if key not in self.programs:
            # Bounded: a long job may meet ever new sizes. The oldest program goes first.
            if len(self.programs) == _MANY:
                self.programs.pop(next(iter(self.programs)))
            self.programs[key] = self._lower(x, args)
        return self.programs[key].forward(x)[0]

    def _lower(self, x: Tensor, args: tuple) -> fx.GraphModule:
        """Return one rank's program that communicates and waits."""
        graph = fx.Graph()
        for name in self.groups.mesh.names:
            graph.placeholder(f"coordinate_{name}")
        operand = graph.placeholder("x")
        begun = graph.call_function(start, (self.kind, [operand], [list(args)]))
        graph.output((graph.call_function(wait, (begun, 0)),))
        for node in graph.nodes:
            node.meta = {"shape": tuple(x.shape), "dtype": self.dtype, "backward": False}
        lowered = _Lowerer(graph, self.groups).run()
        lowered = gloo_all_to_all(host_levels(lowered, self.groups), self.groups)
        return fx.GraphModule(torch.nn.Module(), wire_dtypes(lowered))


def _at_once(result: fx.Node) -> MergedLowering:
    """Return the lowering for a collective that one call computes."""
    return [result]
    # Never reached: it makes the function a generator, as lowerings are.
    yield


def _as_merged(lowering: Lowering) -> MergedLowering:
    """Return one collective's lowering, with its result in a list."""
    return [(yield from lowering)]
