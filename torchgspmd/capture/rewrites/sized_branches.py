"""Branches whose sides have results of different sizes that only a run knows.

    if boxes.numel() == 0:                  one = empty(0)
        return empty(0)                     some = nms(boxes and one row if there is none, ...)
    return nms(boxes, scores, 0.5)          cat([one[rows if goes], some[rows if not goes]])

A loop's results have one size, so both sides are computed, outside of any loop. Code for some rows
may fail for none, as `boxes.max()` does: it gets one row then, and its results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ...compat.private_apis import _pytree as pytree
from ..stand_in_sizes import expression_of

_ROWS = (1, 2, 3, 1009)  # a condition that all of these decide alike tells no rows from some


def sized_dim(a: object, b: object) -> int | None:
    """Return the only dimension in which sizes differ that a run knows; None for other values."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    if a.dtype != b.dtype or a.dim() != b.dim():
        return None
    pairs = [*zip(a.shape, b.shape)]
    dims = [d for d, (m, n) in enumerate(pairs) if expression_of(m) != expression_of(n)]
    known = len(dims) != 1 or all(type(n) is int for n in pairs[dims[0]])
    return None if known else dims[0]


def needs_both(a: object, b: object) -> bool:
    """Return whether a loop that runs once or not at all cannot have a result of a branch.

    Its gradients are zeros where it does not run, and zeros need a size.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.requires_grad or b.requires_grad):
        return not all(type(n) is int for n in (*a.shape, *b.shape))
    return sized_dim(a, b) is not None


def chosen(goes: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return `a` where a branch goes that way, else `b`."""
    if (dim := sized_dim(a, b)) is None:
        return torch.where(goes, a, b)
    parts = [
        x.index_select(dim, (flag & flag.new_ones(x.shape[dim])).nonzero().reshape(-1))
        for x, flag in ((a, goes), (b, goes.logical_not()))
        if not (type(x.shape[dim]) is int and x.shape[dim] == 0)
    ]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


class Emptiness:
    """A branch on whether there are rows.

    count: how many there are. empty: the outcome for none.
    """

    def __init__(self, count: Any, empty: bool) -> None:
        self.count, self.empty = count, empty
        self.filled: Any = torch.sym_max(count, 1)

    @classmethod
    def of(cls, test: object, sides: Sequence[Any], before: tuple) -> Emptiness | None:
        """Return the rows that a test is about, from the sizes of the sides' operands."""
        if not isinstance(test, torch.SymBool):
            return None
        condition: Any = test.node.expr
        if not getattr(condition, "is_Relational", False):
            return None
        values = [cell.cell_contents for side in sides for cell in _cells(side)]
        for tensor in pytree.tree_leaves([before, values]):
            for size in tensor.shape if isinstance(tensor, Tensor) else ():
                if isinstance(size, torch.SymInt):
                    outcomes = _outcomes(condition, size.node.expr)
                    if outcomes and len({*outcomes[1:]}) == 1 and outcomes[0] != outcomes[1]:
                        return cls(size, outcomes[0])
        return None

    def run(
        self, side: Callable[..., tuple], before: tuple, run: Callable[..., list]
    ) -> list[object]:
        """Return the results of a side for some rows, which gets one where there are none."""
        cells = [(cell, cell.cell_contents) for cell in _cells(side)]
        try:
            for cell, value in cells:
                cell.cell_contents = self._fill(value)
            return [self._cut(x) for x in run(side, self._fill(before))]
        finally:
            for cell, value in cells:
                cell.cell_contents = value

    def _fill(self, values: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._filled, values)

    def _filled(self, x: Tensor) -> Tensor:
        for dim, size in enumerate(x.shape):
            if expression_of(size) == expression_of(self.count):
                shape = [*x.shape]
                shape[dim] = self.filled - self.count
                # Ones are in the domain of most functions, and zeros are indices in any table.
                x = torch.cat([x, x.new_full(shape, x.is_floating_point())], dim)
        return x

    def _cut(self, x: Any) -> Any:
        """Return a result with as many rows as there are."""
        for dim, size in enumerate(x.shape) if isinstance(x, Tensor) else ():
            if expression_of(size) == expression_of(self.filled):
                x = x.index_select(dim, torch.arange(self.count, device=x.device))
        return x


def _cells(side: Callable[..., object], seen: frozenset = frozenset()) -> Iterator[CellType]:
    """Yield the variables that a side reads, and those of local functions that it calls."""
    for cell in getattr(side, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a name that is not assigned
            continue
        if isinstance(value, FunctionType):
            if value not in seen:
                yield from _cells(value, seen | {value})
        else:
            yield cell


def _outcomes(condition: Any, size: Any) -> list[bool]:
    """Return a condition's outcomes for 0 and some rows; [] if it is about another number."""
    symbols = condition.free_symbols
    if symbols != size.free_symbols:
        return []
    difference = condition.lhs - condition.rhs
    rest = difference.subs(dict.fromkeys(symbols, 0))
    twos = dict.fromkeys(symbols, 2)
    factor = (difference.subs(twos) - rest) / size.subs(twos)
    if (difference - rest - factor * size).expand() != 0:
        return []
    return [bool(condition.func(factor * n + rest, 0)) for n in (0, *_ROWS)]
