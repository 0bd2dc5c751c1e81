"""The fastest layout of a decoder's run: branch and bound over the degrees of parallelism.

A candidate has sizes for data, tensor, stages, virtual stages, context, experts and FSDP, and the
rows of a microbatch. Candidates are tried in the order of their lower bounds. Those that differ in
stages and microbatches alone share a plan, so that trying one tries them all. A candidate whose
bound is above the best step is never planned. Where time ends the search, the least bound of those
that were not tried says how far the best one is from the best layout in this space at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...errors import ShardingError
from .run_bounds import Bound, Reference
from .run_steps import Planned, RunStep, composed
from .runs import DecoderRun

MOST = {"tensor": 8, "context": 8, "pipeline": 64, "rounds": 16, "rows": 8, "expert": 256}
MOST_PIECES = 2048  # stages x all virtual stages: a longer schedule takes many seconds
MOST_COMPOSED = 6  # candidates of a plan whose schedules are computed
MIN_GAIN = 0.002  # of a step: a candidate whose bound promises less is not tried


def powers(most: int) -> Iterator[int]:
    """Yield the powers of two up to `most`."""
    yield from (2**i for i in range(most.bit_length()) if 2**i <= most)


def candidates(run: DecoderRun) -> Iterator[DecoderRun]:
    """Yield the layouts of a run's devices that it may have; the run's own does not count."""
    c = run.config
    heads = c.key_heads if c.latent is None else c.heads
    for tensor in powers(min(MOST["tensor"], heads, run.gpus)):
        # A ring of attention beside an exchange of experts takes minutes to plan.
        longest = 1 if c.experts else MOST["context"]
        for context in powers(min(longest, run.gpus // tensor)):
            inner = tensor * context
            if run.gpus % inner or run.sequence % inner:
                continue
            for stages in _divisors(run.gpus // inner, min(MOST["pipeline"], c.layers)):
                replicas = run.gpus // inner // stages
                if run.global_batch % replicas:
                    continue
                sizes = {"tensor": tensor, "context": context, "pipeline": stages}
                for rows in powers(MOST["rows"]):
                    if run.global_batch // replicas % rows:
                        break
                    count = run.global_batch // replicas // rows
                    for rounds in _rounds(run, stages, count):
                        one = {**sizes, "micro_batch": rows, "virtual_stages": rounds}
                        yield from _sharded(replace(run, **one), replicas, inner)


def _rounds(run: DecoderRun, stages: int, microbatches: int) -> Iterator[int]:
    """Yield numbers of virtual stages: layers, or layers and both ends, divide evenly."""
    yield 1
    layers = run.config.layers + run.config.predictions
    if stages == 1 or microbatches % stages:
        return
    for rounds in range(2, min(MOST["rounds"], layers // stages) + 1):
        chunks = stages * rounds
        if stages * chunks > MOST_PIECES:
            return
        if not layers % chunks or not (layers + 2) % chunks or rounds in (4, 8):
            yield rounds


def _sharded(run: DecoderRun, replicas: int, inner: int) -> Iterator[DecoderRun]:
    """Yield a layout with experts divided, and with FSDP over all replicas and without it."""
    experts = run.config.experts
    most = math.gcd(experts, replicas * inner) if experts else 1
    for expert in _divisors(most, MOST["expert"]):
        if expert > 1 and (expert % inner or replicas % (expert // inner)):
            continue
        for fsdp in dict.fromkeys((0, replicas if replicas > 1 else 0)):
            if fsdp % max(expert // inner, 1) == 0:
                yield replace(run, expert=expert, fsdp=fsdp)


def _divisors(number: int, most: int) -> Iterator[int]:
    yield from (n for n in range(1, min(number, most) + 1) if number % n == 0)


def handicap(run: DecoderRun) -> float:
    """Return how much later a candidate is tried for the exchanges that no bound has.

    Rings beside experts take long to plan, so they come last.
    """
    rings = math.log2(run.tensor * run.context)
    return 1 + (1.0 if run.config.experts else 0.03) * rings + 0.02 * (run.fsdp > 1)


def tedium(run: DecoderRun) -> float:
    """Return how much later a candidate is composed for the pieces of its schedule."""
    return 1 + 1e-5 * run.pipeline**2 * run.virtual_stages


def pieces(run: DecoderRun) -> int:
    """Return the pieces of its rings: a plan takes about as many times as long."""
    return run.tensor * run.context


def planned_alike(run: DecoderRun) -> tuple[object, ...]:
    """Return the sizes that a plan of one stage depends on."""
    # Sums over replicas come once a step, unless weights are sharded or few are trained.
    per_pass = run.fsdp > 1 or run.has_adapters
    sizes = run.tensor, run.context, run.expert, run.fsdp, run.micro_batch
    return *sizes, run.replicas if per_pass else 0


@dataclass
class RunSearch:
    """A search. end: of CPU seconds (time.process_time). limit: bytes of a device.

    open: candidates by their bounds, those to try first in front. tried: layouts and their steps.
    planned: how many plans were made. skipped: the least bound of candidates that share a plan of
    these, and were not composed as time ended.
    """

    run: DecoderRun
    limit: float
    end: float
    open: list[tuple[float, DecoderRun]] = field(default_factory=list)
    tried: list[tuple[DecoderRun, RunStep]] = field(default_factory=list)
    space: int = 0
    planned: int = 0
    skipped: float = math.inf
    seconds: float = math.inf  # of the best that fits
    pace: float = 0.0  # CPU seconds of a plan without rings, at most

    def run_until_end(self) -> None:
        """Try candidates until none can be better, or time ends."""
        reference, small = Reference(self.run), list[tuple[float, DecoderRun]]()
        for each in candidates(self.run):
            self.space += 1
            least = composed(Bound(reference, each), least=True)
            small.append((least.memory, each))
            if least.memory <= self.limit:
                self.open.append((least.seconds, each))
        self.open.sort(key=lambda pair: pair[0] * handicap(pair[1]))
        while self.open and not self.is_over(self.pace * pieces(self.open[0][1])):
            begin, next_ = time.process_time(), self.open[0][1]
            self.branch(next_)
            spent = time.process_time() - begin
            self.pace = max(self.pace, spent / pieces(next_))
            self.open = [pair for pair in self.open if pair[0] < self.worth]
        if not self.tried and small:  # nothing fits
            self.branch(min(small, key=lambda pair: pair[0])[1])

    @property
    def worth(self) -> float:
        """Return the seconds that a candidate's bound has to be below."""
        return (1 - MIN_GAIN) * self.seconds

    @property
    def bound(self) -> float:
        """Return seconds that no layout in the space is below."""
        return min([self.worth, self.skipped, *(least for least, _ in self.open)])

    def is_over(self, reserve: float = 0.0) -> bool:
        """Return whether there is a result, and no time for so many seconds more."""
        return bool(self.tried) and time.process_time() + reserve > self.end

    def best(self, count: int) -> list[tuple[DecoderRun, RunStep]]:
        """Return the best layouts that were tried, one for each degree of stages and plan."""
        chosen: dict[object, tuple[DecoderRun, RunStep]] = {}
        for run, step in sorted(self.tried, key=lambda pair: self.order(pair[1])):
            chosen.setdefault((run.pipeline, planned_alike(run)), (run, step))
        return list(chosen.values())[:count]

    def order(self, step: RunStep) -> tuple[float, float]:
        return max(step.memory - self.limit, 0.0), step.seconds

    def branch(self, first: DecoderRun) -> None:
        """Plan a candidate, and compose it and all that share its plan."""
        key = planned_alike(first)
        alike = [each for _, each in self.open if planned_alike(each) == key] or [first]
        self.open = [pair for pair in self.open if planned_alike(pair[1]) != key]
        self.planned += 1
        try:
            plans = Planned(first)
        except ShardingError:  # no layout of ours
            return
        bounds = [(composed(plans.on(each), least=True).seconds, each) for each in alike]
        composed_now = 0
        for least, each in sorted(bounds, key=lambda pair: pair[0] * tedium(pair[1])):
            if least >= self.worth:
                continue
            if composed_now == MOST_COMPOSED or self.is_over():
                self.skipped = min(self.skipped, least)
                continue
            composed_now += 1
            found = composed(plans.on(each))
            self.tried.append((each, found))
            if found.memory <= self.limit:
                self.seconds = min(self.seconds, found.seconds)
