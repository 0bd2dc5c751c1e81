"""Plan.verify: does each value in the planned programs denote the value that it claims?

    captured program, one device      --values by name-->      partitioned program, one device
    partitioned program, one device   --shards by layout-->    programs of all devices

A node in the one-device program claims a value in the partitioned program (meta "value") in a
layout (meta "spec"). The devices run in lockstep, on random numbers, with NaN in all padding, and
each claim is compared element by element. Results claim their layouts, too: they are judged even if
no value inside claims anything. docs/certificate.md has the method and its limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ...compiler.plan import Plan
from ...errors import ShardingError
from ...fx_passes.loop_call import loop_calls
from ...fx_passes.pass_runner import observing
from ...fx_passes.program import Program
from ...fx_passes.stages import LOCAL
from .claimed_layouts import cut, fails, other_dtype
from .devices import At, DeviceError, Devices
from .eager import check_eager
from .inputs import Rewritten, device_of
from .ranks import NotLowered, check_ranks
from .trial import NoNumbers, RandomTrial, constants_of, elements, is_blank

_TOO_LARGE = 100_000_000  # elements of all values on all devices, of one trial
_NOT_JUDGED = "it has no finite number, is part of a sum in a stage, or is drawn in another order"
_MOST_RANKS = 64  # each has a thread
_SHOWN = 6  # names of one reason that a text has
TRIALS = ((1, True), (2, False))  # (seed, whether numbers are positive)


@dataclass(frozen=True)
class Uncertified:
    """A value that no trial could judge.

    Args:
        name: Its name, as the plan prints it.
        why: The reason.

    Example:
        >>> str(Uncertified("tanh", "it is too large"))
        "Uncertified(name='tanh', why='it is too large')"
    """

    name: str
    why: str


@dataclass(frozen=True)
class Certificate:
    """The result of `Plan.verify`: all claims that were judged hold.

    Args:
        certified: Names of values in the partitioned program that hold on all devices.
        uncertified: Values that could not be judged, each with the reason.
        trials: How many sets of random numbers were run.
        results: How many outputs, updated inputs and gradients hold.
        ranks: How many ranks have lowered programs that hold.
        not_lowered: Why those of ranks were not compared.
        not_eager: Why the captured program was not compared with eager PyTorch.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> specs = ("data model", "model _")
        >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
        >>> print(result.verify())
        certified 4 of 4 values and 1 result, in 2 trials, on 8 ranks, and by eager PyTorch
    """

    certified: frozenset[str]
    uncertified: tuple[Uncertified, ...]
    trials: int
    results: int
    ranks: int = 0
    not_lowered: str = ""
    not_eager: str = ""

    @property
    def complete(self) -> bool:
        """Whether every value is certified."""
        return not self.uncertified

    def __str__(self) -> str:
        total = len(self.certified) + len(self.uncertified)
        plural = "" if self.results == 1 else "s"
        lines = [
            f"certified {len(self.certified)} of {total} values and {self.results} result{plural}, "
            f"in {self.trials} trials"
            + (f", on {self.ranks} ranks" if self.ranks else "")
            + ("" if self.not_eager else ", and by eager PyTorch")
        ]
        lines += [f"  not by eager PyTorch: {self.not_eager}"] if self.not_eager else []
        lines += [f"  not the programs of ranks: {self.not_lowered}"] if self.not_lowered else []
        for why in dict.fromkeys(each.why for each in self.uncertified):
            names = [f"%{each.name}" for each in self.uncertified if each.why == why]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"  not {', '.join(names[:_SHOWN])}{more}: {why}")
        return "\n".join(lines)


TrialOf = Callable[[int, bool, bool], RandomTrial]
"""Returns a seed's trial: (seed, whether numbers are positive, whether they have 64 bits)."""


def certify(plan: Plan, trial_of: TrialOf | None = None) -> Certificate:
    """Return a plan's certificate. trial_of: for a plan with the same partitioned graph.

    Raises:
        ShardingError: A value differs from one device's.
    """
    trial_of = trial_of or partial(RandomTrial, plan)
    names = _claimed(plan)
    judged, why, trials, results = set[str](), "", 0, 0
    plain = list[Tensor]()
    if (work := plan.mesh.size * elements(plan)) > _TOO_LARGE:
        why = f"{work:.0e} elements on all devices are too many; verify a plan of smaller sizes"
    for seed, positive in TRIALS if not why else ():
        # In 64 bits first, where the order of a sum matters least; some operations lack them.
        for wide in (True, False):
            try:
                trial = trial_of(seed, positive, wide)
                trial.run(plan.program_graph)
            except NoNumbers as error:
                why = f"one device cannot compute it with random numbers: {error}"
                continue
            judged |= trial.judged
            trials, results, plain = trials + 1, max(results, trial.results), trial.plain
            break
    if trials:
        check_dtypes(plan, plain)
        why = _NOT_JUDGED
    left = tuple(Uncertified(name, why) for name in names if name not in judged)
    not_lowered = _check_lowered(plan, trial_of) if trials else ""
    ranks = plan.mesh.size if trials and not not_lowered else 0
    # Last, since its error is the least precise one.
    eager = check_eager(plan)
    return Certificate(frozenset(judged), left, trials, results, ranks, not_lowered, eager)


