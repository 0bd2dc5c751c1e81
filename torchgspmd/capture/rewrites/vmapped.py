"""Replacements for functions whose torch.vmap mixes positions, such as the stages of a pipeline.

    vmap(index_add)(x [s, r, m], i [s, k], ...)    PyTorch's: rows of one table [s * r, m]
                                                   ours: scatter_add along the next dimension

A row of one table may belong to any stage, so PyTorch's form exchanges values between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.private_apis import is_functorch_wrapped_tensor
from ...errors import ShardingError
from ...rules.rewrites import DECLINED, rewrite
from ..traced_values import is_vectorizing


def is_mapped(*values: object) -> bool:
    """Return whether torch.vmap maps one of the values."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return is_vectorizing() and any(map(is_functorch_wrapped_tensor, tensors))


@rewrite("vmap value", torch.index_add, Tensor.index_add)
def _index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    if not is_mapped(input, index, source):
        return DECLINED
    dim %= input.dim()
    along = (
        index.long().reshape(*[1] * dim, -1, *[1] * (input.dim() - dim - 1)).expand(source.shape)
    )
    added = source if alpha == 1 else source * alpha
    return input.scatter_add(dim, along, added.to(input.dtype))


@rewrite("vmap value", Tensor.index_add_)
def _index_add_in_place(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Any:
    total = _index_add(input, dim, index, source, alpha=alpha)
    return total if total is DECLINED else input.copy_(total)


@rewrite("vmap value", Tensor.scatter_)
def _scatter_in_place(
    input: Tensor, dim: int, index: Tensor, *src: Any, reduce: str | None = None, **named: Any
) -> Any:
    """Scatter out of place: PyTorch's vmap has a loop over positions for the change in place."""
    if not is_mapped(input, index, *src, *named.values()):
        return DECLINED
    options = named if reduce is None else {**named, "reduce": reduce}
    return input.copy_(input.scatter(dim, index, *src, **options))


@rewrite("vmap value", Tensor.requires_grad_)
def _requires_grad_in_place(input: Tensor, requires_grad: bool = True) -> Any:
    """Leave a stage's value as it is: the trace around it decides which values have gradients."""
    return input if requires_grad and is_mapped(input) else DECLINED


@rewrite("vmap value", F.embedding)
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up rows of a table that each position has for itself."""
    plain = max_norm is None and not (scale_grad_by_freq or sparse)
    if not (plain and is_mapped(weight)):
        return DECLINED
    rows = weight.index_select(0, input.reshape(-1)).view(*input.shape, weight.shape[-1])
    if padding_idx is None:
        return rows
    # The padding's row has no gradient.
    is_padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, rows.detach(), rows)


@rewrite("vmap value", torch.histc, Tensor.histc)
def _histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Count by a comparison with all bins."""
    # Equal borders mean the data's minimum and maximum.
    if not is_mapped(input) or min == max:
        return DECLINED
    x = input.reshape(-1, 1)
    # As PyTorch's kernel: the last bin has its upper border, too.
    place = ((x - min) * bins / (max - min)).long().clamp(max=bins - 1)
    found = (place == torch.arange(bins, device=x.device)) & (x >= min) & (x <= max)
    return found.sum(0).to(input.dtype)


@rewrite("vmap value", torch.bincount, Tensor.bincount)
def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Raise where each position would have a length of its own."""
    if not is_mapped(input, weights):
        return DECLINED
    raise ShardingError.here(
        "bincount is called under torch.vmap, as in the stages of a pipeline",
        why="the largest value decides the length of its result",
        fix="write torch.histc(x.float(), bins=n, min=0, max=n - 1), whose length is n",
    )


# torch.autograd.Function in the stages of a pipeline: torch.vmap takes those that have a rule.
#
#     forward(ctx, x)             the form that most libraries have; torch.vmap refuses it
#     forward(x), setup_context   the form for torch.func, with generate_vmap_rule or its own vmap
#
# A Function of the first form becomes one of the second that runs it. Saved tensors that are
# neither arguments nor results become further results.


def mapping_apply(before: Any) -> Any:
    """Return Function.apply, which gives a Function a rule for torch.vmap."""

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if is_vectorizing() and cls.vmap is torch.autograd.Function.vmap:
            if cls.setup_context is torch.autograd.Function.setup_context:
                return _Mapped(cls)(*args)
            if not cls.generate_vmap_rule:
                cls = type(cls.__name__, (cls,), {"generate_vmap_rule": True})
        return before.__get__(None, cls)(*args, **kwargs)  # from torch 2.14 on, it is one in C

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
