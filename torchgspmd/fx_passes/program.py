"""Program: a graph on its way from capture to a rank, with everything that passes need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx

from ..capture import ARGUMENT, GRADIENT, MUTATION, Captured, Output
from ..comm.hardware import Hardware, hardware_of
from ..comm.process_groups import ProcessGroups
from ..compat.fx_nodes import calls_any, copy_node
from ..compat.operators import draws
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .expand.decompose_ops import decompose_ops
from .ir import Rules, boundary_spec, global_shape, other_shapes, rows_together
from .localize.sizes_in_a_run import size_inputs
from .loop_call import BodyCall, InnerProgram, loop_calls
from .partition.cost_constants import CostConstants, SearchCounts, no_counts
from .partition.partition_graph import Memories, Solutions
from .printer import graph_text, program_text
from .propagate.layouts import Layouts
from .replication_report import ReplicatedOp
from .stages import CAPTURED, LOCAL, Stage


class RunnablePlan:
    """The part of a plan that a process runs; plan_cache/ has it as text, beside the graph."""

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
        return any(draws(node.target) for node in self.program_graph.nodes)

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


def stand_ins_of(captured: Captured, graph: fx.Graph) -> dict[str, int]:
    """Return the numbers in place of argument sizes in a graph with global shapes."""
    pairs = zip(graph.find_nodes(op="placeholder"), captured.inputs)
    shapes = [node.meta["val"].shape for node, inp in pairs if inp.kind == ARGUMENT]
    return captured.dynamic.numbers(shapes)


@dataclass(frozen=True)
class Shared:
    """Rules, and search results, which plans for like programs share."""

    rules: Rules = field(default_factory=Rules)
    memories: Memories = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A request for a program; compiler/options.py has the options.

    arguments: a layout, or None, for each argument. stored: parameter and buffer layouts, by name.
    bound: parameters that stay as they are stored, since another program takes them so.
    of_module: results are whole without a layout, and DTensors with one. plain: for each argument
    whether it is a whole tensor on every rank; its gradient is whole then. expand: decomposes a
    graph's operations, and nodes that are to be decomposed all the same. keep_marks: for XLA, which
    has no cheap way past a mark. device: a type; "meta" stands for GPUs. reduce_dtype: sums
    parameter gradients over devices; None: as costs least. stored_over: axes over which parameters
    are stored in parts, though no argument is. states: an optimizer's, by name, which may be stored
    over further axes. hardware: speeds and links, if they are known.
    hosts: else the devices on a host, 0 if there is one host. memory_budget: bytes that a device's
    peak may have; None: its memory. recompute, offload: how it fits. captures: whether CUDA graphs
    run the program. shared: results that plans for equal programs share.
    """

    captured: Captured
    mesh: Mesh
    arguments: Sequence[ShardSpec | None] = ()
    out_specs: Any = None
    stored: Mapping[str, ShardSpec] = field(default_factory=dict)
    bound: frozenset[str] = frozenset()
    of_module: bool = False
    plain: Sequence[bool] = ()
    expand: Callable[..., fx.Graph] = field(
        default_factory=lambda: partial(decompose_ops, traced={})
    )
    keep_marks: bool = False
    rng: str = "global"
    regather: str = "never"
    skip_passes: frozenset[str] = frozenset()
    constants: CostConstants = CostConstants()
    device: str = "cpu"
    reduce_dtype: torch.dtype | None = None
    stored_over: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    hardware: Hardware | None = None
    hosts: int = 0
    recompute: str = "model"
    offload: str = "never"
    memory_budget: int | None = None
    captures: bool = False
    shared: Shared = field(default_factory=Shared)

    @property
    def planned_for(self) -> Hardware:
        """Return the hardware that is named, or round numbers for device and hosts."""
        return self.hardware or hardware_of(self.device, self.hosts)

    @property
    def has_budget(self) -> bool:
        """Whether the peak of a device is to fit a budget."""
        return self.recompute == "auto" or self.offload != "never"


@dataclass(frozen=True)
class Boundary:
    """The layouts for a program's inputs and results, and the results' global shapes.

    other: result shapes with the second numbers in place of sizes known in a run.
    """

    inputs: tuple[ShardSpec, ...]
    results: tuple[ShardSpec | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    other: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, sharded: fx.Graph, outputs: Sequence[Output]) -> Boundary:
        """Extract the boundary from a partitioned graph. outputs: those of the captured one."""
        output = sharded.output_node()
        returned: Any = output.args[0]
        inputs = tuple(map(boundary_spec, placeholders := sharded.find_nodes(op="placeholder")))
        specs: list[Any] = [
            boundary_spec(placeholders[out.input], spec)
            if spec is not None and out.kind in (GRADIENT, MUTATION)
            else spec
            for spec, out in zip(output.meta["specs"], outputs)
        ]
        values = [*zip(specs, returned)]
        shapes = (None if spec is None else tuple(n.meta["val"].shape) for spec, n in values)
        other = (None if spec is None else other_shapes(n)[0] for spec, n in values)
        return cls(inputs, tuple(specs), tuple(shapes), tuple(other))