def _check_lowered(plan: Plan, trial_of: TrialOf) -> str:
    """Compare the lowered programs of all ranks; return why that was not done, or nothing."""
    if plan.mesh.size > _MOST_RANKS:
        return f"{plan.mesh.size} are too many; verify a plan for a smaller mesh"
    why = ""
    for wide in (True, False):
        try:
            trial = trial_of(*TRIALS[0], wide)
            trial.run(plan.program_graph)
            check_ranks(trial)
            return ""
        except (NoNumbers, NotLowered) as error:
            why = str(error)
    return why


def _claimed(plan: Plan) -> list[str]:
    """Return the values that nodes in the programs claim. A body's inputs repeat others."""
    # Values in the partitioned graph that are memory without content.
    blank = {node.name for node in plan.captured.graph.nodes if is_blank(node)}
    without = {n.name for n in plan.sharded.nodes if is_blank(n) or n.meta.get("captured") in blank}
    claims = (n for graph in programs_of(plan.program_graph) for n in graph.nodes)
    top = set(plan.program_graph.nodes)
    names = dict.fromkeys(
        n.meta["value"]
        for n in claims
        if {"value", "spec"} <= n.meta.keys() and (n in top or n.op != "placeholder")
    )
    return [name for name in names if name not in without]


# Which pass has made a program wrong: plan again, and compare the program behind each pass.


def blamed(plan: Plan, error: ShardingError) -> ShardingError:
    """Add to a plan's error the pass that made it wrong, if planning again shows it.

    A plan from a file has no passes: its error stays as it is. A pass is named if its program and
    all later ones are wrong: between `localize` and `outline_loops` a pipeline with several rounds
    runs in another order than the devices will.
    """
    if plan._replanner is None:
        return error
    found = list[tuple[str, ShardingError | None]]()
    with observing(lambda name, program: found.append((name, _difference(program)))):
        plan._replanner()(plan.captured)
    wrong = [*takewhile(lambda row: row[1] is not None, reversed(found))]
    if not wrong or (first := wrong[-1][1]) is None:
        return error
    made = f"pass {wrong[-1][0]} made it so: the program before it is right"
    return ShardingError(first.what, where=first.where, why=f"{made}; {first.why}", fix=first.fix)


def _difference(program: Program) -> ShardingError | None:
    """Return the error of a program that computes other values than one device."""
    is_local = program.stage >= LOCAL
    graph = program.sharded if is_local else program.graph
    plan = Plan(program.mesh, program.captured, graph, program.graph, None, {})
    for seed, positive in TRIALS:
        for wide in (True, False):
            try:
                trial = RandomTrial(plan, seed, positive, wide)
                if is_local:
                    trial.run(program.graph)
            except NoNumbers:
                continue
            except ShardingError as error:
                return error
            break
    return None


# Whether a program's values have the plan's dtypes: trials compute in 64 bits.


def check_dtypes(plan: Plan, inputs: Sequence[Tensor]) -> None:
    """Raise ShardingError if a value has another dtype than in the plan.

    inputs: a trial's, in the plan's dtypes.
    """
    allowed = {
        node.name: {node.meta["val"].dtype, node.meta.get("computed", node.meta["val"].dtype)}
        for node in plan.sharded.nodes
        if isinstance(node.meta.get("val"), Tensor)
    }

    def claim(path: str, node: fx.Node, shards: list[Tensor], at: At) -> None:
        # A value that the plan lacks has no dtype to compare with.
        known = allowed.get(node.meta["value"], {shards[0].dtype})
        if shards[0].dtype not in known:
            raise other_dtype(node, shards[0].dtype, known)

    shards = [cut(t, spec, plan.mesh) for t, spec in zip(inputs, plan.input_layouts)]
    # Not widened: dtypes are what is checked here.
    graph = Rewritten(False, device_of(plan.captured)).graph(plan.program_graph)
    devices = Devices(constants_of(plan, wide=False), plan.mesh, graph, claim)
    sizes = plan.sizes_of_run([tuple(t.shape) for t in inputs])
    try:
        devices.run_devices(shards, plan.size_inputs(sizes))
    except DeviceError as error:
        raise fails(error.node, error, "the devices", "it") from error
    for graph in programs_of(plan.program_graph):
        for node in graph.nodes:
            _check_rounding(node)


def programs_of(graph: fx.Graph) -> Iterator[fx.Graph]:
    yield graph
    for _, call in loop_calls(graph):
        for body in call.bodies:
            yield from programs_of(body.graph)


def _check_rounding(node: fx.Node) -> None:
    """Raise ShardingError if a value is rounded to a narrow dtype and back, which no value says."""
    back, cast = node, aten._to_copy.default
    narrow = back.args[0] if back.target is cast else None
    if not isinstance(narrow, fx.Node) or narrow.target is not cast or "value" in narrow.meta:
        return
    wide, small = back.kwargs.get("dtype"), narrow.kwargs.get("dtype")
    if wide is None or small is None or not (wide.is_floating_point and small.is_floating_point):
        return
    # Only a loss of digits is wrong: a cast to a wider dtype and back changes nothing.
    if torch.finfo(small).eps > torch.finfo(wide).eps:
        raise other_dtype(narrow, small, {wide})
