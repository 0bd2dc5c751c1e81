"""The search: mesh shapes, then marks group by group, while a step gets shorter.

A mesh has two axes: DATA for the batch, MODEL for weights. On the first with both, each group of
like parameters is tried along each of its dimensions on MODEL, and all together along DATA. A
change stays if it makes the step shorter, or a program that needs too much memory smaller. These
marks are the start on the other meshes, of which the best are searched in turn. Propagation and
partition decide all else, so that few marks say much. What plans share is computed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..api import compile_plan
from ..capture import PARAMETER, Captured, capture
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line
from ..fx_passes.program import Shared
from ..hardware import Hardware
from ..layout_rules import Layout, Unmarked, bound
from ..mesh import Mesh
from ..shard_spec import ShardSpec
from .proposal import DATA, MODEL, Marks, Proposal, groups_of, pattern_of
from .shorten import like_layers, shortened

UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MIN_SHARE = 0.005  # of the parameters' bytes, that a group has which is searched by itself
MIN_GAIN = 0.005  # of a step's time: a mark that brings less is left out
HOPELESS = 1.5  # times the time or memory of the best: a mesh that starts so is not searched
BEST = 5


def suggest(
    model: nn.Module,
    args: Sequence[Any] = (),
    *,
    devices: int,
    hardware: str | Hardware = "h100",
    memory: str | float | None = None,
    seconds: float = 60.0,
    kwargs: dict[str, Any] | None = None,
) -> list[Proposal]:
    """Search a mesh and marks for a model, and return the best as code to paste.

    Nothing runs but the planner: model and arguments may be on the meta device. The first tensor
    dimension of every argument is taken for the batch. Recomputation and the size of the batch are
    not searched. The states of Adam are counted.

    Args:
        model: Its own marks do not count.
        args: Positional arguments of a call, of the global batch.
        devices: How many.
        hardware: A preset, or a Hardware.
        memory: Bytes of a device that may be used, such as "80GB"; by default all it has.
        seconds: Time of the search; what is best by then is returned.
        kwargs: Keyword arguments of a call.

    Returns:
        At most five proposals, the fastest first; those that need too much memory last.

    Raises:
        ShardingError: The model cannot be captured, or `memory` is no size.

    Example:
        >>> model = torch.nn.Linear(64, 64, device="meta")
        >>> x = torch.empty(65536, 64, device="meta")
        >>> print(suggest(model, (x,), devices=2, seconds=5)[0].code)
        mesh = gspmd.Mesh(data=2, model=1)
        model = gspmd.parallelize(model, mesh, in_specs=("data _",))
    """
    deadline = time.monotonic() + seconds
    speed = Hardware.of(hardware)
    limit = speed.memory if memory is None else size_of(memory)
    search = _Search(_captures(model, tuple(args), kwargs or {}), speed, limit, deadline)
    search.run(list(_meshes(devices)))
    return search.best()


def size_of(memory: str | float) -> float:
    """Return the bytes of a size, such as "80GB" or 80e9.

    Args:
        memory: A number, or one with a unit.

    Returns:
        Bytes.

    Raises:
        ShardingError: The text is no size.
    """
    if isinstance(memory, (int, float)):
        return float(memory)
    text = memory.strip().upper().replace(" ", "")
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError:
        raise ShardingError(
            f"memory '{memory}' is no size", where=user_line(), fix='"80GB" or 80e9'
        ) from None


def _meshes(devices: int) -> Iterator[Mesh]:
    """Yield the meshes of so many devices: those with a small MODEL axis first."""
    for model in range(1, devices + 1):
        if devices % model == 0:
            yield Mesh(data=devices // model, model=model)


@dataclass(frozen=True)
class _Captures:
    """The programs that are judged: of the whole model, or of one and of two of its layers."""

    programs: tuple[Captured, ...]
    arguments: tuple[Tensor, ...]
    layers: int  # of the model, if it is judged by fewer

    def extrapolate(self, values: Sequence[float]) -> float:
        """Return the value of the whole model from those of the programs."""
        if len(values) == 1:
            return values[0]
        one, two = values
        return two + (self.layers - 2) * (two - one)


def _captures(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Captures:
    lists, length = like_layers(model)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    mesh = Mesh(data=1, model=1)

    def captured() -> Captured:
        with bound(Unmarked(Layout({}), mesh)):
            return capture(model, args, kwargs, mesh, grad=True)

    if length:
        programs: list[Captured] = []
        for count in (1, 2):
            with shortened(lists, count):
                programs.append(captured())
        return _Captures(tuple(programs), tuple(tensors), length)
    return _Captures((captured(),), tuple(tensors), 0)


@dataclass
class _Search:
    """The proposals that were tried, by mesh and marks."""

    captures: _Captures
    hardware: Hardware
    limit: float
    deadline: float
    tried: dict[tuple[Mesh, Marks], Proposal] = field(default_factory=dict)
    shared: Shared = field(default_factory=Shared)

    def __post_init__(self) -> None:
        self.groups = groups_of(self.captures.programs[-1])

    def run(self, meshes: Sequence[Mesh]) -> None:
        """Search every mesh from few marks; then the best, mark by mark."""
        found: dict[Mesh, Marks] = {}
        marks = Marks()
        for mesh in meshes:
            if self.is_over():
                return
            found[mesh] = self._best_start(mesh, marks)
            if not marks.model:
                marks = found[mesh] = self._descend(mesh, found[mesh])
        for mesh in sorted(meshes, key=lambda mesh: self.score(mesh, found[mesh])):
            if not self._is_hopeless(self.propose(mesh, found[mesh])):
                self._descend(mesh, found[mesh])

    def _is_hopeless(self, proposal: Proposal) -> bool:
        best = self.best()[0]
        return proposal.seconds > HOPELESS * best.seconds or proposal.memory > HOPELESS * max(
            self.limit, best.memory
        )

    def is_over(self) -> bool:
        """Return whether there is no time left, and something to return."""
        return bool(self.tried) and time.monotonic() > self.deadline

    def _best_start(self, mesh: Mesh, marks: Marks) -> Marks:
        """Return the best of no marks and those of another mesh, with and without ZeRO."""
        zeros = (False, True) if mesh.count((DATA,)) > 1 else (False,)
        model = marks.model if mesh.count((MODEL,)) > 1 else ()
        starts = dict.fromkeys(Marks(m, zero) for m in ((), model) for zero in zeros)
        return min(starts, key=lambda marks: self.score(mesh, marks))

    def _descend(self, mesh: Mesh, best: Marks) -> Marks:
        """Return the marks that single changes lead to, each of which makes the step shorter."""
        settled: set[Marks] = set()
        while best not in settled:
            settled.add(best)
            for change in self._changes(mesh):
                if self.is_over():
                    return best
                excess, step = self.score(mesh, best)
                if self.score(mesh, change(best)) < (excess, step * (1 - MIN_GAIN)):
                    best = change(best)
        return best

    def _changes(self, mesh: Mesh) -> Iterator[Callable[[Marks], Marks]]:
        """Yield functions that change marks."""
        count = mesh.count((MODEL,))
        smallest = MIN_SHARE * sum(group.bytes for group in self.groups)
        matrices = [g for g in self.groups if len(g.shape) > 1 and g.bytes >= smallest]
        for group in matrices if count > 1 else ():
            for dim in [*range(len(group.shape)), None]:
                if dim is None or group.shape[dim] % count == 0:
                    yield lambda marks, group=group, dim=dim: marks.with_dim(group.pattern, dim)
        if mesh.count((DATA,)) > 1:
            yield lambda marks: replace(marks, zero=not marks.zero)

    def score(self, mesh: Mesh, marks: Marks) -> tuple[float, float]:
        """Return what is compared: bytes above the limit first, then seconds."""
        proposal = self.propose(mesh, marks)
        return max(proposal.memory - self.limit, 0.0), proposal.seconds

    def propose(self, mesh: Mesh, marks: Marks) -> Proposal:
        """Return the proposal of marks on a mesh, planned once."""
        if (mesh, marks) not in self.tried:
            self.tried[mesh, marks] = self._plan(mesh, marks)
        return self.tried[mesh, marks]

    def _plan(self, mesh: Mesh, marks: Marks) -> Proposal:
        """Plan marks on a mesh; gather weights again for the backward where memory asks for it."""
        kept = self._judge(mesh, marks, "auto")
        if not marks.zero or kept.memory <= self.limit:
            return kept
        again = self._judge(mesh, marks, "always")
        return again if again.memory < kept.memory else kept

    def _judge(self, mesh: Mesh, marks: Marks, regather: str) -> Proposal:
        specs = {
            (group.pattern, group.shape): spec
            for group in self.groups
            if (spec := marks.spec(group, mesh)) is not None
        }
        inputs = [_batch_spec(t, mesh) for t in self.captures.arguments]
        reports = []
        for program in self.captures.programs:
            marked = [
                replace(inp, mark=specs.get((pattern_of(inp.name), inp.shape)))
                if inp.kind == PARAMETER
                else inp
                for inp in program.inputs
            ]
            result = compile_plan(
                replace(program, inputs=marked),
                mesh,
                inputs + [None for _ in program.state_inputs],
                regather=regather,
                device="meta" if self.hardware.beside else "cpu",
                shared=self.shared,
            )
            reports.append(result.report(self.hardware, tried=False))
        join = self.captures.extrapolate
        seconds = join([r.estimate.seconds for r in reports])
        flops = join([r.estimate.model_flops for r in reports]) / mesh.size
        return Proposal(
            mesh,
            {pattern: str(spec) for (pattern, _), spec in specs.items()},
            tuple(None if spec is None else str(spec) for spec in inputs),
            self.hardware,
            seconds,
            join([float(r.memory.peak + r.memory.optimizer) for r in reports]),
            join([sum(row.sent_bytes for row in r.collectives) for r in reports]),
            flops / (seconds * self.hardware.peak),
            flops / (self.hardware.efficiency * self.hardware.peak),
            (2, self.captures.layers) if self.captures.layers else None,
            regather,
        )

    def best(self) -> list[Proposal]:
        """Return the best proposals: one of each mesh, with and without ZeRO."""
        chosen: dict[tuple[Mesh, bool], Proposal] = {}
        for mesh, marks in sorted(self.tried, key=lambda key: self.score(*key)):
            chosen.setdefault((mesh, marks.zero), self.tried[mesh, marks])
        return list(chosen.values())[:BEST]


def _batch_spec(tensor: Tensor, mesh: Mesh) -> ShardSpec | None:
    """Return the layout of an argument: its first dimension along DATA, if that divides it."""
    if not tensor.dim() or tensor.shape[0] % mesh.count((DATA,)):
        return None
    return ShardSpec(((DATA,), *[()] * (tensor.dim() - 1)))
