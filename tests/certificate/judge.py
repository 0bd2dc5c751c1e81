"""Faults of planned programs, and whether a certificate finds those that change a number."""

from __future__ import annotations

import copy
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor, fx

from torchgspmd import Plan, ShardingError
from torchgspmd.fx_passes.loop_call import copy_of
from torchgspmd.fx_passes.pass_types import Pass
from torchgspmd.fx_passes.pipeline import passes, run, with_pass
from torchgspmd.fx_passes.program import Program
from torchgspmd.fx_passes.simulator import Simulator, join_global, split_global
from torchgspmd.fx_passes.stages import LOCAL, PARTITIONED
from torchgspmd.tools.certificate.certificate import TRIALS, TrialOf, certify
from torchgspmd.tools.certificate.inputs import RandomInputs, Rewritten, widened
from torchgspmd.tools.certificate.trial import NoNumbers, RandomTrial, constants_of

from .faults import Injected, graphs_of, inject, with_program
from .models import planned

LEVELS = {"partition": PARTITIONED, "localize": LOCAL}
EVERY = 6  # each so many faults, one is put in before the last passes
_SEEDS = range(101, 106)  # of inputs
_DRAWS = 10  # of faults, until one is new
SCHEDULED = "schedule"  # the level of the whole program of one device
CAUGHT, MISSED, HARMLESS, CRASHED = "caught", "missed", "harmless", "crashed"
REFUSED = "refused"  # a later pass has found it


@dataclass(frozen=True)
class Verdict:
    """What became of a fault. near: whether the error names the changed node or one behind it."""

    fault: Injected
    kind: str
    near: bool = True
    text: str = ""


class Base:
    """A right plan, into which faults are put: its numbers, and those of one device.

    results: those of the plan, for each set of inputs. program: behind a pass, None at the end.
    """

    def __init__(self, plan: Plan, program: Program | None = None) -> None:
        self.plan, self.program = plan, program
        self.trial_of = cache(partial(RandomTrial, plan))
        numbers = (RandomInputs(plan.captured, n, bool(n % 2), most=8) for n in _SEEDS)
        self.inputs = [each.tensors() for each in numbers]
        self.results = [_run(plan, inputs) for inputs in self.inputs]
        self.certified = certify(plan, self.trial_of).certified  # names of values
        self.claims = _compared(plan, self.trial_of)  # names of nodes

    def compares(self, node: fx.Node) -> bool:
        """Return whether the certificate of this plan compares a node, or the value that it is."""
        if "spec" not in node.meta:
            return False
        if self.program is None:
            return node.name in self.claims
        value = node.meta.get("value")
        return "captured" in node.meta if value is None else str(value) in self.certified

    def matters(self, plan: Plan) -> bool:
        """Return whether a plan computes other numbers for some inputs, or none."""
        for inputs, expected in zip(self.inputs, self.results):
            try:
                found = _run(plan, inputs)
            except Exception:
                return True
            if any(_differ(a, b) for a, b in zip(found, expected)):
                return True
        return False

    def matters_in_64_bits(self, plan: Plan) -> bool:
        """Return whether a plan computes other numbers in 64 bits, if it can."""
        try:
            right = [_run(self.plan, inputs, wide=True) for inputs in self.inputs]
        except Exception:  # an operation that takes no 64 bits
            return True
        try:
            found = [_run(plan, inputs, wide=True) for inputs in self.inputs]
        except Exception:
            return True
        pairs = (pair for a, b in zip(found, right) for pair in zip(a, b))
        return any(_differ(a, b, 1e-9) for a, b in pairs)


def _compared(plan: Plan, trial_of: TrialOf) -> frozenset[str]:
    """Return the nodes whose values the certificate of a right plan compares."""
    found = set[str]()
    for wide in (True, False):
        trial = trial_of(*TRIALS[0], wide)

        def noted(name: str, *args: Any, compare: Any = trial._compare, **kwargs: Any) -> bool:
            found.add(name)
            return compare(name, *args, **kwargs)

        trial._compare = noted
        with suppress(NoNumbers):
            trial.run(plan.program_graph)
        del trial._compare
    return frozenset(found)


