"""Replacements for PyTorch functions that read values while they run.

Checks on values, as for a negative variance, are left out: a trace has no values.

    x[:, self.mask]             becomes x[:, [0, 2, 3]], for the current mask
    torch.unique(self.ids)      a constant
    x[x > 0]                    stays as it is: its size is dynamic
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.operators import aten
from ...errors import ShardingError
from ...rules.custom_ops.nd import ctc_losses
from ...rules.rewrites import DECLINED, Declined, rewrite


@rewrite("value", torch.equal, Tensor.equal)
def _equal(input: Tensor, other: Tensor) -> int | float | bool:
    return False if input.shape != other.shape else (input == other).all().item()


@rewrite("value", torch.allclose, Tensor.allclose)
def _allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> int | float | bool:
    return torch.isclose(input, other, rtol, atol, equal_nan).all().item()


@rewrite("value", F.rrelu, torch.rrelu)
def _rrelu(
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor | Declined:
    """Draw slopes as a value: PyTorch saves them before it draws, which a checkpoint sees."""
    if not training:
        return DECLINED
    slopes = torch.empty_like(input, requires_grad=False).uniform_(lower, upper)
    slopes = torch.where(input.detach() > 0, 1.0, slopes)
    return input.mul_(slopes) if inplace else input * slopes


@rewrite("value", torch.cov, Tensor.cov)
def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor | Declined:
    """Return the covariance between the rows of input [variables, observations].

    The weights [observations] count or weigh the columns.
    """
    columns = input.shape[-1] if input.dim() else 1
    counts = fweights is None or not (fweights.is_floating_point() or fweights.is_complex())
    weights = [w for w in (fweights, aweights) if w is not None]
    if input.dim() > 2 or not counts or any(list(w.shape) != [columns] for w in weights):
        return DECLINED  # errors of PyTorch's own
    x = input if input.dim() == 2 else input.reshape(1, -1)
    weights = (
        fweights if aweights is None else aweights if fweights is None else fweights * aweights
    )
    if weights is None:
        centered = x - x.mean(1, keepdim=True)
        weighted, count = centered, max(x.shape[1] - correction, 0)
    else:
        total = weights.sum()
        centered = x - (x * weights).sum(1, keepdim=True) / total
        spread = total if aweights is None else (weights * aweights).sum() / total
        count = (
            total - correction * spread if aweights is not None else total - correction
        ).clamp_min(0)
        weighted = centered * weights
    return (weighted @ centered.mT.conj() / count).squeeze()


@rewrite("value", torch.corrcoef, Tensor.corrcoef)
def _corrcoef(input: Tensor) -> Tensor | Declined:
    c = _cov(input)
    if c is DECLINED:
        return DECLINED
    if c.dim() == 0:
        return c / c
    deviation = torch.diagonal(c).sqrt()
    c = c / deviation.unsqueeze(1) / deviation
    # Rounding may leave [-1, 1], to which PyTorch clips.
    return (
        torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1))
        if c.is_complex()
        else c.clamp(-1, 1)
    )


@rewrite("value", F.gaussian_nll_loss)
def _gaussian_nll(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    var = var.clone()
    with torch.no_grad():  # the gradient passes through the clamp
        var.clamp_(min=eps)
    loss = 0.5 * (var.log() + (input - target).square() / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


@rewrite("value", F.ctc_loss)
def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: object,
    target_lengths: object,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Run F.ctc_loss with lengths that are tensors."""
    single = log_probs.dim() == 2
    log_probs = log_probs.unsqueeze(1) if single else log_probs
    lengths = [
        torch.as_tensor(n, device=log_probs.device, dtype=torch.int64).reshape(-1)
        for n in (input_lengths, target_lengths)
    ]
    targets = targets.unsqueeze(0) if single and targets.dim() == 1 else targets
    losses = ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)[0]
    if reduction == "mean":
        return (losses / lengths[1].clamp_min(1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses.squeeze(0) if single else losses


@rewrite("value", torch.tensor_split, Tensor.tensor_split)
def _tensor_split(input: Tensor, *sections: object, **named: object) -> Declined:
    """Raise ShardingError for sections that are a tensor."""
    if not any(isinstance(argument, Tensor) for argument in (*sections, *named.values())):
        return DECLINED
    raise ShardingError.here(
        "tensor_split by a tensor needs its values before the program runs",
        fix="give the sections as a number or a tuple",
    )


@rewrite("value", torch.embedding)
def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> object:
    """Look up rows, with a dense gradient: a layout needs a dense tensor."""
    return (
        torch.embedding(weight, indices, padding_idx, scale_grad_by_freq, False)
        if sparse
        else DECLINED
    )


@rewrite("value", Tensor.retain_grad)
def _retain_grad(input: Tensor) -> Declined:
    """Warn that a value's gradient stays None."""
    if not input.is_leaf:
        warnings.warn(
            "forward calls retain_grad() of a value, whose 'grad' stays None: on a mesh "
            "autograd does not see values inside of a "
            "model; a hook does (value.register_hook(keep))",
            stacklevel=2,
        )
    return DECLINED


def nested_list(input: Tensor) -> object:
    """Return a nested list with symbolic numbers."""
    if any(isinstance(n, torch.SymInt) for n in input.shape):
        raise ShardingError.here(
            "the program makes a list of as many numbers as values say",
            why="one program is made for all values, before any device computes",
            fix="compute the tensor outside and pass it; or pass lists of numbers, of "
            "which forward makes tensors (torch.tensor(sizes)): there is a program for each",
        )
    return [nested_list(row) for row in input.unbind()] if input.dim() else input.item()


# ------------------------------------------------------------ indices that only a run knows


def _is_number(entry: object) -> bool:
    """Return whether x[entry] reads a tensor's value.

    A bool tensor is a mask, whose values are not read.
    """
    if isinstance(entry, slice):
        return any(isinstance(bound, Tensor) for bound in (entry.start, entry.stop, entry.step))
    whole = (
        isinstance(entry, Tensor)
        and entry.dim() == 0
        and not entry.is_floating_point()
        and entry.dtype is not torch.bool
    )
    return whole or isinstance(entry, torch.SymInt)


def _split_index(x: Tensor, index: tuple) -> tuple[Tensor, tuple]:
    """Return the view x[numbers], and the rest of the index.

    Slices are taken first: torch 2.9 cannot assign to a slice of a row whose number is symbolic.
    """
    numbers, rest = [], []
    for dim, entry in zip(positions(x, index), index):
        if isinstance(entry, slice):
            bounds = (entry.start, entry.stop, entry.step)
            known = slice(*(b.item() if isinstance(b, Tensor) else b for b in bounds))
            x, entry = x[(slice(None),) * dim + (known,)], slice(None)
        if not isinstance(entry, slice) and _is_number(entry):
            numbers.append((dim, entry))
        else:
            rest.append(entry)
    # From the last one on, so that earlier dimensions keep their places.
    for dim, number in reversed(numbers):
        x = x.select(dim, number)
    return x, tuple(rest)


def positions(x: Tensor, index: tuple) -> list[int]:
    """Return the dimension in x at which each index entry begins."""
    at, dims = 0, []
    for place, entry in enumerate(index):
        dims.append(at)
        at = (
            x.dim() - sum(map(_dim_count, index[place + 1 :]))
            if entry is Ellipsis
            else at + _dim_count(entry)
        )
    return dims


def _dim_count(entry: object) -> int:
    if entry is None or isinstance(entry, bool):
        return 0
    return (
        entry.dim() if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1
    )


@rewrite("value", Tensor.__getitem__)
def _getitem(input: Tensor, index: object) -> Tensor | Declined:
    """Return x[index] where the index has numbers that only a run knows."""
    index = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_number, index)):
        return DECLINED
    view, rest = _split_index(input, index)
    return view[rest] if rest else view


