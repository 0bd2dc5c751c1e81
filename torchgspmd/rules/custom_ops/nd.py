"""Operations that keep all dimensions: linear, matmul and einsum become these.

    linear(x, w)        einsum("bsk,nk->bsn", x, w)

PyTorch flattens [batch, sequence, width] to two dimensions before it multiplies, which would lose a
merged dimension's layout. The gradients use the same operations, so that the backward keeps all
dimensions too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...compat.operators import aten, custom_op
from ...compat.private_apis import OpOverload

# ------------------------------------------------------------------------- einsum of two tensors


@custom_op("einsum")
def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Return torch.einsum for two tensors, as a contiguous tensor.

    No letter is repeated in a tensor or broadcast. Every letter occurs in two: a, b or the result.
    """
    # torch.einsum may return a permuted view; the fake result is contiguous.
    return torch.einsum(equation, a, b).contiguous()


def split_equation(equation: str) -> tuple[str, str, str]:
    """Split 'ab,bc->ac' into ('ab', 'bc', 'ac')."""
    left, out = equation.split("->")
    a, b = left.split(",")
    return a, b, out


def summed_alone(x: Tensor, letters: str, others: str) -> tuple[Tensor, str]:
    """Sum x over its letters that are not among `others`. Returns the letters left, too."""
    dims = [i for i, c in enumerate(letters) if c not in others]
    return (x.sum(dims), "".join(c for c in letters if c in others)) if dims else (x, letters)


@einsum.register_fake
def _(equation: str, a: Tensor, b: Tensor) -> Tensor:
    a_letters, b_letters, out = split_equation(equation)
    sizes = {**dict(zip(a_letters, a.shape)), **dict(zip(b_letters, b.shape))}
    for letter, size in zip(a_letters, a.shape):
        # Symbolic sizes are not compared: that would guard on them.
        if type(size) is type(sizes[letter]) is int and size != sizes[letter]:
            raise RuntimeError(
                f"shapes {list(a.shape)} and {list(b.shape)} cannot be multiplied: "
                f"'{letter}' of {equation} is {size} and {sizes[letter]}"
            )
    return a.new_empty([sizes[letter] for letter in out])


def _einsum_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.equation, a, b = inputs
    ctx.save_for_backward(a, b)


def _einsum_backward(ctx: Any, grad: Tensor) -> tuple:
    x, y = ctx.saved_tensors
    a, b, out = split_equation(ctx.equation)
    return (
        None,
        # Conjugates, as PyTorch defines gradients of complex products.
        einsum(f"{out},{b}->{a}", grad, y.conj_physical()) if ctx.needs_input_grad[1] else None,
        einsum(f"{out},{a}->{b}", grad, x.conj_physical()) if ctx.needs_input_grad[2] else None,
    )


einsum.register_autograd(_einsum_backward, setup_context=_einsum_context)


