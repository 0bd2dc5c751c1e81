"""A search's judge: a model's programs, captured once, and their plans' costs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...capture import BUFFER, MUTATION, PARAMETER, Captured, Input, capture
from ...comm.hardware import Hardware
from ...compat.private_apis import _pytree as pytree
from ...compiler.api import compile_plan
from ...compiler.options import AdvancedSettings, Options
from ...errors import ShardingError
from ...fx_passes.ir import tensors_of
from ...fx_passes.program import Shared
from ...fx_passes.schedule.arithmetic import flops, graph_flops
from ...fx_passes.schedule.liveness import STATES
from ...layout.layout_rules import Layout, Unmarked, bound
from ...layout.mesh import Mesh
from ...layout.prefix_specs import argument_names
from ...shard_spec import ShardSpec
from ..report.kernels import Kernels
from .layers import Layers, Recomputed, expert_stacks, noted, output_groups, with_marks
from .proposal import MODEL, STAGE, Group, Marks, Savings, batch_axes, groups_of
from .script import ScriptSource, returned
from .staged_programs import StagedPrograms, with_stage, without_stage
from .step_numbers import Numbers, choose, has_solver

ONE_DEVICE = Mesh(data=1, model=1)

Key = tuple[Mesh, Marks, Savings, int, int]  # with the rows in a call, and `first`
Program = tuple[Recomputed, int, int]  # with the rows in a call, and its microbatches


@dataclass
class Judge:
    """Plans a model's programs: the whole, or one with few layers and one with one layer more.

    first: the smaller one's number of layers. With one layer the search often finds another layout,
    so numbers that are shown come from two and three. layers: the model's. recomputable: those that
    may be computed twice: none that changes a buffer. shared: results that plans for equal programs
    share. stored: layouts of parameters and marked outputs, by glob. counts: the sums over all
    plans.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, object]
    hardware: Hardware
    options: Options = Options()
    kernels: Kernels | None = None
    layers: Layers = field(init=False)
    recomputable: Layers = field(init=False)
    groups: tuple[Group, ...] = field(init=False)
    flops: float = field(init=False)  # in a step, on all devices
    layer_flops: float = field(init=False)  # in a layer
    state_bytes: float = field(init=False)  # of parameters and Adam's states
    stacks: dict[str, int] = field(init=False)  # the lengths of expert stacks, by group
    dtype: torch.dtype = field(init=False)  # the products' smallest
    has_loss: bool = field(init=False)  # whether the model returns one
    returns_more: bool = field(init=False)  # whether it returns other results than scalars
    stages: StagedPrograms = field(init=False)
    first: int = 1
    shared: Shared = field(default_factory=Shared)
    captures: dict[tuple[int, Program], Captured | None] = field(default_factory=dict)
    known: dict[Key, Numbers] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    stored: dict[Key, dict[str, set[ShardSpec]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recomputable = self.layers = Layers.of(self.model)
        try:
            programs = self.programs((), self.rows)
        except Exception:  # whatever a model's code raises that counts its layers' results
            if not self.layers.alike:
                raise
            self.recomputable = self.layers = replace(self.layers, alike=False)
            programs = self.programs((), self.rows)
        self.stages = StagedPrograms(self.model, self.layers, self.args, self.kwargs, self.options)
        written = [
            p.inputs[out.input] for p in programs for out in p.outputs if out.kind == MUTATION
        ]
        # Recomputing would change such a buffer twice.
        buffers = [inp.name for inp in written if inp.kind == BUFFER]
        self.recomputable = self.layers.without(buffers)
        groups = groups_of(programs[-1])
        self.groups = tuple(dict.fromkeys(groups.values()))
        self.stacks = {groups[i.name].pattern: i.shape[0] for i in expert_stacks(programs[-1])}
        counts = [float(graph_flops(program.graph, ONE_DEVICE)) for program in programs]
        parameters = ([i for i in p.inputs if i.kind == PARAMETER] for p in programs)
        sizes = [
            float(sum(math.prod(i.shape) * (i.dtype.itemsize + STATES) for i in inputs))
            for inputs in parameters
        ]
        # The smallest dtype that products have; its rate is the highest.
        products = [node for node in programs[-1].graph.nodes if flops(node, ONE_DEVICE)]
        dtypes = {t.dtype for node in products for t in tensors_of(node) if t.is_floating_point()}
        self.dtype = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        results = returned(programs[-1])
        self.has_loss = any(not x.dim() and x.is_floating_point() for x in results)
        self.returns_more = any(x.dim() for x in results)
        # The two programs differ by one layer.
        self.layer_flops, more = counts[-1] - counts[0], max(self.layers.length - len(programs), 0)
        self.flops = counts[-1] + more * self.layer_flops
        self.state_bytes = sizes[-1] + more * (sizes[-1] - sizes[0])

    @property
    def itemsize(self) -> float:
        """Return the bytes of a number whose rate the products take."""
        return self.kernels.recipe.itemsize if self.kernels else self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Count the batch's rows; 0 if not all arguments are tensors with as many rows."""
        rows = {len(arg) if isinstance(arg, Tensor) and arg.dim() else 0 for arg in self.args}
        keywords = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(self.kwargs))
        return rows.pop() if len(rows) == 1 and not keywords else 0

    def source(self, builder: Callable[[], nn.Module] | None = None) -> ScriptSource:
        program = self.programs((), self.rows)[-1]
        return ScriptSource.of(self.model, self.args, self.kwargs, program, builder)

    def arguments(self, rows: int) -> list[Tensor]:
        leaves = pytree.tree_leaves((self._args(rows), self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _args(self, rows: int) -> tuple[object, ...]:
        if rows == self.rows:
            return self.args
        return tuple(arg.new_empty((rows, *arg.shape[1:])) for arg in self.args)

    def programs(
        self, recomputed: Recomputed, rows: int, microbatches: int = 1
    ) -> tuple[Captured, ...]:
        """Return the programs that stand for the model, captured once.

        Raises ShardingError if the model cannot be called in another way than it was.
        """
        sizes = (self.first, self.first + 1) if self.layers.alike else (0,)
        program = recomputed, rows, microbatches
        programs = [self._captured(size, program) for size in sizes]
        if None in programs:
            raise ShardingError(f"the model takes no {rows} rows, or cannot be recomputed")
        return tuple(each for each in programs if each)

    def _captured(self, size: int, program: Program) -> Captured | None:
        key = size, program
        if key not in self.captures:
            try:
                self.captures[key] = self._capture(size, *program)
            except Exception:  # whatever a model's code raises
                if program == ((), self.rows, 1):
                    raise
                self.captures[key] = None
        return self.captures[key]

    def _capture(self, size: int, recomputed: Recomputed, rows: int, microbatches: int) -> Captured:
        with ExitStack() as block:
            if size:
                block.enter_context(self.layers.shortened(size))
            block.enter_context(self.recomputable.recomputed(recomputed))
            block.enter_context(noted(self.layers))
            # Without the model's own marks: a search chooses all.
            block.enter_context(bound(Unmarked(Layout({}), ONE_DEVICE)))
            return capture(
                self.model,
                self._args(rows),
                self.kwargs,
                ONE_DEVICE,
                grad=True,
                param_dtype=self.options.param_dtype,
                microbatches=microbatches,
            )

    def can_take(self, rows: int) -> bool:
        try:
            self.programs((), rows)
        except ShardingError:
            return False
        return True

    def _whole(self, values: Sequence[Numbers], mesh: Mesh) -> Numbers:
        """Return the whole model's numbers, extrapolated from the programs'.

        A layer costs at least its products. If the difference between the two programs is less, the
        whole model is the larger one, times the model's layers over that program's.
        """
        if len(values) == 1:
            return values[0]
        few, more = values
        least = self.layer_flops / mesh.size / self.hardware.peak
        if more.seconds - few.seconds < least or more.memory < few.memory:
            share = self.layers.length / (self.first + 1)
            return Numbers(0, 0, 0, 0, 0).towards(more, share)
        return few.towards(more, self.layers.length - self.first)

    def numbers(self, mesh: Mesh, marks: Marks, savings: Savings, rows: int = 0) -> Numbers:
        """Return a step's numbers. rows: in a call; by default the batch's share.

        Where two layers stand for all, some recomputed layers are between none and all. They take
        at most so much memory: the peak is the largest among sums to which each layer adds the
        same.
        """
        total, rows = self.recomputable.length, rows or self.rows // savings.calls
        if self._is_mixed(savings):
            none = mixed = self.numbers(mesh, marks, replace(savings, recomputed=()), rows)
            for path, number in savings.recomputed:
                uniform = replace(savings, recomputed=((path, total),))
                every = self.numbers(mesh, marks, uniform, rows)
                mixed = mixed.plus(none.towards(every, number / total), none)
            return mixed
        key = mesh, marks, savings, rows, self.first
        if key not in self.known:
            inside = savings.microbatches // savings.calls
            if STAGE in mesh.names:
                programs = (self.stages.program(mesh, savings),)
            else:
                programs = self.programs(savings.recomputed, rows, inside)
            whole = self._whole([self._plan(program, key) for program in programs], mesh)
            self.known[key] = whole.repeated(savings.calls, self.hardware)
        return self.known[key]

    def fewest_recomputed(
        self, mesh: Mesh, marks: Marks, savings: Savings, limit: float
    ) -> Savings:
        """Return savings with the fewest recomputed layers that keep to the limit.

        Those are all layers, if none or too few would do.
        """
        total = self.recomputable.length

        def ways(number: int) -> Savings:
            return replace(savings, recomputed=(("", number),) if number else ())

        def fits(number: int) -> bool:
            return self.numbers(mesh, marks, ways(number)).memory <= limit

        try:
            # Each further layer takes memory away, so bisection finds the fewest.
            return ways(bisect_left(range(total), True, key=fits))
        except ShardingError:  # the model cannot be recomputed
            return savings

    def best_recomputed(
        self, mesh: Mesh, marks: Marks, savings: Savings, limit: float
    ) -> tuple[Savings, float] | None:
        """Return the fastest savings that recompute layers or their submodules, and a bound.

        None where layers are not alike, where nothing fits, and without HiGHS.
        """
        total = self.recomputable.length
        if not has_solver() or not self.layers.alike or not total:
            return None
        known: dict[str | None, Numbers] = {}
        for path in [None, "", *self.recomputable.submodules()]:
            recomputed = () if path is None else ((path, total),)
            try:
                known[path] = self.numbers(mesh, marks, replace(savings, recomputed=recomputed))
            except ShardingError:  # the model cannot recompute this
                continue
        choice = choose([*known.values()], total, limit)
        if choice is None:
            return None
        counts = [(path, n) for path, n in zip(known, choice.counts) if path is not None and n]
        return replace(savings, recomputed=tuple(counts)), choice.bound

    def most_rows(self, mesh: Mesh, marks: Marks, savings: Savings, limit: float) -> int:
        """Return the rows in the largest batch that keeps to the limit; at least the present ones.

        Memory is the largest among sums that grow with the batch, so between two batches it is at
        most the straight line; beyond them a plan says whether it fits.
        """
        step = mesh.count(batch_axes(mesh))

        def reached(low: int, high: int) -> int:
            """Return the rows at which the line through two batches reaches the limit."""
            first, last = (self.numbers(mesh, marks, savings, rows).memory for rows in (low, high))
            # Rounded down to rows that the batch's axes divide.
            share = (limit - first) / max(last - first, 1.0)
            return low + max(int(share * (high - low)), 0) // step * step

        low, high = self.rows, 2 * self.rows
        if not low or low % step or not self.can_take(high):
            return low
        rows = reached(low, high)
        if rows <= high or not self.can_take(rows):
            return min(rows, high)
        fits = self.numbers(mesh, marks, savings, rows).memory <= limit
        return rows if fits else reached(high, rows)

    def _is_mixed(self, savings: Savings) -> bool:
        """Return whether numbers lie between two plans': some like layers are recomputed."""
        total = self.recomputable.length
        return self.layers.alike and any(number < total for _, number in savings.recomputed)

    def _plan(self, program: Captured, key: Key) -> Numbers:
        mesh, marks, savings, rows, _ = key
        groups = groups_of(program)
        if STAGE in mesh.names:
            known = groups_of(self.programs((), self.rows)[-1])
            groups = self.stages.groups(program, known)

        def mark(inp: Input) -> ShardSpec | None:
            group = groups[inp.name]
            spec = marks.spec(group, mesh)
            return spec if len(inp.shape) == len(group.shape) else with_stage(spec, group.shape)

        marked = [
            replace(inp, mark=mark(inp)) if inp.kind == PARAMETER and inp.shape else inp
            for inp in program.inputs
        ]
        inputs = self.in_specs(mesh, marks, rows)
        outputs: dict[str, set[ShardSpec]] = {}

        def spec_of(glob: str, shape: Sequence[int]) -> ShardSpec | None:
            spec = marks.output_spec(glob, shape, mesh)
            outputs.update({glob: {spec}} if spec else {})
            return spec

        program = replace(program, inputs=marked)
        result = compile_plan(
            # Marks in a program with stages are the pipeline's own.
            program if STAGE in mesh.names else with_marks(program, mesh, spec_of),
            mesh,
            [*inputs, *[None for _ in program.state_inputs]],
            replace(self.options, advanced=AdvancedSettings(regather=savings.regather)),
            device="meta" if self.hardware.beside else "cpu",
            shared=self.shared,
        )
        self.counts.update({"plans": 1, **result.counts})
        stored: dict[str, set[ShardSpec]] = {group.pattern: set() for group in self.groups}
        for inp, spec in zip(marked, result.input_layouts):
            if inp.name in groups:
                group, priorities = groups[inp.name], inp.mark.priorities if inp.mark else ()
                spec = spec.plain().with_priorities(priorities)  # a plan chooses parts and windows
                is_stacked = len(inp.shape) > len(group.shape)
                stored[group.pattern].add(without_stage(spec) if is_stacked else spec)
        self.stored[key] = {**stored, **outputs}  # the larger program's, which comes last
        return Numbers.of(result.report(self.hardware, tried=False, kernels=self.kernels))

    def marks(self, mesh: Mesh, marks: Marks, savings: Savings) -> dict[str, str]:
        """Return the layouts of parameters by glob, for those that are not whole, and of outputs.

        They are marked, and those that propagation has found: `parallelize` takes no others. None
        where like layers have different ones.
        """
        if self._is_mixed(savings):
            savings = replace(savings, recomputed=())
        stored = self.stored[mesh, marks, savings, self.rows // savings.calls, self.first]
        alike = {pattern: next(iter(specs)) for pattern, specs in stored.items() if len(specs) == 1}
        return {pattern: str(spec) for pattern, spec in alike.items() if any(spec.dims)}

    def in_specs(self, mesh: Mesh, marks: Marks, rows: int) -> list[ShardSpec | None]:
        tensors = enumerate(self.arguments(rows))
        return [marks.argument_spec(i, tensor.shape, mesh) for i, tensor in tensors]

    def call_specs(
        self, mesh: Mesh, marks: Marks, rows: int
    ) -> tuple[object, ...] | dict[str, object]:
        """Return the in_specs for a call with so many rows, by name if it has keyword arguments."""
        specs = iter(self.in_specs(mesh, marks, rows))

        def text(leaf: object) -> str | None:
            spec = next(specs) if isinstance(leaf, Tensor) else None
            return None if spec is None else str(spec)

        args, kwargs = pytree.tree_map(text, (self._args(rows), self.kwargs))
        named = {**dict(zip(argument_names(self.model, args), args)), **kwargs}
        return named if self.kwargs else args

    def like_arguments(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        numbers: dict[tuple[int, ...], tuple[int, ...]] = {}
        for i, tensor in enumerate(self.arguments(self.rows)):
            shape = tuple(tensor.shape)
            numbers[shape] = (*numbers.get(shape, ()), i)
        return numbers

    def output_groups(self) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
        return output_groups(self.programs((), self.rows)[-1], self.layers)

    def least_memory(self, mesh: Mesh) -> float:
        """Return a device's bytes at least, for weights that no axis of the batch divides."""
        return self.state_bytes / mesh.count(a for a in (MODEL, STAGE) if a in mesh.names)
