"""What autograd is told of a program: which inputs and results have no gradient; and that gradients
cannot be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import ShardingError, user_line


def apart(outputs: Sequence[Tensor], differentiable: Sequence[int]) -> Sequence[Tensor]:
    """Outputs of which those without a gradient are tensors of their own, such as y.detach() beside
    y.
    """
    if len(outputs) == len(differentiable):
        return outputs
    taken = {id(outputs[i]) for i in differentiable}
    return [
        y.detach() if id(y) in taken and i not in differentiable else y
        for i, y in enumerate(outputs)
    ]


def without_history(inputs: list[Tensor], places: Sequence[int]) -> list[Tensor]:
    """The inputs; those in these places, of which no gradient is computed, without what they come
    of: no backward is to go on there (`self.hidden.detach()` in forward).
    """
    for i in places:
        if inputs[i].requires_grad:
            inputs[i] = inputs[i].detach()
    return inputs


def saved_for(ctx: Any, parts: dict[int, int], given: set[int]) -> Sequence[Tensor]:
    """What forward saved, for a backward from these outputs. parts: of outputs (Captured.parts). As
    long as there was none from some part it is kept: in eager PyTorch what such outputs need is not
    freed either.
    """
    if not parts:
        return ctx.saved_tensors
    saved, before = getattr(ctx, "kept", None) or (ctx.saved_tensors, set())
    used = before | {parts[i] for i in given}
    ctx.kept = None if used == {*parts.values()} else (saved, used)
    return saved


def once(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients that a backward with create_graph=True found. Its program is not
    differentiable: what used them as if it was would lose a term.
    """
    found = iter(
        _Once.apply(torch.zeros((), requires_grad=True), *(g for g in gradients if g is not None))
    )
    return [None if g is None else next(found) for g in gradients]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.detach() for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise ShardingError(
            "a gradient of a sharded module is differentiated again",
            where=user_line(),
            why="its backward is a program, of which there is no backward",
            fix="compute in the module's forward what needs both, with torch.autograd.grad(..., create_graph=True)",
        )
