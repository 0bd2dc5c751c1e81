"""Between autograd and a program: tensors without gradients, no second-order gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..capture import Input
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line


def detach_aliases(outputs: Sequence[Tensor], differentiable: Sequence[int]) -> Sequence[Tensor]:
    """Detach outputs without a gradient that alias one with a gradient: y.detach() beside y."""
    if len(outputs) == len(differentiable):
        return outputs
    # One object cannot be marked as non-differentiable and still get a gradient.
    with_gradient = {id(outputs[i]) for i in differentiable}
    return [
        y.detach() if id(y) in with_gradient and i not in differentiable else y
        for i, y in enumerate(outputs)
    ]


def detach_inputs(inputs: list[Tensor], indices: Sequence[int]) -> list[Tensor]:
    """Return the inputs, detached at `indices`: the program computes no gradients for these.

    Example: forward uses only `self.hidden.detach()`. The backward must not go on there.
    """
    for i in indices:
        if inputs[i].requires_grad:
            inputs[i] = inputs[i].detach()
    return inputs


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors in the same memory."""
    return tensor.untyped_storage().data_ptr()


def check_versions(versions: Sequence[tuple[int, Tensor, int]], inputs: Sequence[Input]) -> None:
    """Raise ShardingError for a DTensor that was changed after the forward that saved it.

    Autograd checks the versions of saved tensors, but a change of a DTensor counts on the DTensor
    alone, not on this rank's part, which is saved.
    """
    for i, tensor, version in versions:
        if tensor._version != version:
            raise ShardingError(
                f"'{inputs[i].name}' was changed between a forward and its backward",
                where=user_line(),
                why="the backward would read the new value",
                fix="call backward() before the change (an optimizer's step), or forward again",
            )


def saved_tensors_for(ctx: Any, groups: dict[int, int], outputs: set[int]) -> Sequence[Tensor]:
    """Return the tensors that forward saved, for a backward from these outputs.

    groups: each output's independent graph (Captured.parts). Tensors stay saved until each
    graph has had a backward. Eager PyTorch frees no graph without a backward either.
    """
    if not groups:
        return ctx.saved_tensors
    saved, before = getattr(ctx, "pending_saved", None) or (ctx.saved_tensors, set())
    # torch frees all saved tensors at the first backward, though other outputs may need theirs.
    used = before | {groups[i] for i in outputs}
    ctx.pending_saved = None if used == {*groups.values()} else (saved, used)
    return saved


def tensors_of_rows(saved: Sequence[object]) -> tuple[Sequence[object], object]:
    """Return values with each row list replaced by its rows; and the way back."""
    # Autograd saves tensors only.
    if list not in map(type, saved):  # in C: a hundred values at each call
        return saved, None
    return pytree.tree_flatten([*saved])


def rows_of_tensors(values: Sequence[Any], lists: Any) -> Sequence[Any]:
    """Return values with their row lists again."""
    return values if lists is None else pytree.tree_unflatten(values, lists)


def forbid_double_backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients for create_graph=True; differentiating them is an error.

    The backward program is not differentiable, so a second backward would silently lose a term.
    """
    guarded = iter(
        _FirstOrderOnly.apply(
            torch.zeros((), requires_grad=True), *(g for g in gradients if g is not None)
        )
    )
    return [None if g is None else next(guarded) for g in gradients]


class _FirstOrderOnly(torch.autograd.Function):
    """Identity whose backward raises ShardingError."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.detach() for g in gradients)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        raise ShardingError(
            "a gradient of a sharded module is differentiated again",
            where=user_line(),
            why="its backward is a program, of which there is no backward",
            fix="compute in the module's forward what needs both, "
            "with torch.autograd.grad(..., create_graph=True)",
        )