@einsum.register_vmap
def _(info: object, dims: tuple, equation: str, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """Give operands with a torch.vmap dimension one more letter, in front."""
    new = next(c for c in ascii_letters if c not in equation)
    a_letters, b_letters, out = split_equation(equation)
    letters = [x if dim is None else new + x for x, dim in zip((a_letters, b_letters), dims[1:])]
    a, b = (x if dim is None else x.movedim(dim, 0) for x, dim in zip((a, b), dims[1:]))
    return einsum(f"{','.join(letters)}->{new}{out}", a, b), 0


# --------------------------------------------------------- connectionist temporal classification


@custom_op("ctc_losses", tags=(torch.Tag.cudagraph_unsafe,))
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss [n] for each batch row, and its gradient by log_probs[t, n, c].

    targets: [n, s], or all concatenated. PyTorch's operation cannot be captured: it saves a tensor
    whose size depends on the lengths.
    """
    # Read on the host, so no CUDA graph can have it (the tag above).
    lengths = [n.tolist() for n in (input_lengths, target_lengths)]
    targets = targets.contiguous()  # the kernel reads other numbers from a slice with steps
    losses, alpha = aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)
    grad = aten._ctc_loss_backward.default(
        torch.ones_like(losses), log_probs, targets, *lengths, losses, alpha, blank, zero_infinity
    )
    losses = losses.masked_fill(losses.isinf(), 0) if zero_infinity else losses.clone()
    return losses, grad.contiguous()


@ctc_losses.register_fake
def _(log_probs: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty([log_probs.shape[1]]), torch.empty_like(
        log_probs, memory_format=torch.contiguous_format
    )


def _ctc_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    # The gradient was computed with the loss, since it needs that kernel's intermediate results.
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _ctc_backward(ctx: Any, grad: Tensor, _: object) -> tuple:
    return ctx.saved_tensors[0] * grad.unsqueeze(-1), None, None, None, None, None


ctc_losses.register_autograd(_ctc_backward, setup_context=_ctc_context)


# How an einsum becomes a matrix product: which dimensions become rows and columns.
#
# bnsd,ndm->bsm      rows b s, inner n d, columns m: in the left operand n and s change places
# bkind,ijnd->bknij  batch i n: the product [i n, b k, j] is put into the order of the result


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


# The costs of our operations: FLOPs, and bytes that they allocate besides their results.
#
# PyTorch's flop counter has the FLOPs. WORKSPACE has a function for each operation that needs
# bytes. It takes the operation's arguments, with meta tensors that have the operands' strides.

_OURS = torch.ops.torchgspmd


def einsum_flops(equation: str, a: Any, b: Any, *_: object, **__: object) -> int:
    """Return the FLOPs in an einsum with two operands, from their shapes."""
    first, second, _out = split_equation(equation)
    # Each pair of entries that meet is multiplied and added: 2 m k n for a matrix product.
    return 2 * math.prod({**dict(zip(first, a)), **dict(zip(second, b))}.values())


register_flop_formula(_OURS.einsum)(einsum_flops)


@register_flop_formula(_OURS.scaled_mm)
def scaled_mm_flops(a: Any, b: Any, *_: object, **__: object) -> int:
    return 2 * a[0] * a[1] * b[1]


# FLOPs of a factorization of an [m, n] matrix, over m n min(m, n). Source: Golub and Van Loan,
# Matrix Computations, and LAPACK's working notes for the iterations.
_FACTORIZATIONS = {
    "_linalg_det": 0.67,
    "_linalg_eigh": 9.0,
    "_linalg_slogdet": 0.67,
    "_linalg_svd": 21.0,
    "geqrf": 1.33,
    "linalg_cholesky_ex": 0.33,
    "linalg_eig": 25.0,
    "linalg_inv_ex": 2.0,
    "linalg_lu_factor_ex": 0.67,
    "linalg_matrix_exp": 20.0,
    "linalg_qr": 2.67,
    "_linalg_solve_ex": 0.67,
}


def _factorization_flops(share: float, a: Any, *_: object, **__: object) -> int:
    return int(share * math.prod(a) * min(a[-2:])) if len(a) > 1 else 0


for _name, _share in _FACTORIZATIONS.items():
    register_flop_formula(getattr(torch.ops.aten, _name))(partial(_factorization_flops, _share))


def einsum_bytes(equation: str, x: Tensor, y: Tensor) -> int:
    """Return the bytes for operands copied into matrices, or for a product to permute."""
    form = matrix_form(equation, x.shape, y.shape)
    if form.exchanged:
        x, y = y, x
    copies = sum(_copied(*pair) for pair in ((x, form.left), (y, form.right)))
    product = x.new_empty(form.shape)
    moved = form.order is not None and not product.permute(form.order).is_contiguous()
    # The copies are freed before the product is permuted, so the larger one counts.
    return max(copies, product.nbytes if moved else 0)


def _copied(x: Tensor, matrix: Matrix) -> int:
    """Return the bytes copied to turn an operand into a matrix, 0 if it can be a view."""
    moved = x if matrix.order is None else x.permute(matrix.order)
    reshaped = moved if matrix.shape is None else moved.reshape(matrix.shape)
    is_view = reshaped.untyped_storage()._cdata == x.untyped_storage()._cdata
    return 0 if is_view else reshaped.nbytes


WORKSPACE: dict[OpOverload, Callable[..., int]] = {einsum._opoverload: einsum_bytes}
