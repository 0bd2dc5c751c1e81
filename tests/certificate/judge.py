"""Faults of planned programs, and whether a certificate finds those that change a number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from composition.features import setup_of
from composition.judge import compiled
from torch import Tensor, fx

from torchgspmd import Plan, ShardingError
from torchgspmd.comm.simulator import Simulator, join_global, split_global
from torchgspmd.fx_passes.pass_types import Pass
from torchgspmd.fx_passes.pipeline import with_pass
from torchgspmd.fx_passes.program import Program
from torchgspmd.fx_passes.stages import LOCAL, PARTITIONED
from torchgspmd.tools.certificate.inputs import RandomInputs

from .faults import Injected, faulty, graphs_of, inject

MODELS = (  # sets of features, each one program
    *("data", "tensor", "sequence", "zero3", "zero1", "context", "ring", "dropless", "capacity"),
    *("circular", "gpipe", "1f1b", "interleaved", "zero_bubble", "vee", "stack", "recompute"),
    *("checkpoint", "accumulate", "tied", "step", "any_batch", "uneven", "dropout"),
    *("attention_dropout", "flex", "gqa", "adapters", "batch_norm", "manual", "custom", "spatial"),
)
LEVELS = {"partition": PARTITIONED, "localize": LOCAL}
INPUTS = 5
CAUGHT, MISSED, HARMLESS, CRASHED = "caught", "missed", "harmless", "crashed"


@dataclass(frozen=True)
class Verdict:
    """What became of a fault. near: whether the error names the changed node or one behind it."""

    fault: Injected
    kind: str
    near: bool = True
    text: str = ""


def planned(name: str) -> Plan:
    """Return the plan of a set of features."""
    return compiled(setup_of(tuple(name.split("+"))))[0]


class Judge:
    """Faults of one plan. numbers: what the plan returns for each set of inputs."""

    def __init__(self, name: str) -> None:
        self.name, self.plan = name, planned(name)
        self.inputs = [list(self._numbers(seed)) for seed in range(101, 101 + INPUTS)]
        self.results = [self._run(self.plan, inputs) for inputs in self.inputs]

    def _numbers(self, seed: int) -> Iterator[Tensor]:
        yield from RandomInputs(self.plan.captured, seed, positive=bool(seed % 2), most=8).tensors()

    def _run(self, plan: Plan, inputs: list[Tensor]) -> list[Tensor]:
        shards = [split_global(t, s, plan.mesh) for t, s in zip(inputs, plan.input_layouts)]
        shapes = [tuple(t.shape) for t in inputs]
        sizes = plan.sizes_of_run(shapes)
        torch.manual_seed(0)
        results = Simulator(plan.program, plan.mesh).run_devices(shards, plan.size_inputs(sizes))
        return [
            join_global(values, spec, plan.result_shape(i, values[0].shape, sizes), plan.mesh)
            for i, (values, spec) in enumerate(zip(results, plan.out_specs))
            if spec is not None
        ]

    def matters(self, plan: Plan) -> bool:
        """Return whether a plan computes other numbers for some inputs, or none."""
        for inputs, expected in zip(self.inputs, self.results):
            try:
                found = self._run(plan, inputs)
            except Exception:
                return True
            if any(_differ(a, b) for a, b in zip(found, expected)):
                return True
        return False

    def judge(self, seed: int) -> Verdict | None:
        """Put a fault into the plan, at a level that the seed chooses."""
        rng = Random(f"{self.name} {seed}")
        made = self._planned_with(rng) if seed % 3 == 0 else faulty(self.plan, rng)
        if made is None:
            return None
        plan, fault = made
        if not self.matters(plan):
            return Verdict(fault, HARMLESS)
        try:
            certificate = plan.verify()
        except ShardingError as error:
            return Verdict(fault, CAUGHT, _is_near(plan, fault, str(error)), str(error))
        return Verdict(fault, MISSED, text=str(certificate).partition("\n")[0])

    def _planned_with(self, rng: Random) -> tuple[Plan, Injected] | None:
        """Plan again, with a fault behind a pass."""
        after, seed = rng.choice(sorted(LEVELS)), rng.random()
        faults: list[Injected | None] = []

        def run(program: Program) -> fx.Graph | None:
            faults.append(inject(program.graph, Random(seed)))
            return None

        stage = LEVELS[after]
        try:
            with with_pass(Pass("fault", run, stage, stage), after=after):
                plan = planned(self.name)
        except Exception:
            return None  # a later pass has found it
        fault = next((f for f in reversed(faults) if f is not None), None)
        return None if fault is None else (plan, fault)


def _differ(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return not torch.equal(a, b)
    scale = float(b.nan_to_num().abs().max()) if b.numel() else 0.0
    return not torch.allclose(a, b, rtol=0, atol=1e-6 * max(scale, 1e-3), equal_nan=True)


def _is_near(plan: Plan, fault: Injected, text: str) -> bool:
    """Return whether an error names the changed node, or the first claims behind it."""
    named = {text.partition("'%")[2].partition("'")[0]}
    programs = graphs_of(plan.program_graph)
    named |= {str(n.meta.get("value")) for g in programs for n in g.nodes if n.name in named}
    named |= {"output"} if " is result " in text else set()
    return bool(named & fault.near)
