"""The part of a plan that a process runs; plan_cache/ has it as text, beside the graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import fx

from ..capture import ARGUMENT, Captured
from ..layout.mesh import Mesh
from .ir import global_shape, rows_together
from .localize.sizes_in_a_run import size_inputs
from .program import Boundary, Request, stand_ins_of
from .replication_report import ReplicatedOp


class RunnablePlan:
    """The plan properties that a run depends on; Plan has the attributes."""

    mesh: Mesh
    captured: Captured
    seconds: dict[str, float]
    sharded: fx.Graph
    replicated_ops: tuple[ReplicatedOp, ...]
    program: fx.GraphModule
    request: Request | None = None  # what was asked; None if passes were added, or for XLA

    @cached_property
    def boundary(self) -> Boundary:
        """Layouts for all inputs and results, and the results' global shapes."""
        return Boundary.of(self.sharded, self.captured.outputs)

    @cached_property
    def program_graph(self) -> fx.Graph:
        """The graph in `program`."""
        return self.program.graph

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether it has sizes or numbers that only a run knows."""
        return any(n.meta.get("dynamic") for n in self.sharded.nodes)

    @cached_property
    def stand_ins(self) -> tuple[int, ...]:
        """The numbers in place of argument sizes."""
        return tuple(stand_ins_of(self.captured, self.sharded).values())

    def sizes_of_run(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the argument sizes. shapes: the global ones for all inputs to a run."""
        pairs = zip(shapes, self.captured.inputs)
        arguments = [shape for shape, inp in pairs if inp.kind == ARGUMENT]
        return tuple(self.captured.dynamic.numbers(arguments).values())

    def size_inputs(self, sizes: Sequence[int]) -> list[int]:
        """Return which argument sizes the program takes, behind the coordinates."""
        # Without sizes nobody asks the graph: a plan of a text would decode it once more.
        inputs = size_inputs(self.program_graph) if sizes else ()
        return [sizes[node.meta["size"][0]] for node in inputs]

    def input_groups(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Return, for each input dimension, how many rows stay together on one device."""
        inputs = self.sharded.find_nodes(op="placeholder")
        return [rows_together(node, sizes, self.stand_ins) for node in inputs]

    def result_shape(
        self, output: int, local: Sequence[int], sizes: Sequence[int]
    ) -> tuple[int, ...]:
        """Return a result's global shape in a run. local: a shard's."""
        node = self.sharded.output_node().args[0][output]
        return global_shape(node, local, sizes, self.stand_ins)

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        tags = (getattr(n.target, "tags", ()) for n in self.program_graph.nodes)
        return any(torch.Tag.nondeterministic_seeded in each for each in tags)

    def local_graph(self) -> fx.Graph:
        """Return a new copy of the graph in `program`.

        Example:
            >>> result = plan(torch.neg, torch.ones(4), mesh=Mesh(data=2), in_specs="data")
            >>> result.local_graph() is result.program.graph
            False
        """
        # A plan from text has decoded the graph for nobody else: the first caller may have it.
        if (decoded := vars(self).pop("_local", None)) is not None:
            return decoded
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.program_graph, {}))
        return graph
