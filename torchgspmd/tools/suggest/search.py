"""The search: mesh shapes, then marks group by group, while a step gets shorter.

A mesh has two axes: DATA for the batch, MODEL for weights. Of a model with experts, EXPERT may
divide the batch too. Each mesh starts without marks, and with weights of like layers along MODEL
(tensor parallelism), with and without layer outputs along MODEL (sequence parallelism) and all
parameters along DATA (ZeRO-3). On the best meshes, each group of equal parameters is tried along
each dimension on MODEL. So are the arguments (image rows, the sequence), the outputs of like
layers, and matrix stacks (experts) along DATA by themselves. A change stays if it makes the step
shorter, or a program that needs too much memory smaller. A plan that needs too much memory gathers
weights again for the backward, then divides the batch, then computes layers again. The best are
tried in stages, to which the axes for the batch and for weights give devices. Propagation and
partition decide all else, so few marks say much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...errors import ShardingError
from ...fx_passes.units import size_text, time_text
from ...layout.mesh import Mesh
from . import candidates
from .judge import Judge
from .proposal import STAGE, Marks, Proposal, Savings, batch_axes
from .step_numbers import Numbers

MIN_GAIN = 0.005  # in time, or in bytes at equal time: a change that brings less is left out
POOR = 1.1  # times a pass's best time: a slower change is not tried again
HOPELESS = 1.5  # times the best time or memory: a mesh that starts above is not searched
PAST = 2  # meshes one after the other that are hopeless: larger MODEL axes are not tried
BEST = 5
STAGED = 2  # of the best proposals: their layers are put into stages
FRUGAL = 1.25  # times the best time: among those below, the one that sends least is shown


@dataclass
class Search:
    """The proposals that were tried, by mesh, marks, and number of microbatches."""

    judge: Judge
    limit: float
    deadline: float  # for the search
    recheck: float = math.inf  # for planning the best again
    end: float = math.inf
    tried: dict[tuple[Mesh, Marks, int], Proposal] = field(default_factory=dict)
    microbatches: int = 1
    tight: set[Mesh] = field(default_factory=set)  # on which weights with ZeRO are gathered again
    unhelpful: set[Mesh] = field(default_factory=set)  # on which recomputing is too slow
    leader: Proposal | None = None  # the best up to now

    def progress(self) -> str:
        plans = f"{self.judge.counts['plans']} plans"
        if (best := self.leader) is None:
            return plans
        return f"{plans}; best: {best.mesh}, {time_text(best.seconds)}, {size_text(best.memory)}"

    def run(self, meshes: Sequence[Mesh]) -> None:
        """Search; where nothing fits, search again with the fewest microbatches that may fit."""
        self._search(meshes)
        if not self._fits():
            for count in candidates.divisions(self.judge.rows):
                if self.is_over() or self._fits_in(count):
                    break
            if self.microbatches > 1:
                self._search(meshes)
        # Leave the best proposals, planned again with one layer more.
        keys = self._best_keys()
        if self.judge.layers.length > self.judge.first + 1:
            self.judge.first += 1
            self.tried = {}
            self.tight.clear()
            self.unhelpful.clear()
            for key in keys:
                if not self.tried or time.process_time() < self.recheck:
                    self.tried[key] = self._plan(*key)
        self.deadline = (time.process_time() + self.end) / 2
        self._put_into_stages(self._best_keys()[:STAGED])
        self.deadline = self.end
        self._refine()
        self._enlarge()

    def _fits(self) -> bool:
        return self.best()[0].memory <= self.limit

    def _fits_in(self, count: int) -> bool:
        """Try the smallest proposals with so many microbatches; return whether one fits."""
        if not self.judge.can_take(self.judge.rows // count):
            return False
        before, self.microbatches = self.microbatches, count
        smallest = sorted(self.tried, key=lambda key: self.tried[key].memory)[:BEST]
        for mesh, marks, _ in smallest:
            if self.is_divisible(mesh, count) and not self.is_over():
                self.propose(mesh, marks)
        if not self._fits():
            self.microbatches = before
        self.tight.clear()
        self.unhelpful.clear()
        return self._fits()

    def is_divisible(self, mesh: Mesh, count: int) -> bool:
        return self.judge.rows // count % mesh.count(batch_axes(mesh)) == 0

    def _search(self, meshes: Sequence[Mesh]) -> None:
        """Search every mesh from few marks; then the best, mark by mark."""
        if self.microbatches > 1:
            meshes = [mesh for mesh in meshes if self.is_divisible(mesh, self.microbatches)]
        # On the others the batch is whole on all devices, at least at first.
        meshes = sorted(meshes, key=lambda mesh: not self.is_divisible(mesh, self.microbatches))
        found: dict[Mesh, Marks] = {}
        marks = Marks()
        for mesh in meshes:
            if self.is_over() or self._is_past(list(found.items())):
                break
            starts = candidates.starts(self.judge, mesh)
            found[mesh] = self._best_start(mesh, [*starts, marks])
            if len(starts) == 1 and not marks.model and not marks.arguments:
                marks = found[mesh] = self._descend(mesh, found[mesh])
        for mesh in sorted(found, key=lambda mesh: self.score(mesh, found[mesh])):
            if not self.is_over() and not self._is_hopeless(self.propose(mesh, found[mesh])):
                marks = self._descend(mesh, self._best_start(mesh, [found[mesh], marks]))

    def _is_past(self, found: Sequence[tuple[Mesh, Marks]]) -> bool:
        """Return whether the last meshes are hopeless, and each worse than the one before."""
        last = [self.propose(*pair) for pair in found[-PAST:]]
        scores = [self.order(each) for each in last]
        return len(last) == PAST and all(map(self._is_hopeless, last)) and scores == sorted(scores)

    def _refine(self) -> None:
        """Try other ways to save memory, for the best proposals that save some at a cost."""
        for key in self._best_keys():
            mesh, marks, _ = key
            proposal = self.tried[key]
            for savings in self._others(key):
                if self.is_over():
                    return
                self._improve(key, self._proposal(mesh, marks, savings))
            if proposal.savings.recomputed:
                self._solve(key, proposal.savings)

    def _solve(self, key: tuple[Mesh, Marks, int], savings: Savings) -> None:
        """Recompute the fastest layers, or submodules, if HiGHS is there."""
        mesh, marks, _ = key
        solved = self.judge.best_recomputed(mesh, marks, savings, self.limit)
        if solved is not None:
            proposal = self._proposal(mesh, marks, solved[0])
            self._improve(key, replace(proposal, recompute_bound=solved[1]))

    def _improve(self, key: tuple[Mesh, Marks, int], other: Proposal) -> None:
        if self.order(other) <= self.order(self.tried[key]):
            self.tried[key] = other

    def _others(self, key: tuple[Mesh, Marks, int]) -> Iterator[Savings]:
        """Yield ways with less work: more microbatches, weights that are not gathered again."""
        proposal = self.tried[key]
        savings = proposal.savings
        if savings.regather != "auto":
            yield replace(savings, regather="auto")
        if savings.recomputed:
            whole = replace(savings, recomputed=(), microbatches=key[2])
            yield from self._divided(key[0], whole, self.judge.numbers(key[0], key[1], whole))

    def _enlarge(self) -> None:
        """Find how large a batch may be for the best proposal."""
        mesh, marks, count = self._best_keys()[0]
        best = self.tried[mesh, marks, count]
        if best.memory <= self.limit and best.savings.microbatches == 1 and not self.is_over():
            rows = self.judge.most_rows(mesh, marks, best.savings, self.limit)
            self.tried[mesh, marks, count] = replace(best, largest_batch=rows)

    def _is_hopeless(self, proposal: Proposal) -> bool:
        best = self.best()[0]
        return proposal.seconds > HOPELESS * best.seconds or proposal.memory > HOPELESS * max(
            self.limit, best.memory
        )

    def is_over(self) -> bool:
        """Return whether there is no time left, and something to return."""
        return bool(self.tried) and time.process_time() > self.deadline

    def _best_start(self, mesh: Mesh, starts: Sequence[Marks]) -> Marks:
        """Return the best start, with or without ZeRO."""
        with_zero, without = ([replace(s, zero=zero) for s in starts] for zero in (True, False))
        chosen: list[Marks] = []
        for marks in dict.fromkeys(s.on(mesh) for s in (*with_zero, *starts, *without)):
            # Weights that DATA does not divide may need too much memory by themselves.
            is_large = not marks.zero and self.judge.least_memory(mesh) > self.limit
            if not chosen or not is_large or marks.stacked:
                chosen.append(marks)
        return min(chosen, key=lambda marks: self.score(mesh, marks))

    def _descend(self, mesh: Mesh, best: Marks) -> Marks:
        """Return the marks that single changes lead to, each to a shorter step or fewer bytes."""
        settled: set[Marks] = set()
        poor: set[int] = set()  # numbers of changes that are not tried again
        while best not in settled:
            settled.add(best)
            steps: dict[int, float] = {}
            for number, change in enumerate(candidates.changes(self.judge, mesh)):
                if number in poor or change(best) == best:
                    continue
                if self.is_over():
                    return best
                excess, step = self.score(mesh, best)
                changed = self.score(mesh, change(best))
                steps[number] = changed[1]
                sent = [self.propose(mesh, marks).sent_bytes for marks in (change(best), best)]
                lighter = changed <= (excess, step) and sent[0] < (1 - MIN_GAIN) * sent[1]
                if changed < (excess, step * (1 - MIN_GAIN)) or lighter:
                    best = change(best)
            excess, step = self.score(mesh, best)
            if not excess:
                poor |= {number for number, each in steps.items() if each > POOR * step}
        return best

    # ------------------------------------------------------------------------------------- stages

    def _put_into_stages(self, keys: Sequence[tuple[Mesh, Marks, int]]) -> None:
        """Try stages with the meshes and marks of these proposals, with ZeRO and without."""
        if self.judge.has_loss and self.judge.stages.may_exist:
            for mesh, marks, _ in keys:
                for zero in dict.fromkeys([False, marks.zero]):
                    self._try_stages(mesh, replace(marks, zero=zero, outputs=()))

    def _try_stages(self, mesh: Mesh, marks: Marks) -> None:
        """Try few stages and then more, until a step gets longer."""
        best = math.inf
        for staged in candidates.staged(mesh, self.judge.layers.length):
            if not marks.zero and self.judge.least_memory(staged) > self.limit:
                continue
            found = min(self._staged(staged, marks.on(staged)), default=None)
            if self.is_over() or found is None or found[1] > best:
                return
            best = math.inf if found[0] else found[1]

    def _staged(self, mesh: Mesh, marks: Marks) -> Iterator[tuple[float, float]]:
        """Try numbers of microbatches on a mesh with stages; yield each proposal's sort key."""
        every = (("", self.judge.layers.length),)
        for count in candidates.of_stages(mesh, self.judge.rows):
            # The layers are computed again if nothing fits otherwise.
            for recomputed in ((), every) if self.is_divisible(mesh, count) else ():
                if self.is_over():
                    return
                try:
                    proposal = self._planned(mesh, marks, Savings("auto", recomputed, count))
                except ShardingError:  # these layers cannot be stages
                    return
                self.tried[mesh, marks, count] = proposal
                yield self.order(proposal)
                if proposal.memory <= self.limit:
                    break

    # -------------------------------------------------------------------------------- proposals

    def score(self, mesh: Mesh, marks: Marks) -> tuple[float, float]:
        return self.order(self.propose(mesh, marks))

    def order(self, proposal: Proposal) -> tuple[float, float]:
        return max(proposal.memory - self.limit, 0.0), proposal.seconds

    def propose(self, mesh: Mesh, marks: Marks) -> Proposal:
        """Return the proposal for marks on a mesh, planned once."""
        key = mesh, marks, self.microbatches
        if key not in self.tried:
            new = self.tried[key] = self._plan(*key)
            self.leader = min(self.leader or new, new, key=self.order)
        return self.tried[key]

    def _plan(self, mesh: Mesh, marks: Marks, microbatches: int) -> Proposal:
        """Plan marks on a mesh; save memory where it is too little, at the least cost."""
        in_calls = not self.judge.has_loss
        ways = [Savings("auto", (), microbatches, in_calls)]
        if marks.zero:
            ways.append(replace(ways[0], regather="always"))
        if marks.zero and mesh in self.tight:
            ways = ways[1:]
        tried = []
        for savings in ways:
            tried.append(self._proposal(mesh, marks, savings))
            if tried[-1].memory <= self.limit:
                return tried[-1]
            if len(ways) > 1:
                self.tight.add(mesh)
        kept = self.judge.numbers(mesh, marks, ways[-1])
        if kept.memory - kept.saved <= self.limit and not self._is_slower(tried[0]):
            tried += self._smaller(mesh, marks, ways[-1], kept)
        return min(tried, key=self.order)

    def _smaller(
        self, mesh: Mesh, marks: Marks, savings: Savings, kept: Numbers
    ) -> Iterator[Proposal]:
        """Yield proposals with less memory: the batch divided, and if that is slow, recomputed."""
        divided = next(self._divided(mesh, savings, kept), None)
        if divided is not None:
            proposal = self._proposal(mesh, marks, divided)
            yield proposal
            if proposal.memory <= self.limit and proposal.seconds <= POOR * kept.seconds:
                return
        if mesh not in self.unhelpful:
            savings = self.judge.fewest_recomputed(mesh, marks, savings, self.limit)
            proposal = self._proposal(mesh, marks, savings)
            if self._is_slower(proposal, POOR):
                self.unhelpful.add(mesh)
            yield proposal

    def _divided(self, mesh: Mesh, savings: Savings, kept: Numbers) -> Iterator[Savings]:
        """Yield savings with more microbatches, the fewest first that may fit.

        kept: the numbers of a plan with `savings` that recomputes nothing.
        """
        now = savings.microbatches
        for count in candidates.divisions(self.judge.rows):
            if count > now and self.is_divisible(mesh, count):
                # About as many bytes are kept for a microbatch as it has rows; gradients add up.
                more = kept.gradients if now == 1 else 0.0
                least = kept.memory + more - kept.saved * (1 - now / count)
                # Last: another number of rows is another capture.
                if least <= self.limit and self.judge.can_take(self.judge.rows // count):
                    in_calls = not self.judge.has_loss
                    yield replace(savings, recomputed=(), microbatches=count, in_calls=in_calls)

    def _is_slower(self, proposal: Proposal, ratio: float = 1.0) -> bool:
        """Return whether one that fits is faster, so many times: recomputing makes none faster."""
        fitting = (each.seconds for each in self.tried.values() if each.memory <= self.limit)
        return ratio * min(fitting, default=math.inf) < proposal.seconds

    def _proposal(self, mesh: Mesh, marks: Marks, savings: Savings) -> Proposal:
        """Return a proposal, its microbatches in one call or in several, whichever is better."""
        ways = dict.fromkeys([savings, replace(savings, in_calls=savings.microbatches > 1)])
        return min((self._planned(mesh, marks, way) for way in ways), key=self.order)

    def _planned(self, mesh: Mesh, marks: Marks, savings: Savings) -> Proposal:
        """Return the proposal for marks on a mesh that saves memory so."""
        judge, speed = self.judge, self.judge.hardware
        numbers, flops = judge.numbers(mesh, marks, savings), judge.flops / mesh.size
        in_specs = judge.call_specs(mesh, marks, judge.rows // savings.calls)
        is_staged, total = STAGE in mesh.names, judge.layers.length
        is_listed = bool(savings.recomputed) and not is_staged  # a pipeline computes its own again
        return Proposal(
            mesh=mesh,
            marks=judge.marks(mesh, marks, savings),
            in_specs=in_specs,
            hardware=speed,
            seconds=numbers.seconds,
            memory=numbers.memory,
            sent_bytes=numbers.sent_bytes,
            mfu=flops / (numbers.seconds * speed.rate(judge.itemsize)),
            bound=speed.product_seconds(flops, judge.itemsize),
            dtype=judge.dtype,
            kernels=judge.kernels,
            layers=None if is_staged or not judge.layers.alike else (judge.first + 1, total),
            savings=savings,
            dtype_options=judge.options.precision(),
            recomputed=judge.recomputable.code(savings.recomputed) if is_listed else "",
            staged=judge.stages.path if is_staged else "",
            limit=self.limit,
            keeps_results=judge.returns_more,
        )

    def _best_keys(self) -> list[tuple[Mesh, Marks, int]]:
        chosen: dict[tuple[Mesh, bool], tuple[Mesh, Marks, int]] = {}
        for key in sorted(self.tried, key=lambda key: self.order(self.tried[key])):
            chosen.setdefault((key[0], key[1].zero), key)
        keys = list(chosen.values())[:BEST]
        frugal = self._frugal_key(keys[0])
        return keys if frugal in keys else [*keys[: BEST - 1], frugal]

    def _frugal_key(self, best: tuple[Mesh, Marks, int]) -> tuple[Mesh, Marks, int]:
        """Return the proposal that sends least among those little slower than the best."""
        excess, seconds = self.order(self.tried[best])
        close = [
            key
            for key, each in self.tried.items()
            if self.order(each) <= (excess, FRUGAL * seconds)
        ]
        return min(close, key=lambda key: (self.tried[key].sent_bytes, self.order(self.tried[key])))

    def best(self) -> list[Proposal]:
        """Return the best: one for each mesh, with and without ZeRO, and one that sends least."""
        return sorted((self.tried[key] for key in self._best_keys()), key=self.order)
