"""A pipeline whose loss is a part of it: forward and backward of all microbatches at once.

A backward that begins before the last forward needs the loss of a microbatch, so the forward of
`scheduled` computes the gradients as well. Its backward multiplies them by the gradient of the
loss. In the graph it is one loop over the microbatches (custom_ops/stages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..capture.rewrites.loop_trace import TracedLoop, open_loop, outer_tensors, replaced
from ..custom_ops.loops import loop_carry, loop_next, loop_row, loop_stack, loop_total
from ..custom_ops.stages import stage_head, stage_send

Stages = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


class ScheduledStages:
    """The trace of a pipeline with its loss.

    stages: returns what all stages return, [stages, rows, ...], of what they take. losses: returns
    [stages], of that and of the rows of the targets. along: marks what stages have. order: as text.
    """

    def __init__(
        self, stages: Stages, losses: Loss, along: Callable[[Tensor], Tensor], axis: str, order: str
    ) -> None:
        self.stages, self.losses, self.along = stages, losses, along
        self.axis, self.order = axis, order

    def __call__(self, p: int, xs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the mean loss of microbatches [m, rows, ...] in p stages."""
        count = len(xs)

        def body(*rows: Tensor) -> tuple[tuple, list[Tensor]]:
            results = self.stages([x.expand(p, *x.shape) for x in rows[:count]])
            return (), [self.losses(results, rows[count:])]

        outer = outer_tensors(body, (), [*xs, *targets]).outer.values()
        return _Run.apply(self, p, len(xs), len(targets), *xs, *targets, *outer)  # pyright: ignore

    def trace(
        self, p: int, xs: Sequence[Tensor], targets: Sequence[Tensor], outer: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and its gradients of the microbatches and of values of outside."""
        with open_loop(len(xs[0])) as traced:
            return _Trace(self, traced, p, xs, targets, outer).run()


class _Trace:
    """One trace of the loop's body."""

    def __init__(
        self,
        pipeline: ScheduledStages,
        traced: TracedLoop,
        p: int,
        xs: Sequence[Tensor],
        targets: Sequence[Tensor],
        outer: Sequence[Tensor],
    ) -> None:
        self.pipeline, self.text, self.p = pipeline, traced.text(traced.loop), p
        self.microbatches = traced.loop.length
        self.outer = outer
        self.rows = [loop_row(x, self.text) for x in xs]
        self.targets = [loop_row(x, self.text) for x in targets]
        self.ahead = [self.carry(x) for x in xs]
        self.behind = {i: self.carry(x) for i, x in enumerate(xs) if x.is_floating_point()}

    def carry(self, x: Tensor) -> Tensor:
        """Return what a neighboring stage has sent, for microbatches x."""
        zeros = x.new_zeros([self.p, *x.shape[1:]])
        return loop_carry(self.pipeline.along(zeros), self.text)

    def only(self, stage: int, x: Tensor, other: Tensor) -> Tensor:
        """Return x [stages, ...] on one stage, and `other` on all others."""
        places = torch.arange(self.p, device=x.device).view(-1, *[1] * (x.dim() - 1))
        return torch.where(places == stage, x, other)

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        """Trace the body; return the loss and the gradients."""
        p, along, last = self.p, self.pipeline.along, self.p - 1
        leaves = [x.detach().requires_grad_() for x in self.outer]
        table = {id(x): leaf for x, leaf in zip(self.outer, leaves)}
        taken = [
            along(self.only(0, row.expand(p, *row.shape), sent)).detach()
            for row, sent in zip(self.rows, self.ahead)
        ]
        inner = [taken[i].requires_grad_() for i in self.behind]
        with torch.enable_grad(), replaced(table):
            results = [along(y) for y in self.pipeline.stages(taken)]
            heads = [along(stage_head(y.detach())) for y in results]
            ends = [heads[i].requires_grad_() for i in self.behind]
            losses = self.pipeline.losses(heads, self.targets)
            loss = self.only(last, losses, losses.new_zeros([])).sum() / self.microbatches
            of_ends, of_loss = self.gradients([loss], ends, leaves, None)
            seeds = [
                self.only(last, torch.zeros_like(end) if g is None else g, sent)
                for end, g, sent in zip(ends, of_ends, self.behind.values())
            ]
            outputs = [results[i] for i in self.behind]
            of_inner, of_stages = self.gradients(outputs, inner, leaves, [*map(along, seeds)])
        for y, carry in zip(results, self.ahead):
            self.send(y.detach(), 1, carry)
        gradients: dict[int, Tensor] = {}
        for (i, carry), x, g in zip(self.behind.items(), inner, of_inner):
            g = along(torch.zeros_like(x) if g is None else g)
            self.send(g, -1, carry)
            gradients[i] = loop_stack(self.only(0, g, g.new_zeros([])).sum(0), self.text)
        totals = [self.total(*pair) for pair in zip(of_loss, of_stages)]
        return loop_total(loss.detach(), self.text), [
            *(gradients.get(i) for i in range(len(self.rows))),
            *[None] * len(self.targets),
            *totals,
        ]

    def gradients(
        self,
        outputs: Sequence[Tensor],
        inner: Sequence[Tensor],
        leaves: Sequence[Tensor],
        seeds: Sequence[Tensor] | None,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of what stages take, and of values of outside."""
        found = torch.autograd.grad(outputs, [*inner, *leaves], seeds, allow_unused=True)
        return [*found[: len(inner)]], [*found[len(inner) :]]

    def send(self, x: Tensor, shift: int, carry: Tensor) -> None:
        """Send a value to a neighboring stage."""
        sent = stage_send(x, shift, self.pipeline.axis, self.pipeline.order)
        loop_next(sent, sent, carry, self.text)

    def total(self, *terms: Tensor | None) -> Tensor | None:
        """Return the sum of gradients over all microbatches."""
        sums = [loop_total(x, self.text) for x in terms if x is not None]
        return reduce(torch.add, sums) if sums else None


class _Run(torch.autograd.Function):
    """(microbatches, targets, values of outside) -> the loss, whose gradients are known then."""

    @staticmethod
    def forward(
        ctx: Any, pipeline: ScheduledStages, p: int, xs: int, targets: int, *tensors: Tensor
    ) -> Tensor:
        values = tensors[:xs], tensors[xs : xs + targets], tensors[xs + targets :]
        loss, gradients = pipeline.trace(p, *values)
        needed = ctx.needs_input_grad[4:]
        saved = [g if need else None for g, need in zip(gradients, needed)]
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        results = [None if g is None else g * grads[0] for g in ctx.saved_tensors]
        return None, None, None, None, *results
