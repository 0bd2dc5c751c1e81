"""Checkpoints in loops whose function has loops: the backward computes these in its own loop.

torch.utils.checkpoint runs the function a second time when the backward reads a saved value. By
then the trace is in no loop, or already in another backward. So the region notes the loops around
it, and its last operation reads a saved value. The second trace thus begins before any loop's
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...capture.rewrites.loop_trace import TracedLoop, loops_around, note_results, repeating


def recomputed(function: Callable[..., Sequence[Tensor]], *args: object) -> Sequence[Tensor]:
    """Return a function's results; the backward computes them again."""
    with set_checkpoint_early_stop(False):  # a loop is traced to its end
        return checkpoint(_Region(function), *args, use_reentrant=False)  # pyright: ignore


class _Region:
    """A function that is traced twice.

    In the second trace, a loop walks the same rows as in the first: they share random seeds.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]]) -> None:
        self.function, self.around = function, loops_around()
        self.loops: list[TracedLoop] = []  # of the first time
        self.remaining: Iterator[TracedLoop] | None = None  # in the second

    def first(self, loop: TracedLoop) -> TracedLoop:
        """Return the first trace's loop that a new loop repeats, or the new loop."""
        if self.remaining is not None:
            return next(self.remaining)
        self.loops.append(loop)
        return loop

    def __call__(self, *args: object) -> Sequence[Tensor]:
        """Trace the function, for the first time or again."""
        with repeating(self.around, self.first):
            results = self.function(*args)
        self.remaining = iter(self.loops)
        results = _ReadFirst.apply(*results)
        note_results(results)  # pyright: ignore
        return results  # pyright: ignore


class _ReadFirst(torch.autograd.Function):
    """The identity; its backward reads the saved value."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(values[0])
        ctx.mark_non_differentiable(*(x for x in values if not x.is_floating_point()))
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        assert ctx.saved_tensors
        return grads