@dataclass(frozen=True)
class Rank:
    """The process that a program is lowered for.

    parameters: by input; gradients get their strides. finish_check: ends the ranks' comparison.
    carry_check: begins it, together with summing a small tensor. carriers: libraries that may carry
    messages.
    """

    groups: ProcessGroups
    backend: str
    parameters: Mapping[int, Tensor]
    finish_check: Callable[[], None]
    carry_check: Callable[[Tensor], Any]
    carriers: frozenset[str] = frozenset()


@dataclass
class Program:
    """A graph and its stage.

    mesh: from `split_axes` to `merge_axes` a mesh with split axes. inputs, results: the layouts
    required on it. layouts: from `propagate`. sharded: the partitioned graph, from `localize` on.
    rank, boundary: who runs it, and on which layouts, once it is lowered. backward: from
    `split_joint` on the backward's program; graph is the forward's then. call: the loop, or the
    pipeline piece, whose body the graph is. solutions: for partitioning it, where several ways are
    tried; later ones start from the first. changed: names of passes that changed it. seconds: by
    pass. counts: search effort. printed: the last dump. behind: runs the passes behind the running
    one on a program. is_trial: such a program, which is not printed.
    """

    request: Request
    graph: fx.Graph
    mesh: Mesh
    stage: Stage = CAPTURED
    inputs: list[ShardSpec | None] = field(default_factory=list)
    results: list[ShardSpec | None] = field(default_factory=list)
    solutions: Solutions = field(default_factory=dict)
    layouts: Layouts = field(init=False)
    sharded: fx.Graph = field(init=False)
    rank: Rank = field(init=False)
    boundary: Boundary = field(init=False)
    backward: Program | None = None
    call: InnerProgram | None = None
    changed: frozenset[str] = frozenset()
    seconds: dict[str, float] = field(default_factory=dict)
    counts: SearchCounts = field(default_factory=no_counts)
    printed: str = ""
    behind: Callable[[Program], None] = lambda program: None
    is_trial: bool = False
    # A graph, and whether it calls loops or pipelines, until a pass changes it.
    known: tuple[fx.Graph, bool] | None = field(default=None, repr=False)

    # From LOCAL on nodes have local shapes, and no global values that graph_text could print.
    def __str__(self) -> str:
        if self.stage < LOCAL:
            return graph_text(self.graph, self.mesh)
        return program_text(self.graph)

    def fork(self) -> Program:
        """Copy the program with a graph of its own, at the stage ANNOTATED."""
        new: dict[fx.Node, fx.Node] = {}
        copied = copy.copy(self)
        copied.graph = fx.Graph()
        for node in self.graph.nodes:
            new[node] = copy_node(copied.graph, node, new.__getitem__)
        # Layouts are by node, so the copy needs its own.
        copied.layouts = self.layouts.of(new)
        return copied

    def tried(self, graph: fx.Graph) -> Program:
        """Return the program that the passes behind the running one make of a graph; it changes."""
        trial = copy.copy(self)
        trial.graph, trial.seconds, trial.is_trial = graph, {}, True
        self.behind(trial)
        return trial

    def calls_any(self, targets: Collection[Any]) -> bool:
        """Return whether the graph calls one of the targets; BodyCall: a loop or a pipeline."""
        return BodyCall in targets and self.has_bodies or calls_any(self.graph, targets)

    @property
    def has_bodies(self) -> bool:
        """Whether the graph calls loops or pipelines."""
        if self.known is None or self.known[0] is not self.graph:
            self.known = self.graph, any(True for _ in loop_calls(self.graph))
        return self.known[1]

    @property
    def rules(self) -> Rules:
        return self.request.shared.rules

    @property
    def memories(self) -> Memories:
        return self.request.shared.memories

    @property
    def captured(self) -> Captured:
        return self.request.captured

    @property
    def hardware(self) -> Hardware:
        return self.request.planned_for

    @property
    def stand_ins(self) -> dict[str, int]:
        """The numbers in place of argument sizes, before the program is local."""
        return stand_ins_of(self.captured, self.graph)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The inputs, without argument sizes."""
        return [n for n in self.graph.find_nodes(op="placeholder") if "size" not in n.meta]