def _run(plan: Plan, inputs: list[Tensor], wide: bool = False) -> list[Tensor]:
    rewritten = Rewritten(wide, torch.device("cpu"))
    inputs = [widened(t) if wide else t for t in inputs]
    shards = [split_global(t, s, plan.mesh) for t, s in zip(inputs, plan.input_layouts)]
    sizes = plan.sizes_of_run([tuple(t.shape) for t in inputs])
    torch.manual_seed(0)
    graph = rewritten.graph(plan.program_graph) if wide else plan.program_graph
    devices = Simulator(constants_of(plan, wide), plan.mesh, graph)
    results = devices.run_devices(shards, plan.size_inputs(sizes))
    return [
        join_global(values, spec, plan.result_shape(i, values[0].shape, sizes), plan.mesh)
        for i, (values, spec) in enumerate(zip(results, plan.out_specs))
        if spec is not None
    ]


class Judge:
    """Faults of one plan, each different from those that it has `seen`."""

    def __init__(self, name: str) -> None:
        self.name, self.plan, self.seen = name, planned(name), set[int]()
        self.last = 0  # the key of the last fault
        self.bases = {SCHEDULED: Base(self.plan)}

    def judge(self, seed: int) -> Verdict | None:
        """Put a fault into the plan, at a level that the seed chooses; None if it has been."""
        rng = Random(f"{self.name} {seed}")
        level = rng.choice(sorted(LEVELS)) if seed % EVERY == 0 else SCHEDULED
        base = self._base(level)
        original = self.plan.program_graph if base.program is None else base.program.graph
        for _ in range(_DRAWS):
            graph = copy_of(original)
            fault = inject(graph, rng, base.compares)
            if fault is not None and self._is_new(graph):
                break
        else:
            return None
        trial_of = None if level == "partition" else base.trial_of
        try:
            plan = _plan_behind(base.program, graph, level) if base.program else None
        except Exception as error:
            return Verdict(fault, REFUSED, text=str(error))
        plan = plan or with_program(self.plan, graph)
        if not base.matters(plan):
            return Verdict(fault, HARMLESS)
        try:
            certificate = certify(plan, trial_of)
        except ShardingError as error:
            return Verdict(fault, CAUGHT, _is_near(plan, fault, str(error)), str(error))
        if fault.kind != "narrow_dtype" and not base.matters_in_64_bits(plan):
            return Verdict(fault, HARMLESS)  # another rounding of what is 0
        return Verdict(fault, MISSED, text=str(certificate).partition("\n")[0])

    def _is_new(self, graph: fx.Graph) -> bool:
        """Note a graph with a fault; return whether no other fault has made it."""
        text = "".join(str(each) for each in graphs_of(graph))
        self.last = zlib.crc32(text.encode())  # not Python's hash, which differs between processes
        is_new = self.last not in self.seen
        self.seen.add(self.last)
        return is_new

    def _base(self, level: str) -> Base:
        """Return the program behind a pass, and the plan that it becomes."""
        if level not in self.bases:
            found: list[Program] = []

            def keep(program: Program) -> fx.Graph | None:
                found[:] = [copy.copy(program)]
                found[0].graph = copy_of(program.graph)
                return None

            with with_pass(Pass("keep", keep, LEVELS[level], LEVELS[level]), after=level):
                planned(self.name)
            program = found[0]
            self.bases[level] = Base(_plan_behind(program, program.graph, level), program)
        return self.bases[level]


def _plan_behind(program: Program, graph: fx.Graph, level: str) -> Plan:
    """Return the plan of a graph behind a pass: those that follow have run on a copy."""
    program = copy.copy(program)
    program.graph, program.seconds = copy_of(graph), {}
    left_out = {"never": {"regather_weights"}, "auto": {"regather_weights"}}
    names = [each.name for each in passes()]
    rows = passes()[names.index(level) + 1 : names.index("overlap") + 1]
    rows = [r for r in rows if r.name not in left_out.get(program.request.regather, ())]
    program = run(program, steps=rows)
    return Plan(program.mesh, program.captured, program.sharded, program.graph, None, {})


def _differ(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return not torch.equal(a, b)
    scale = float(b.nan_to_num().abs().max()) if b.numel() else 0.0
    return not torch.allclose(a, b, rtol=0, atol=tolerance * max(scale, 1e-3), equal_nan=True)


def _is_near(plan: Plan, fault: Injected, text: str) -> bool:
    """Return whether an error names the changed node, or the first claims behind it."""
    named = {text.partition("'%")[2].partition("'")[0]}
    programs = graphs_of(plan.program_graph)
    named |= {str(n.meta.get("value")) for g in programs for n in g.nodes if n.name in named}
    named |= {"output"} if " is result " in text else set()
    return bool(named & fault.near)
