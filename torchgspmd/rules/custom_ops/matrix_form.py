"""How an einsum becomes a matrix product: which dimensions become rows and columns.

bnsd,ndm->bsm      rows b s, inner n d, columns m: in the left operand n and s change places
bkind,ijnd->bknij  batch i n: the product [i n, b k, j] is put into the order of the result
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .nd import split_equation


class Matrix(NamedTuple):
    """An operand as [batch, rows, columns], or as [rows, columns] without a batch.

    order: its dimensions, if they are permuted first. shape: the shape after a reshape, if there is
    one. swapped: the last two dimensions are then transposed.
    """

    order: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    swapped: bool


class MatrixForm(NamedTuple):
    """A matrix product.

    exchanged: the right operand is the product's left one. product: its shape. columns: their
    letters. shape: sizes for all its letters, batch, rows and columns. order: how these are
    permuted to the result's order, if they are.
    """

    exchanged: bool
    left: Matrix
    right: Matrix
    has_batch: bool
    product: tuple[int, ...]
    columns: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None


def matrix_form(equation: str, x: Iterable[int], y: Iterable[int]) -> MatrixForm:
    """Return an einsum's matrix form for operands with these shapes."""
    a, b, out = split_equation(equation)
    sizes = dict(zip(a, x)) | dict(zip(b, y))
    # Letters in all three tensors count separate products.
    batch = "".join(c for c in out if c in a and c in b)
    rows, columns = ("".join(c for c in out if c in term and c not in batch) for term in (a, b))
    # Exchanged, the result needs no permute.
    exchanged = [c for c in out if c not in batch] != [*rows, *columns] and out.startswith(
        tuple(columns) or " "
    )
    if exchanged:
        a, b, rows, columns = b, a, columns, rows
    inner = "".join(c for c in a if c in b and c not in batch)
    letters = batch + rows + columns
    groups = [batch, rows, columns] if batch else [rows, columns]
    return MatrixForm(
        exchanged=exchanged,
        left=_matrix(a, sizes, batch, rows, inner),
        right=_matrix(b, sizes, batch, inner, columns),
        has_batch=bool(batch),
        product=tuple(math.prod(sizes[c] for c in group) for group in groups),
        columns=columns,
        shape=tuple(sizes[c] for c in letters),
        order=tuple(letters.index(c) for c in out) if letters != out else None,
    )


def _matrix(term: str, sizes: Mapping[str, int], batch: str, first: str, second: str) -> Matrix:
    """Return an operand as [batch, first, second], by a transposed view if that is enough."""
    straight, crossed = batch + first + second, batch + second + first
    swapped = term == crossed and term != straight
    # A transposed view costs nothing: the kernel reads it by its strides. A permute copies.
    order = None if swapped or term == straight else tuple(map(term.index, straight))
    groups = ([batch] if batch else []) + ([second, first] if swapped else [first, second])
    shape = tuple(math.prod(sizes[c] for c in group) for group in groups)
    before = tuple(sizes[c] for c in (crossed if swapped else straight))
    return Matrix(order, shape if shape != before else None, swapped)
