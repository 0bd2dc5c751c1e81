"""The fastest layout of a decoder's run: branch and bound over the degrees of parallelism.

A candidate has sizes for data, tensor, stages, virtual stages, context, experts and FSDP, and the
rows of a microbatch. Those that differ in stages and microbatches alone share a plan, so that
trying one tries them all. Next comes the candidate that is expected to be fastest: its lower bound,
times how far above their bounds the steps of the most similar plan were. A candidate whose bound is
above the best step is never planned. Time or patience ends the search. The least bound of those
that were not tried then says how far the best one is from the best layout in this space at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...errors import ShardingError
from .run_bounds import Bound, Reference
from .run_programs import Programs
from .run_steps import Planned, RunStep, composed
from .runs import DecoderRun

MOST = {"tensor": 8, "context": 8, "pipeline": 64, "rounds": 16, "rows": 8, "expert": 256}
MIN_GAIN = 0.002  # of a step: a candidate whose bound promises less is not tried
PATIENCE = 6  # plans one after another without such a gain, where time has an end


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
    for rounds in range(2, min(MOST["rounds"], (layers + 2) // stages) + 1):
        chunks = stages * rounds
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
    """Return how far above its bound a candidate's step is expected, before any is known.

    Rings beside experts take long to plan, so they come last.
    """
    rings = math.log2(run.tensor * run.context)
    return 1 + (1.0 if run.config.experts else 0.03) * rings + 0.02 * (run.fsdp > 1)


def distance(one: DecoderRun, other: DecoderRun) -> float:
    """Return how different the exchanges and kernels of two candidates are."""
    weights = {"tensor": 4, "context": 4, "expert": 2, "micro_batch": 1, "replicas": 0.1}
    ratios = {name: getattr(one, name) / getattr(other, name) for name in weights}
    sizes = sum(weight * abs(math.log2(ratios[name])) for name, weight in weights.items())
    return sizes + 4 * ((one.fsdp > 1) != (other.fsdp > 1))


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
class LikeRuns:
    """Candidates that share a plan: the one to plan, then the others by their bounds.

    excess: expected steps over bounds; distance: from the plan that says so.
    """

    bounds: list[tuple[float, DecoderRun]]
    excess: float
    distance: float = math.inf

    @property
    def least(self) -> float:
        return min(bound for bound, _ in self.bounds)

    @property
    def first(self) -> DecoderRun:
        return self.bounds[0][1]

    @property
    def expected(self) -> float:
        return self.least * self.excess

    def learn(self, other: LikeRuns, excess: float) -> None:
        """Expect the excess of a tried group, if none that was tried is more similar."""
        apart = distance(self.first, other.first)
        if apart < self.distance:
            self.distance = apart
            self.excess = excess * handicap(self.first) / handicap(other.first)


@dataclass
class RunSearch:
    """A search. end: of CPU seconds (time.process_time). limit: bytes of a device.

    known: a layout to try first, also one that is no candidate. open: groups of candidates that
    were not tried. tried: layouts and their steps. planned: how many plans were made.
    """

    run: DecoderRun
    limit: float
    end: float
    known: DecoderRun | None = None
    open: list[LikeRuns] = field(default_factory=list)
    tried: list[tuple[DecoderRun, RunStep]] = field(default_factory=list)
    space: int = 0
    planned: int = 0
    seconds: float = math.inf  # of the best that fits
    pace: float = 0.0  # CPU seconds of a plan without rings, at most
    programs: Programs = field(default_factory=Programs)

    def run_until_end(self) -> None:
        """Try candidates until none can be better, or time or patience ends."""
        smallest = self.bound_all()
        misses = 0
        while self.open and (misses < PATIENCE or self.end == math.inf):
            group = min(self.open, key=lambda group: group.expected)
            if self.tried and self.is_over(self.pace * pieces(group.first)):
                return
            before, begin = self.worth, time.process_time()
            self.open.remove(group)
            self.branch(group)
            spent = time.process_time() - begin
            self.pace = max(self.pace, spent / pieces(group.first))
            misses = 0 if self.seconds < before else misses + 1
            for each in self.open:
                each.bounds = [pair for pair in each.bounds if pair[0] < self.worth]
            self.open = [each for each in self.open if each.bounds]
        if not self.tried and smallest is not None:  # nothing fits
            self.branch(LikeRuns([(0.0, smallest)], 1.0))

    def bound_all(self) -> DecoderRun | None:
        """Open all candidates that may fit; return the one that needs the least memory."""
        reference, groups = Reference(self.run, self.programs), dict[object, LikeRuns]()
        small: list[tuple[float, DecoderRun]] = []
        known = self.known and replace(self.known, fsdp=self.known.fsdp * (self.known.fsdp > 1))
        every = [*candidates(self.run)]
        for each in every if known is None or known in every else [*every, known]:
            self.space += 1
            least = composed(Bound(reference, each))
            small.append((least.memory, each))
            if least.memory <= self.limit:
                group = groups.setdefault(planned_alike(each), LikeRuns([], handicap(each)))
                group.bounds.append((least.seconds, each))
        for group in groups.values():
            group.bounds.sort(key=lambda pair: (pair[1] != known, pair[0]))
            group.excess *= group.first != known
        self.open = [*groups.values()]
        return min(small, key=lambda pair: pair[0])[1] if small else None

    @property
    def worth(self) -> float:
        """Return the seconds that a candidate's bound has to be below."""
        return (1 - MIN_GAIN) * self.seconds

    @property
    def bound(self) -> float:
        """Return seconds that no layout in the space is below."""
        return min([self.worth, *(group.least for group in self.open)])

    def is_over(self, reserve: float = 0.0) -> bool:
        """Return whether there is no time for so many seconds more."""
        return time.process_time() + reserve > self.end

    def best(self, count: int) -> list[tuple[DecoderRun, RunStep]]:
        """Return the best layouts that were tried, one for each degree of stages and plan."""
        chosen: dict[object, tuple[DecoderRun, RunStep]] = {}
        for run, step in sorted(self.tried, key=lambda pair: self.order(pair[1])):
            chosen.setdefault((run.pipeline, planned_alike(run)), (run, step))
        return list(chosen.values())[:count]

    def order(self, step: RunStep) -> tuple[float, float]:
        return max(step.memory - self.limit, 0.0), step.seconds

    def branch(self, group: LikeRuns) -> None:
        """Plan a candidate, and compose all that share its plan."""
        self.planned += 1
        try:
            plans = Planned(group.first, self.programs)
        except ShardingError:  # no layout of ours
            return
        excesses = []
        for least, each in group.bounds:
            found = composed(plans.on(each))
            if found.seconds < least * (1 - 1e-9):
                continue  # programs that differ in more than a layer: it has no estimate
            self.tried.append((each, found))
            excesses.append(found.seconds / least if least else 1.0)
            if found.memory <= self.limit:
                self.seconds = min(self.seconds, found.seconds)
        for other in self.open if excesses else ():
            other.learn(group, min(excesses))
