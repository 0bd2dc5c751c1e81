"""Selection by values: x[mask], nonzero, unique, repeat_interleave.

    x[:, self.mask]             becomes x[:, [0, 2, 3]], for the current mask
    torch.unique(self.ids)      a constant
    x[x > 0]                    stays as it is: its size is dynamic

The result's shape is static if the values are known during the trace (value_guards.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from ...compat.operators import aten
from .value_free import positions

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
