"""torch.autograd.Function in the stages of a pipeline: torch.vmap takes those that have a rule.

    forward(ctx, x)             the form that most libraries have; torch.vmap refuses it
    forward(x), setup_context   the form for torch.func, with generate_vmap_rule or its own vmap

A Function of the first form becomes one of the second that runs it. Saved tensors that are neither
arguments nor results become further results.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...errors import ShardingError
from ..traced_values import is_vectorizing


def mapping_apply(before: Any) -> Any:
    """Return Function.apply, which gives a Function a rule for torch.vmap."""

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if is_vectorizing() and cls.vmap is torch.autograd.Function.vmap:
            if cls.setup_context is torch.autograd.Function.setup_context:
                return _Mapped(cls)(*args)
            if not cls.generate_vmap_rule:
                cls = type(cls.__name__, (cls,), {"generate_vmap_rule": True})
        return before.__func__(cls, *args, **kwargs)

    return classmethod(apply)


class _Context(SimpleNamespace):
    """A ctx that keeps what forward saves."""

    saved: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: gradients of zero are zeros here."""

    def mark_non_differentiable(self, *results: Tensor) -> None:
        """Do nothing: backward gets zeros for these."""

    def mark_dirty(self, *arguments: Tensor) -> None:
        raise ShardingError.here(
            "a torch.autograd.Function changes its arguments in place in a stage of a pipeline",
            why="torch.vmap maps it over the stages",
            fix="return new tensors from its forward",
        )


class _Mapped:
    """Runs a Function whose forward takes a ctx."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function, self.count, self.is_tuple = function, 0, False
        self.places: list[tuple[bool, int]] = []  # of saved tensors: (an argument, its number)
        self.context = _Context()

    def __call__(self, *args: Any) -> Any:
        members = {
            "generate_vmap_rule": True,
            "forward": staticmethod(self.forward),
            "setup_context": staticmethod(self.setup_context),
            "backward": staticmethod(self.backward),
        }
        mapped = type(self.function.__name__, (torch.autograd.Function,), members)
        results = mapped.apply(*args)
        return tuple(results[: self.count]) if self.is_tuple else results[0]

    def forward(self, *args: Any) -> tuple[Any, ...]:
        self.context = _Context(needs_input_grad=tuple(isinstance(x, Tensor) for x in args))
        found: Any = self.function.forward(self.context, *args)
        self.is_tuple = isinstance(found, tuple)
        results = [*found] if self.is_tuple else [found]
        self.count, self.places = len(results), []
        for x in self.context.saved:
            number = _number(x, args)
            self.places.append((True, number) if number >= 0 else (False, _number(x, results)))
            if self.places[-1][1] < 0:
                self.places[-1] = False, len(results)
                results.append(x)
        return tuple(results)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.save_for_backward(*((inputs if own else output)[i] for own, i in self.places))

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        own = {name: value for name, value in vars(self.context).items() if name != "saved"}
        own |= {"saved_tensors": ctx.saved_tensors, "needs_input_grad": ctx.needs_input_grad}
        return self.function.backward(SimpleNamespace(**own), *gradients[: self.count])


def _number(x: Tensor, values: Sequence[object]) -> int:
    """Return where a tensor stands among values, -1 if it does not."""
    return next((i for i, value in enumerate(values) if value is x), -1)