@rewrite("value", Tensor.__setitem__)
def _setitem(input: Tensor, index: object, value: Any) -> Declined | None:
    """Assign to x[index] where the index has numbers that only a run knows."""
    index = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_number, index)):
        return DECLINED
    view, rest = _split_index(input, index)
    view[rest if rest else ...] = value


# cuDNN's operation changes running statistics, but its schema does not say so. Running a captured
# program, to know a size or to certify a plan, would then change the model's buffers.
def _without_cudnn(function: Callable[..., Any]) -> None:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return function(*args, **kwargs)

    rewrite("value", function)(replacement)


for _function in (torch.batch_norm, F.batch_norm, torch.instance_norm, F.instance_norm):
    _without_cudnn(_function)


_MASKS = (torch.bool, torch.uint8)
SELECTING = {
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.masked_select.default,
}


class Trace(Protocol):
    """The values that are known during a trace."""

    def ask(self, tensor: Tensor, is_shape: bool = False) -> Tensor | None:
        """Return a tensor's values, or None. is_shape: they decide on a shape."""

    def rows(self, mask: Tensor) -> tuple[Tensor, ...] | None:
        """Return the indices that a mask selects, a constant for each dimension, or None."""


def _index(trace: Trace, x: Tensor, index: object) -> tuple[Callable, tuple]:
    """Return the call for x[index] with indices in place of masks."""
    indices = index if isinstance(index, tuple) else (index,)
    indices = tuple(
        torch.tensor(e) if isinstance(e, numpy.ndarray) and e.dtype == bool else e for e in indices
    )
    entries: list[Any] = []
    for at, entry in zip(positions(x, indices), indices):
        rows = None
        # PyTorch reports a mask with another shape.
        if (
            isinstance(entry, Tensor)
            and entry.dtype in _MASKS
            and 0 < entry.dim()
            and entry.shape == x.shape[at : at + entry.dim()]
        ):
            rows = trace.rows(entry)
        entries += [entry] if rows is None else rows
    return Tensor.__getitem__, (
        x,
        tuple(entries) if isinstance(index, tuple) or len(entries) > 1 else entries[0],
    )


def _select(trace: Trace, x: Tensor, mask: Tensor) -> tuple[Callable, tuple]:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    rows = trace.rows(mask.expand(shape)) if shape else None
    return (
        (torch.masked_select, (x, mask))
        if rows is None
        else (Tensor.__getitem__, (x.expand(shape), rows))
    )


def _split(
    trace: Trace, x: Tensor, borders: int | Sequence[int] | Tensor, *dim: int
) -> tuple[Callable, tuple]:
    constant = trace.ask(borders, True) if isinstance(borders, Tensor) else None
    return Tensor.tensor_split, (x, borders if constant is None else constant.tolist(), *dim)


SELECTIONS: dict[Callable, Callable[..., tuple[Callable, tuple]]] = {
    Tensor.__getitem__: _index,
    torch.masked_select: _select,
    Tensor.masked_select: _select,
    torch.tensor_split: _split,
    Tensor.tensor_split: _split,
}
