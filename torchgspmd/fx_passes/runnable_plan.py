"""What a process reads of a plan to run it; plan_cache/ has it as text, beside the graph."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import fx

from ..capture import Captured
from ..layout.mesh import Mesh
from .program import Boundary, Request
from .replication_report import ReplicatedOp


class RunnablePlan:
    """The properties of a plan that a run depends on; Plan has the attributes."""

    mesh: Mesh
    captured: Captured
    seconds: dict[str, float]
    sharded: fx.Graph
    replicated_ops: tuple[ReplicatedOp, ...]
    program: fx.GraphModule
    request: Request | None = None  # what was asked; None if passes were added, or for XLA

    @cached_property
    def boundary(self) -> Boundary:
        """Layouts of all inputs and results, and the global shapes of the results."""
        return Boundary.of(self.sharded)

    @cached_property
    def program_graph(self) -> fx.Graph:
        """The graph of `program`."""
        return self.program.graph

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether it has sizes or numbers that only a run knows."""
        return any(n.meta.get("dynamic") for n in self.sharded.nodes)

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        tags = (getattr(n.target, "tags", ()) for n in self.program_graph.nodes)
        return any(torch.Tag.nondeterministic_seeded in each for each in tags)

    def local_graph(self) -> fx.Graph:
        """Return a new copy of the graph of `program`.

        Example:
            >>> result = plan(torch.neg, torch.ones(4), mesh=Mesh(data=2), in_specs="data")
            >>> result.local_graph() is result.program.graph
            False
        """
        if (decoded := vars(self).pop("_local", None)) is not None:
            return decoded
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.program_graph, {}))
        return graph
