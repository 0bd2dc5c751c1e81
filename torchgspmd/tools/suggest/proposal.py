"""Marks that a search tries, and a Proposal: a mesh and marks, as code to paste."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...capture import PARAMETER, Captured
from ...comm.hardware import Hardware
from ...compiler.option_groups import Regather
from ...errors import ShardingError
from ...fx_passes.printer import dtype_name
from ...fx_passes.units import size_text, time_text
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from ..report.kernels import Kernels
from .script import ScriptSource

DATA, EXPERT, MODEL, STAGE = "data", "expert", "model", "stage"

RECOMPUTE = """\
from functools import partial
from torch.utils.checkpoint import checkpoint
for layer in LAYERS:
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
"""
ACCUMULATE = """
for rows in zip(*(each.chunk(COUNT) for each in batch)):
    (LOSS / COUNT).backward()"""


@dataclass(frozen=True)
class Group:
    """Like parameters in all layers, which are marked alike. pattern: a glob for annotate."""

    pattern: str
    shape: tuple[int, ...]
    bytes: int  # all of them together


def patterns_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the glob for each parameter and its like in other layers, by name.

    Numbers are wild, the last ones only if all the glob's matches have one shape. If "blocks.0.2.w"
    and "blocks.0.4.w" have different shapes, the globs are "blocks.*.2.w" and "blocks.*.4.w".
    """
    patterns: dict[str, str] = {}
    names, wild = list(shapes), max((len(name.split(".")) for name in shapes), default=0)
    while names:
        globs = {name: _glob(name, wild) for name in names}
        alike: dict[str, set[tuple[int, ...]]] = {}
        for name, glob in globs.items():
            alike.setdefault(glob, set()).add(shapes[name])
        patterns |= {name: glob for name, glob in globs.items() if len(alike[glob]) == 1}
        # Names whose glob is too wide are tried again with one number more in full.
        names, wild = [name for name in names if name not in patterns], wild - 1
    return patterns


def _glob(name: str, wild: int) -> str:
    """Return a name whose first `wild` parts are `*` if they are numbers."""
    parts = name.split(".")
    return ".".join("*" if part.isdecimal() and i < wild else part for i, part in enumerate(parts))


