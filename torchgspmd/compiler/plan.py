"""Plan: a function's layouts, collectives and local program on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ..capture import (
    ARGUMENT,
    BUFFER,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    PARAMETER,
    TANGENT,
    Captured,
    cotangents_of,
    opened,
)
from ..capture.assumed_sizes import OtherSide
from ..comm.collective import Collective
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from ..features import tables  # noqa: F401 (rows of the core's tables)
from ..fx_passes import Layouts
from ..fx_passes.digest import fits_page, page_text
from ..fx_passes.ir import runs
from ..fx_passes.localize.sizes_in_a_run import shard_inputs
from ..fx_passes.printer import dtype_name, graph_text
from ..fx_passes.replication_report import ReplicatedOp, overruled_marks, replication_report
from ..fx_passes.schedule.liveness import bytes_of, peak
from ..fx_passes.simulator import Simulator, join_global, split_global
from ..fx_passes.units import size_text
from ..layout.mesh import Mesh
from ..layout.sub_axes import whole_axis
from ..shard_spec import ShardSpec
from . import ToolMethod
from .golden import Golden
from .plan_cache.plan_files import PlanFiles
from .plan_summary import (
    Memory,
    collective_of,
    collectives_text,
    gathered_results,
    gathered_text,
    limits_text,
    overruled_text,
    pipelines_text,
    propagated_weights,
    recomputed_nodes,
    recomputed_text,
    weights_against_marks,
)
from .planned_call import OtherSizes, PlannedCall


class Plan(PlanFiles):
    """The result from torchgspmd.plan: layouts, collectives and each device's program.

    Print it for the partitioned graph and a summary.

    Args:
        mesh: The devices.
        captured: The program before the passes, at global shapes.
        sharded: The partitioned graph, at global shapes, with a layout for every value.
        program: The graph that one device runs, at local shapes.
        layouts: The propagated layouts and their reasons.
        seconds: Seconds spent planning, by pass.
        data_axes: Axes that shard the batch; weights may be stored in parts over these.
        counts: Search effort, by name: equal on every machine.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> specs = ("data model", "model _")
        >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
        >>> result.in_specs == tuple(map(ShardSpec.parse, specs))
        True
        >>> result.sent_bytes
        192.0
    """

    planned_call: PlannedCall | None = None  # of plan(): what verify runs in eager PyTorch
    _other_sizes: OtherSizes | None = None  # while it has the function
    check, estimate, explain, trace, diff, html, report = (ToolMethod() for _ in range(7))
    verify, uncapturable, _page, _repr_html_ = (ToolMethod() for _ in range(4))
    # Returns a planner for the program with other marks; without it none are tried.
    _replanner: Callable[[], Callable[[Captured], Plan]] | None = None

    def __init__(
        self,
        mesh: Mesh,
        captured: Captured,
        sharded: fx.Graph,
        program: fx.Graph,
        layouts: Layouts | None,
        seconds: dict[str, float],
        data_axes: frozenset[str] = frozenset(),
        counts: Mapping[str, int] | None = None,
    ) -> None:
        self.mesh, self._data_axes = mesh, data_axes
        self.program_graph, self.seconds = program, seconds
        self.counts = dict(counts or {})
        self._later = {"program": lambda: fx.GraphModule(captured.constants, program)}
        self.captured, self.sharded, self._layouts = captured, sharded, layouts

    # ----------------------------------------------------------------------------- what was decided

    @property
    def layouts(self) -> Layouts:
        """The propagated layouts and their reasons, which a plan's text lacks."""
        if self._layouts is None:
            raise ShardingError.here(
                "this plan was planned by another process, which has the reasons for its layouts",
                fix="ask rank 0, with TORCHGSPMD_CACHE= in the environment; or call "
                "torchgspmd.plan()",
            )
        return self._layouts

    @cached_property
    def in_specs(self) -> tuple[ShardSpec, ...]:
        """Layouts for the flat inputs: parameters, buffers, then the arguments' tensors."""
        pairs = zip(self.input_layouts, self.captured.inputs)
        return tuple(spec for spec, each in pairs if each.kind != TANGENT)

    @cached_property
    def input_layouts(self) -> tuple[ShardSpec, ...]:
        """The in_specs, followed by the cotangents' layouts if grad=True."""
        return self.boundary.inputs

    @cached_property
    def out_specs(self) -> tuple[ShardSpec | None, ...]:
        """Layouts for the flat outputs, then for updated inputs and for gradients."""
        return self.boundary.results

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every communication in a run, in program order; those that are recomputed come last."""
        nodes = [(n, runs(n)) for n in self.sharded.nodes]
        names = [each.name for each in self.captured.inputs]
        inputs = dict(zip(self.sharded.find_nodes(op="placeholder"), names))
        recomputed = [*recomputed_nodes(self.program_graph)]
        named = {n.name: n for n, _ in nodes} if recomputed else {}
        return tuple(
            collective_of(n, self.mesh, count, named.get(str(n.meta.get("value")), n), inputs)
            for n, count in (*nodes, *recomputed)
            if (step := n.meta.get("step")) and step.collective
        )

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in a run, by bandwidth-optimal algorithms (comm/kinds)."""
        return sum(c.sent_bytes for c in self.collectives)

    @cached_property
    def replicated_ops(self) -> tuple[ReplicatedOp, ...]:
        """Operations and weights, replicated or gathered without a mark; the largest is first."""
        inputs, axes = self.captured.inputs, self._data_axes
        report = replication_report(self.sharded, self.mesh, inputs, axes, self._layouts)
        return tuple(sorted(report, key=lambda each: -each.bytes))

    @cached_property
    def overruled_marks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Axes from which the batch is gathered, as it is small, for weights marked with them."""
        pairs = zip(self.captured.inputs, self.input_layouts)
        rows = {a for i, spec in pairs if i.kind == ARGUMENT for dim in spec.dims[:1] for a in dim}
        return overruled_marks(self.sharded, self.captured.inputs, rows & self._data_axes)

    @cached_property
    def idle_axes(self) -> tuple[str, ...]:
        """Axes that divide no value: their devices all compute the same."""
        metas = [n.meta for n in self.sharded.nodes]
        specs = {s for m in metas for s in (m.get("spec"), *m.get("result_specs", ())) if s}
        # A part of an axis on any value uses the axis.
        used = {whole_axis(a) for s in specs for a in (*s.sharding_axes, *s.pending)}
        return tuple(axis for axis, size in self.mesh.axes if size > 1 and axis not in used)

    @cached_property
    def gathered_results(self) -> tuple[tuple[str, float], ...]:
        """Each result that is gathered for the caller: its value, and the bytes a device sends."""
        results = [i for i, out in enumerate(self.captured.outputs) if out.kind == OUTPUT]
        return gathered_results(self.sharded, results)

    @cached_property
    def _gathers_by_default(self) -> bool:
        return bool(self.request and self.request.of_module and self.request.out_specs is None)

    @cached_property
    def memory(self) -> Memory:
        """Bytes on one device."""
        inputs = shard_inputs(self.program_graph, self.mesh)
        kinds, held = [inp.kind for inp in self.captured.inputs], {ARGUMENT, BUFFER, TANGENT}
        parameters = sum(bytes_of(n) for n, kind in zip(inputs, kinds) if kind == PARAMETER)
        others = sum(bytes_of(n) for n, kind in zip(inputs, kinds) if kind in held)
        return Memory(parameters, others, peak(self.program_graph))

    @property
    def golden(self) -> Golden:
        """The lines of `text`, which `check` compares."""
        memory = {**vars(self.memory), "sent": self.sent_bytes}
        return Golden.of(self, self.collectives, memory)

    def __str__(self) -> str:
        whole = self.text(full=True)
        if fits_page(whole.split("\n\n")[0]):
            return whole
        names = [each.name for each in self.captured.inputs]
        return page_text(self.sharded, names, self.mesh, self.summary())

    def text(self, full: bool = False) -> str:
        """Return the plan as text: what it stores and sends, or every value.

        Args:
            full: Show every value, with its layout, and the summary behind it.

        Returns:
            By default the lines that `check` compares: a line a collective kind and module class,
            the inputs' layouts, replicated work, memory. No counter in them shifts.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> result.text(full=True) == str(result)  # it is short
            True
            >>> print(result.text().split("communication")[1])
            <BLANKLINE>
              forward  all_reduce  model  f32  (outside)  192 B
            memory
              inputs      144 B
              parameters  0 B
              peak        400 B
              sent        192 B
            <BLANKLINE>
        """
        if not full:
            return str(self.golden)
        return f"{graph_text(self.sharded, self.mesh, fold=True)}\n\n{self.summary()}"

    def summary(self) -> str:
        """Summarize the bytes that a device sends and holds.

        Returns:
            Text lines: collectives by kind and axes, with bytes, then a device's memory.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> print(result.summary())
            all_reduce     over model           1 x, 192 B sent by a device
            sent by a device in all: 192 B
            memory of a device: parameters 0 B, inputs 144 B, peak 400 B
        """
        return "\n".join(
            [
                *collectives_text(self.collectives),
                *weights_against_marks(self.replicated_ops),
                *overruled_text(self.overruled_marks),
                *propagated_weights(self.sharded, self.captured.inputs, self.request),
                *gathered_text(self.gathered_results if self._gathers_by_default else ()),
                f"sent by a device in all: {size_text(self.sent_bytes)}",
                f"memory of a device: {self.memory}",
                *recomputed_text(self.program_graph, self.counts),
                *pipelines_text(self.program_graph),
                *dict.fromkeys(filter(None, (n.meta.get("chosen") for n in self.sharded.nodes))),
                *limits_text(self.counts),
            ]
        )

    # ----------------------------------------------------------------------------------- running it

    def simulate(self, *args: object, _poison: bool = False, **kwargs: object) -> Any:
        """Run all devices' programs in this process, on global tensors.

        Inputs that the function mutates are mutated. With grad=True the gradients are taken for
        the sum over all floating outputs that require one. Outputs in objects that pytree does
        not know count only if there are no others. Outputs that are put into arguments or
        attributes do not count.

        Args:
            args: Positional arguments, with the shapes that the plan was made for.
            kwargs: Keyword arguments.

        Returns:
            The function's result. With grad=True (result, gradients by parameter name).

        Raises:
            ShardingError: The arguments have another structure, shape or dtype, or a number, an
                attribute, a mode or a variable is another than when this was planned.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> result.simulate(x, w).equal(x @ w)
            True
        """
        if (others := self._other_sizes) and (small := others.plan_for(args, kwargs)):
            return small.simulate(*args, _poison=_poison, **kwargs)
        tensors = self.flat_inputs(args, kwargs)
        # A program takes its inputs for different tensors: none may be passed twice and mutated.
        self.captured.check_aliases(tensors)
        sizes = self.sizes_of_run([t.shape for t in tensors])
        inputs = [
            split_global(t, spec, self.mesh, _poison, groups)
            for t, spec, groups in zip(tensors, self.input_layouts, self.input_groups(sizes))
        ]
        try:
            with torch.no_grad():
                # The program has its own backward: autograd would record all devices for nothing.
                simulator = vars(self).get("_simulator", Simulator)(self.program, self.mesh)
                results = simulator.run_devices(inputs, self.size_inputs(sizes))
        except OtherSide as other:
            if others is None:
                raise
            with other.turned():
                side = others.plan_of_side(args, kwargs)
                return side.simulate(*args, _poison=_poison, **kwargs)
        joined = [
            None
            if spec is None
            else join_global(shards, spec, self.result_shape(i, shards[0].shape, sizes), self.mesh)
            for i, (shards, spec) in enumerate(zip(results, self.out_specs))
        ]
        return self.rebuild(joined, tensors, (args, kwargs))

    def flat_inputs(self, args: tuple, kwargs: dict) -> list[Tensor]:
        """Return every input as a tensor: the module's state, the arguments, the cotangents.

        Args:
            args: Positional arguments for the function.
            kwargs: Its keyword arguments.

        Returns:
            Global tensors, ordered like input_layouts.

        Raises:
            ShardingError: The arguments have another structure, shape or dtype than the plan's.

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> [list(t.shape) for t in result.flat_inputs((x, w), {})]
            [[4, 8], [8, 16]]
        """
        self.check_complete()
        for place in self.captured.state_inputs:
            if not place.holds():
                raise ShardingError.here(
                    f"there is no {place.kind} at '{place.name}' any more, where the plan had one",
                    fix="make a plan of the module as it is now",
                )
        leaves, tree = pytree.tree_flatten(opened((args, kwargs)))
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        arguments += self.captured.state_tensors()
        expected = [i for i in self.captured.inputs if i.kind == ARGUMENT]
        if tree != self.captured.arguments or len(arguments) != len(expected):
            raise ShardingError.here(
                "the arguments have another structure than those that the plan was made for",
                fix="call simulate as the function itself was called in plan()",
            )
        self.captured.check_unchanged(leaves)
        self.captured.check_looks(leaves)
        sizes = self.captured.dynamic
        for i, (tensor, inp) in enumerate(zip(arguments, expected)):
            if not sizes.fits(i, tensor.shape, inp.shape) or tensor.dtype != inp.dtype:
                raise ShardingError.here(
                    f"argument '{inp.name}' is {dtype_name(tensor.dtype)}{list(tensor.shape)}, "
                    f"the plan was made for {dtype_name(inp.dtype)}{list(inp.shape)}",
                    fix="make a plan for these shapes",
                )
        sizes.check([t.shape for t in arguments])
        tensors = [*self.captured.module_tensors(), *arguments]
        return [*tensors, *cotangents_of(self.captured, tensors)]

    def rebuild(
        self, flat: Sequence[object], tensors: Sequence[Tensor], arguments: tuple[tuple, dict]
    ) -> Any:
        """Return flat results in the function's own structure, and write its mutations.

        Args:
            flat: The results, ordered like out_specs.
            tensors: The flat inputs, which mutations change.
            arguments: The function's (args, kwargs), whose containers mutations change.

        Returns:
            The function's result. With grad=True (result, gradients by parameter name).

        Example:
            >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
            >>> specs = ("data model", "model _")
            >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
            >>> result.rebuild([x @ w], [x, w], ((x, w), {})).shape
            torch.Size([4, 16])
        """
        outputs, observed, gradients = [], [], {}
        for value, out in zip(flat, self.captured.outputs):
            if out.kind == OUTPUT:
                outputs.append(value)
            elif out.kind == GRADIENT:
                gradients[self.captured.inputs[out.input].name] = value
            elif out.kind == OBSERVED:
                observed.append(value)
            elif out.kind == MUTATION:
                with torch.no_grad():  # else autograd refuses to write into a leaf
                    tensors[out.input].copy_(value)
        result = self.captured.result(outputs, arguments)
        self.captured.observe(observed)
        return (result, gradients) if self.captured.has_backward else result
