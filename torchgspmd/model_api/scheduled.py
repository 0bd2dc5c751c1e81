"""A pipeline with its loss inside: forward and backward for all microbatches at once.

A backward that begins before the last forward needs a microbatch's loss, so the forward computes
the gradients as well. Its backward multiplies them by the loss's gradient. In the graph it is one
loop over the microbatches (features/pipelines/parts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..capture.rewrites.loop_trace import (
    TracedLoop,
    of_loops_around,
    open_loop,
    outer_tensors,
    replaced,
    use_in_bodies_around,
)
from ..features.pipelines.list_scheduler import Order
from ..features.pipelines.parts import stage_head, stage_send
from ..rules.custom_ops.loops import loop_carry, loop_next, loop_row, loop_stack, loop_total

Stages = Callable[[int, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def only(stage: int, x: Tensor, other: Tensor) -> Tensor:
    """Return x [1 or devices, ...] on one device, and `other` [devices, ...] on all others."""
    like = other if other.dim() else x
    places = torch.arange(like.shape[0], device=x.device).view(-1, *[1] * (like.dim() - 1))
    return torch.where(places == stage, x, other)


@dataclass
class ScheduledStages:
    """Traces a pipeline with its loss.

    stages: from a round's arguments and the targets' rows, the results [devices, rows, ...].
    losses: from the last results and the targets of each device, [devices]. along: marks the
    layouts. names: outside values, as stages and losses name them.
    """

    stages: Stages
    losses: Loss
    along: Callable[[Tensor], Tensor]
    axis: str
    order: Order
    names: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, xs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the mean loss over microbatches [m, rows, ...]."""
        count, p = len(xs), self.order.devices

        def body(*rows: Tensor) -> tuple[tuple, list[Tensor]]:
            rows = tuple(x.contiguous() for x in rows)
            results: Sequence[Tensor] = [x.expand(p, *x.shape) for x in rows[:count]]
            for round_ in range(self.order.rounds):
                results = self.stages(round_, results, rows[count:])
            return (), [self.losses(results, [x.expand(p, *x.shape) for x in rows[count:]])]

        use_in_bodies_around([*xs, *targets])
        outer = [*outer_tensors(body, (), [*xs, *targets]).outer.values()]
        self.names = outer
        operands = of_loops_around([*xs, *targets, *outer])
        return _Run.apply(self, len(xs), len(targets), *operands)  # pyright: ignore

    def trace(
        self,
        xs: Sequence[Tensor],
        targets: Sequence[Tensor],
        outer: Sequence[Tensor],
        trained: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and its gradients for microbatches, targets and outside values.

        trained: the numbers of the targets that need a gradient.
        """
        with open_loop(len(xs[0])) as traced:
            return _Trace(self, traced, xs, targets, outer, trained).run()


@dataclass
class _Round:
    """A round's stages: values that arrive ahead and behind, arguments and results."""

    number: int
    ahead: list[Tensor]
    behind: list[Tensor]  # gradients, for values that have one
    taken: list[Tensor]
    results: list[Tensor]


class _Trace:
    def __init__(
        self,
        pipeline: ScheduledStages,
        traced: TracedLoop,
        xs: Sequence[Tensor],
        targets: Sequence[Tensor],
        outer: Sequence[Tensor],
        trained: Sequence[int],
    ) -> None:
        self.pipeline, self.places = pipeline, pipeline.order.places
        self.text = traced.text(traced.loop)
        self.microbatches, self.xs, self.outer = traced.loop.length, xs, outer
        # Integers, such as positions, travel ahead with the activations but send nothing back.
        self.with_gradient = [i for i, x in enumerate(xs) if x.is_floating_point()]
        self.rows = [loop_row(x, self.text) for x in xs]
        # Losses call view(-1) on what they take.
        self.targets = [loop_row(x, self.text).contiguous() for x in targets]
        self.last = self.places.device(self.places.stages - 1)
        self.trained, self.of_targets = trained, list[Tensor | None]()

    def carry(self, x: Tensor) -> Tensor:
        """Return a neighboring stage's message, for microbatches x."""
        zeros = x.new_zeros([self.places.devices, *x.shape[1:]])
        return loop_carry(self.pipeline.along(zeros), self.text)

    def forward(self, number: int) -> _Round:
        ahead = [self.carry(x) for x in self.xs]
        behind = [self.carry(self.xs[i]) for i in self.with_gradient]
        taken = ahead
        if not number:
            taken = [
                only(0, row.expand(self.places.devices, *row.shape), sent)
                for row, sent in zip(self.rows, ahead)
            ]
        # Detached: each round is differentiated by itself, so its gradients can be sent back.
        taken = [self.pipeline.along(x).detach() for x in taken]
        for i in self.with_gradient:
            taken[i].requires_grad_()
        results = [
            self.pipeline.along(y) for y in self.pipeline.stages(number, taken, self.targets)
        ]
        return _Round(number, ahead, behind, taken, results)

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        """Trace the body; return the loss and the gradients."""
        leaves = [x.detach().requires_grad_() for x in self.outer]
        totals: list[list[Tensor]] = [[] for _ in leaves]
        # A loop around has entries in the place of the values that stages and losses name.
        named = [*zip(self.outer, leaves), *zip(self.pipeline.names, leaves)]
        with torch.enable_grad(), replaced({id(x): leaf for x, leaf in named}):
            rounds = [self.forward(number) for number in range(self.places.rounds)]
            loss, seeds = self.loss(rounds[-1].results, leaves, totals)
            of_taken: list[Tensor] = []
            for each in reversed(rounds):
                outputs = [each.results[i] for i in self.with_gradient]
                arrived = [*map(self.pipeline.along, each.behind)]
                # The last stage's gradient comes from the loss, not from a neighbor.
                if each is rounds[-1]:
                    arrived = [only(self.last, *pair) for pair in zip(seeds, arrived)]
                    arrived = [*map(self.pipeline.along, arrived)]
                inner = [each.taken[i] for i in self.with_gradient]
                of_taken = _filled(self.gradients(outputs, inner, leaves, arrived, totals), inner)
                self.send_back(rounds, each, [*map(self.pipeline.along, of_taken)])
            for each in rounds:
                self.send_on(rounds, each)
        gradients: list[Tensor | None] = [None] * (len(self.rows) + len(self.targets))
        for i, g in zip(self.with_gradient, of_taken):
            gradients[i] = loop_stack(only(0, g, g.new_zeros([])).sum(0), self.text)
        for i, g in zip(self.trained, self.of_targets):
            if g is not None:
                alone = only(self.last, g, g.new_zeros([])).sum(0)
                gradients[len(self.rows) + i] = loop_stack(alone, self.text)
        gradients += [reduce(torch.add, terms) if terms else None for terms in totals]
        return loop_total(loss.detach(), self.text), gradients

    def loss(
        self, results: Sequence[Tensor], leaves: Sequence[Tensor], totals: list[list[Tensor]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Trace the loss for the last stage's result; return it, and its gradients."""
        heads = [self.pipeline.along(stage_head(y.detach())) for y in results]
        ends = [heads[i].requires_grad_() for i in self.with_gradient]
        # Each stage has targets of its own, so no gradient is a sum over stages in between.
        targets = [x.expand(self.places.devices, *x.shape) for x in self.targets]
        for i in self.trained:
            targets[i] = self.pipeline.along(targets[i]).detach().requires_grad_()
        losses = self.pipeline.losses(heads, targets)
        loss = only(self.last, losses, losses.new_zeros([])).sum() / self.microbatches
        inner = [*ends, *(targets[i] for i in self.trained)]
        found = self.gradients([loss], inner, leaves, None, totals)
        self.of_targets = found[len(ends) :]
        return loss, _filled(found, ends)

    def gradients(
        self,
        outputs: Sequence[Tensor],
        inner: Sequence[Tensor],
        leaves: Sequence[Tensor],
        seeds: Sequence[Tensor] | None,
        totals: list[list[Tensor]],
    ) -> list[Tensor | None]:
        """Return the gradients for values in the body, None for zero; add up the outside ones'."""
        found = torch.autograd.grad(outputs, [*inner, *leaves], seeds, allow_unused=True)
        for terms, g in zip(totals, found[len(inner) :]):
            terms += [] if g is None else [loop_total(g, self.text)]
        return [*found[: len(inner)]]

    def send_on(self, rounds: Sequence[_Round], each: _Round) -> None:
        """Send on a round's results: those from the last stage go to the next round."""
        after = rounds[(each.number + 1) % len(rounds)]
        for leaf, (y, carry) in enumerate(zip(each.results, after.ahead)):
            self._send(y.detach(), 1, [each.number, leaf], carry)

    def send_back(
        self, rounds: Sequence[_Round], each: _Round, gradients: Sequence[Tensor]
    ) -> None:
        before = rounds[(each.number - 1) % len(rounds)]
        for leaf, g, carry in zip(self.with_gradient, gradients, before.behind):
            self._send(g, -1, [each.number, leaf], carry)

    def _send(self, x: Tensor, shift: int, place: list[int], carry: Tensor) -> None:
        sent = stage_send(x, shift, place, self.pipeline.axis, str(self.pipeline.order))
        loop_next(sent, sent, carry, self.text)


def _filled(gradients: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if g is None else g for x, g in zip(values, gradients)]


class _Run(torch.autograd.Function):
    """(microbatches, targets, outside values) -> the loss, whose gradients are known then."""

    @staticmethod
    def forward(
        ctx: Any, pipeline: ScheduledStages, xs: int, targets: int, *tensors: Tensor
    ) -> Tensor:
        values = tensors[:xs], tensors[xs : xs + targets], tensors[xs + targets :]
        needed = ctx.needs_input_grad[3:]
        trained = [i for i, need in enumerate(needed[xs : xs + targets]) if need]
        loss, gradients = pipeline.trace(*values, trained)
        saved = [g if need else None for g, need in zip(gradients, needed)]
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        # The gradients are those for a seed of one; the loss is a scalar, so a product is enough.
        results = [None if g is None else g * grads[0] for g in ctx.saved_tensors]
        return None, None, None, *results