def groups_of(captured: Captured) -> dict[str, Group]:
    """Return a program's parameter groups by name, those with most bytes first."""
    inputs = {i.name: i for i in captured.inputs if i.kind == PARAMETER and i.shape}
    patterns = patterns_of({name: inp.shape for name, inp in inputs.items()})
    sizes: dict[str, int] = {}
    for name, inp in inputs.items():
        size = math.prod(inp.shape) * inp.dtype.itemsize
        sizes[patterns[name]] = sizes.get(patterns[name], 0) + size
    groups = {
        name: Group(patterns[name], inp.shape, sizes[patterns[name]])
        for name, inp in inputs.items()
    }
    return dict(sorted(groups.items(), key=lambda pair: -pair[1].bytes))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that divide the batch: DATA, and EXPERT where the mesh has it."""
    return tuple(axis for axis in (DATA, EXPERT) if axis in mesh.names)


@dataclass(frozen=True)
class Marks:
    """A search's decisions: the dimensions that MODEL and the batch's axes shard.

    model: each group's dimension on MODEL, by pattern; patterns without a mark are missing. zero:
    every parameter is sharded along the batch's axes too (ZeRO-3, arXiv 1910.02054): gathered
    before its use, its gradient reduced to shards. by_cost: as far as that costs less; these marks
    then have the batch layout's priority, and otherwise the next one. stacked: matrix groups whose
    first dimension the last of these axes shards, such as experts. arguments: dimensions on MODEL,
    by argument number. outputs: dimensions of layer outputs on MODEL, by glob.
    """

    model: tuple[tuple[str, int], ...] = ()
    zero: bool = False
    by_cost: bool = False
    stacked: frozenset[str] = frozenset()
    arguments: tuple[tuple[int, int], ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()

    def with_dims(self, patterns: Sequence[str], dim: int | None) -> Marks:
        """Return the marks with another dimension of some groups on MODEL, or none."""
        others = {p: d for p, d in self.model if p not in patterns}
        chosen = others if dim is None else {**others, **dict.fromkeys(patterns, dim)}
        # Sorted, so that equal marks are equal keys, however they were found.
        return replace(self, model=tuple(sorted(chosen.items())))

    def with_arguments(self, numbers: tuple[int, ...], dim: int | None) -> Marks:
        """Return the marks with another argument dimension on MODEL, or none."""
        others = {n: d for n, d in self.arguments if n not in numbers}
        chosen = others if dim is None else {**others, **dict.fromkeys(numbers, dim)}
        return replace(self, arguments=tuple(sorted(chosen.items())))

    def with_outputs(self, globs: tuple[str, ...], dim: int | None) -> Marks:
        """Return the marks with a dimension of these layer outputs, and no others, on MODEL."""
        return replace(self, outputs=tuple((glob, dim) for glob in globs if dim is not None))

    def on(self, mesh: Mesh) -> Marks:
        """Return those whose axes have more than one device."""
        # Marks that mean the same on a mesh become equal, so they are planned once.
        model, data = (mesh.count(axes) > 1 for axes in ((MODEL,), batch_axes(mesh)))
        return Marks(
            self.model if model else (),
            self.zero and data,
            self.by_cost and self.zero and data,
            self.stacked if data else frozenset(),
            self.arguments if model else (),
            self.outputs if model else (),
        )

    def spec(self, group: Group, mesh: Mesh) -> ShardSpec | None:
        dims: list[tuple[str, ...]] = [()] * len(group.shape)
        dim = dict(self.model).get(group.pattern)
        # Marks come from other meshes, too, whose axes may divide where these do not.
        if dim is not None and group.shape[dim] % mesh.count((MODEL,)) == 0:
            dims[dim] = (MODEL,)
        batch, priorities = batch_axes(mesh), [0] * len(dims)
        stack = (*dims[0], batch[-1])
        if group.pattern in self.stacked and group.shape[0] % mesh.count(stack) == 0:
            dims[0], batch = stack, batch[:-1]
        free = self._zero_dim(group, mesh, dims, batch) if self.zero else None
        if free is not None:
            if not dims[free] and not self.by_cost:
                # A later round: the batch's layout is propagated first.
                priorities[free] = 1
            # Behind MODEL: the batch's axes divide each of its shards.
            dims[free] = (*dims[free], *batch)
        spec = ShardSpec(tuple(dims)).with_priorities(tuple(priorities))
        return spec if any(dims) else None

    def argument_spec(self, number: int, shape: Sequence[int], mesh: Mesh) -> ShardSpec | None:
        """Return an argument's layout: the first dimension on the batch's axes, if they divide."""
        return _batch_spec(shape, dict(self.arguments).get(number), mesh)

    def output_spec(self, glob: str, shape: Sequence[int], mesh: Mesh) -> ShardSpec | None:
        """Return a layer output's layout, None for no mark."""
        dim = dict(self.outputs).get(glob)
        return None if dim is None else _batch_spec(shape, dim, mesh)

    def _zero_dim(
        self, group: Group, mesh: Mesh, dims: list[tuple[str, ...]], axes: tuple[str, ...]
    ) -> int | None:
        """Return the dimension that ZeRO shards: the largest that is free, else any that fits."""
        rows = [n // mesh.count(own) for n, own in zip(group.shape, dims)]
        fitting = [d for d, n in enumerate(rows) if n % mesh.count(axes) == 0 and n]
        return max(fitting, key=lambda d: (not dims[d], rows[d]), default=None) if axes else None


def _batch_spec(shape: Sequence[int], dim: int | None, mesh: Mesh) -> ShardSpec | None:
    """Return a layout: the first dimension on the batch's axes, one on MODEL, if these divide."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    if shape and shape[0] % mesh.count(batch_axes(mesh)) == 0:
        dims[0] = batch_axes(mesh)
    if dim is not None and shape[dim] % mesh.count((*dims[dim], MODEL)) == 0:
        dims[dim] = (*dims[dim], MODEL)
    return ShardSpec(tuple(dims)) if any(dims) else None


@dataclass(frozen=True)
class Savings:
    """How a plan saves memory. regather: an option for parallelize.

    recomputed: (part, number) for the first layers, then for the next ones and so on: the submodule
    that is recomputed, or "" for the whole layer. microbatches: that a batch is divided into;
    gradients add up. in_calls: whether each is a call, which reduces its gradients; else the option
    microbatches divides the batch, and gradients are reduced once.
    """

    regather: Regather = "auto"
    recomputed: tuple[tuple[str, int], ...] = ()
    microbatches: int = 1
    in_calls: bool = False

    @property
    def calls(self) -> int:
        """Count the calls for a batch."""
        return self.microbatches if self.in_calls else 1


@dataclass(frozen=True)
class Proposal:
    """A mesh and marks, with their estimated cost.

    Args:
        mesh: The devices.
        marks: Specs by glob, for annotate.
        in_specs: Argument layouts, as parallelize takes them.
        hardware: The devices that the times are for.
        seconds: A step's time, without the optimizer.
        memory: Bytes on a device: a step's peak and Adam's states.
        sent_bytes: Bytes that a device sends in a step.
        mfu: Model FLOPs utilization.
        bound: Seconds that no layout can be below: the products at their dtype's rate, divided
            evenly, and nothing else.
        layers: (planned, in the model), if the numbers are extrapolated from fewer layers.
        savings: The ways to save memory: weights that are gathered again for the backward, layers
            that it computes again, microbatches.
        dtype_options: Options for parallelize that suggest was given: param_dtype, reduce_dtype.
        recomputed: Code for these layers, such as model.layers[:8]; none if empty.
        staged: Path of the layers that are in stages, along the mesh's axis `stage`.
        largest_batch: Batch rows that fit, if it was searched.
        recompute_bound: Seconds that no choice of layers and submodules to recompute is below, on
        this mesh with these marks in this memory, if HiGHS is there.
        limit: Bytes that may be used on a device. A proposal that needs more says so.
        dtype: The products' dtype, whose rate `bound` and `mfu` take.
        kernels: A framework's kernels that the times are of, with its products' format.
        keeps_results: Whether results stay as they are computed: the model returns more than its
            loss, and gathering that is not in the numbers.
        source: Code that makes the model and a batch, for `script`.
        repeats: Stages of a device.
        shards_updates: Whether parameters and states are stored in parts along `data`.
        least: Seconds that no layout in the search's space is below; `bound` if it is not known.
        reason: What limits the step, in words.
        counts: Work in the whole search: plans judged, and the sums of their counts.

    Example:
        >>> model = torch.nn.Linear(64, 64, device="meta")
        >>> x = torch.empty(32, 64, device="meta")
        >>> best = suggest(model, (x,), devices=4, seconds=5)[0]
        >>> best.mesh.size
        4
    """

    mesh: Mesh
    marks: Mapping[str, str]
    in_specs: tuple[Any, ...] | Mapping[str, Any]
    hardware: Hardware
    seconds: float
    memory: float
    sent_bytes: float
    mfu: float
    bound: float
    layers: tuple[int, int] | None = None
    savings: Savings = Savings()
    dtype_options: Mapping[str, torch.dtype] = field(default_factory=dict)
    recomputed: str = ""
    staged: str = ""
    largest_batch: int | None = None
    recompute_bound: float | None = None
    limit: float = math.inf
    dtype: torch.dtype = torch.float32
    kernels: Kernels | None = None
    keeps_results: bool = False
    repeats: int = 1
    shards_updates: bool = False
    least: float = 0.0
    reason: str = ""
    source: ScriptSource | None = field(default=None, compare=False, repr=False)
    counts: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gap(self) -> float:
        """Return by how much the step is longer than the best layout's, as a share, at most."""
        return self.seconds / max(self.least, self.bound) - 1

    @property
    def code(self) -> str:
        """Return the code that applies the proposal to `model`, and steps, if they need some."""
        count = self.savings.calls
        loss = self.source.step.partition("  #")[0] if self.source else "model(*ROWS)"
        step = ACCUMULATE.replace("COUNT", str(count)).replace("LOSS", loss.replace("ROWS", "rows"))
        return self._wrapping() + (step if count > 1 else "")

    @property
    def script(self) -> str:
        """Return a whole script for torchrun: process group, model, marks, loop."""
        if self.source is None:
            raise ShardingError.here("this proposal is not of suggest", fix="use proposal.code")
        return self.source.script(self._wrapping(), self.mesh.size, self.savings.calls)

    def _wrapping(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.axes)
        marks = "".join(f'    "{name}": "{spec}",\n' for name, spec in self.marks.items())
        specs = repr(self.in_specs).replace("'", '"')
        options = "".join(f", {name}={text}" for name, text in self._options())
        return (
            f"mesh = gspmd.Mesh({axes})\n"
            + (self._in_stages() if self.staged else "")
            + (f"gspmd.annotate(model, mesh, {{\n{marks}}})\n" if marks else "")
            + (RECOMPUTE.replace("LAYERS", self.recomputed) if self.recomputed else "")
            + f"model = gspmd.parallelize(model, mesh, in_specs={specs}{options})"
        )

    def _in_stages(self) -> str:
        again = ", recompute=True" * bool(self.savings.recomputed)
        repeats = f", repeats={self.repeats}" if self.repeats > 1 else ""
        return (
            f'model = gspmd.pipeline_model(model, "{self.staged}", mesh, '
            f'microbatches={self.savings.microbatches}, schedule="1f1b"{repeats}{again})\n'
        )

    def _options(self) -> Iterator[tuple[str, str]]:
        """Yield parallelize's options that are not the default, as code."""
        if self.keeps_results:
            yield "out_specs", '"same"'
        if self.shards_updates:
            yield "shard_updates", '"data"'
        if self.savings.regather != "auto":
            yield "advanced", f'{{"regather": "{self.savings.regather}"}}'
        if self.savings.microbatches > self.savings.calls and not self.staged:
            yield "microbatches", str(self.savings.microbatches)
        for name, dtype in self.dtype_options.items():
            yield name, str(dtype)

    def __str__(self) -> str:
        kind = re.sub(r"\s+", " ", " ".join(f"{n}={s}" for n, s in self.mesh.axes))
        memory, planned, largest, least = size_text(self.memory), "", "", ""
        if self.memory > self.limit:
            memory += f" (too much: {size_text(self.limit)} may be used)"
        if self.layers:
            planned = f"; extrapolated from {self.layers[0]} of {self.layers[1]} layers"
        if self.largest_batch:
            largest = f"; a batch of {self.largest_batch} rows fits"
        if self.recompute_bound:
            ratio = self.seconds / self.recompute_bound
            least = f"; {ratio:.3f} of the bound of recomputing (a linear program)"
        return (
            f"{kind} of {self.hardware.name}: step {time_text(self.seconds)}, MFU {self.mfu:.1%}, "
            f"memory {memory}, {size_text(self.sent_bytes)} sent by a device, "
            f"{self.seconds / self.bound:.2f} of the bound{planned}{largest}{least}\n"
            f"{self._terms()}\n"
            + (f"{self.reason}\n" if self.reason else "")
            + (self.code if self.source is None else self.script)
        )

    def _terms(self) -> str:
        """Define the bound, and the precision that the times assume."""
        recipe, products = self.kernels and self.kernels.recipe, dtype_name(self.dtype)
        rate = self.hardware.rate(recipe.itemsize if recipe else self.dtype.itemsize)
        products = f"{self.kernels.products} by fused kernels" if self.kernels else products
        sums = self.dtype_options.get("reduce_dtype")
        reduced = f", gradients summed in {dtype_name(sums)}" if sums else ""
        return (
            f"bound {time_text(self.bound)}: the products of a step alone, in "
            f"{products} at {self.hardware.efficiency:.0%} of {rate / 1e12:.4g} "
            f"TFLOP/s, divided evenly over {self.mesh.size} devices{reduced}\n"
            f"within {max(self.gap, 0.0):.1%} of the best layout in its space: none is below "
            f"{time_text(max(self.least, self.bound))}"
        )
