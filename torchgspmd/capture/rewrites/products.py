"""Products, and losses on volumes, as operations that keep their dimensions.

    F.linear(x, w)      # x [a, c, b], w [d, b]: einsum("acb,db->acd"), without a flattened batch

A trace calls these in place of PyTorch's Python functions. They decline products that they cannot
express, such as repeated letters or broadcast batch dimensions with size 1. PyTorch's own function
then runs, and is still correct. istft is here because PyTorch's reads values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.operators import aten
from ...layout.mark import (
    NAMED,
    check_mark,
    mark_sharding,
    mark_sharding_op,
    reshard,
    without_layout,
)
from ...layout.mesh import Mesh
from ...rules.custom_ops.nd import einsum, summed_alone
from ...rules.rewrites import DECLINED, Declined, apply_first, rewrite
from ...shard_spec import ShardSpec, SpecLike


@rewrite("product", mark_sharding)
def _mark(tensor: Tensor, mesh: Mesh | str, spec: SpecLike | None = None) -> Tensor:
    """Run mark_sharding as an operation in the graph."""
    if isinstance(mesh, str):
        raise without_layout(mesh)
    return mark_sharding_op(tensor, str(mesh), str(check_mark(tensor, mesh, spec)))


@rewrite("product", reshard)
def _reshard(tensor: Tensor, spec: ShardSpec) -> Tensor:
    """Run reshard as an operation in the graph; without a mesh, the mark is a named one."""
    return mark_sharding_op(tensor, NAMED, str(spec))


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Return the operands as autocast would pass them to a matmul."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [
        # PyTorch's autocast leaves float64 as it is.
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    ]


def _einsum(equation: str, a: Tensor, b: Tensor) -> Any:
    """Contract two operands; autocast applies.

    Where nothing is summed, PyTorch multiplies elements: without autocast, in a common dtype.
    """
    left, _, out = equation.partition("->")
    if {*left.replace(",", "")} <= {*out}:
        a, b = (x.to(torch.promote_types(a.dtype, b.dtype)) for x in (a, b))
    else:
        a, b = autocast(a, b)
    if a.is_sparse or b.is_sparse:
        return DECLINED
    if a.dtype != b.dtype:  # torch's kernels say so, its shape functions do not
        raise RuntimeError(f"a product of {a.dtype} and {b.dtype}: they have to be of one dtype")
    # Features replace products of batches of matrices only.
    is_batched = max(a.dim(), b.dim()) > 2
    result = apply_first("contract", einsum, equation, a, b) if is_batched else DECLINED
    return einsum(equation, a, b) if result is DECLINED else result


@rewrite("vmap product", F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Run F.linear without flattening the batch."""
    if weight.dim() != 2 or input.dim() < 1:
        return DECLINED
    lead = ascii_letters[2 : input.dim() + 1]
    y = _einsum(f"{lead}b,ab->{lead}a", input, weight)
    return y if bias is None or y is DECLINED else y + bias.to(y.dtype)


@rewrite("vmap product", torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Any:
    """Run torch.matmul as a two-operand einsum."""
    if (
        not isinstance(input, Tensor)
        or not isinstance(other, Tensor)
        or not input.dim()
        or not other.dim()
    ):
        return DECLINED
    rows = "m" if input.dim() > 1 else ""
    columns = "n" if other.dim() > 1 else ""
    a_batch, b_batch = input.shape[:-2], other.shape[:-2]
    batch = "abcdefgh"[: max(len(a_batch), len(b_batch))]
    if len(batch) > 8 or (a_batch and b_batch and a_batch != b_batch):
        return DECLINED
    a = (batch if a_batch else "") + rows + "k"
    b = (batch if b_batch else "") + "k" + columns
    return _einsum(f"{a},{b}->{batch}{rows}{columns}", input, other)


@rewrite("vmap product", Tensor.__rmatmul__)
def _reflected_matmul(input: Tensor, other: Tensor) -> object:
    return matmul(other, input)


def _matrix_product(dims: int) -> Callable:
    """Return the body for mm (2 dimensions) or bmm (3 dimensions)."""

    def product(
        input: Tensor, mat2: Tensor, out_dtype: torch.dtype | None = None, **options: object
    ) -> Any:
        if out_dtype is not None or options or input.dim() != dims or mat2.dim() != dims:
            return DECLINED
        return matmul(input, mat2)

    return product


@rewrite("vmap product", torch.einsum)
def _torch_einsum(*args: Any) -> Any:
    """Run torch.einsum as a chain of two-operand contractions, from left to right."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    terms = (
        _explicit(equation, operands) if isinstance(equation, str) and len(operands) > 1 else None
    )
    if terms is None:
        return DECLINED
    *left, out = terms
    a, letters = operands[0], left[0]
    for i, (b, b_letters) in enumerate(zip(operands[1:], left[1:]), start=1):
        # Letters that neither a later operand nor the result has are summed now.
        later = set("".join(left[i + 1 :]) + out)
        result = (
            out
            if i == len(left) - 1
            else "".join(dict.fromkeys(c for c in letters + b_letters if c in later))
        )
        a, letters = summed_alone(a, letters, b_letters + result)
        b, b_letters = summed_alone(b, b_letters, letters + result)
        a = _einsum(f"{letters},{b_letters}->{result}", a, b)
        if a is DECLINED:
            return DECLINED
        letters = result
    return a


def _explicit(equation: str, operands: Any) -> list[str] | None:
    """Return the letters for every operand and for the result.

    Return None for operands that einsum() does not take.
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in equation:
        ranks = {t.dim() - len(term) + 3 for t, term in zip(operands, terms) if "..." in term}
        if len(ranks) != 1 or not arrow:
            return None
        fill = "".join(c for c in ascii_letters if c not in equation)[: ranks.pop()]
        terms, out = [term.replace("...", fill) for term in terms], out.replace("...", fill)
    # Without an arrow the result has the letters that occur once, in alphabetical order.
    if not arrow:
        every = "".join(terms)
        out = "".join(sorted(c for c in set(every) if every.count(c) == 1))
    sizes: dict[str, int] = {}
    for tensor, term in zip(operands, terms):
        if len(set(term)) != len(term) or tensor.dim() != len(term):
            return None
        if any(sizes.setdefault(c, n) != n for c, n in zip(term, tensor.shape)):
            return None
    if len(terms) != len(operands) or len(set(out)) != len(out) or not set(out) <= set(sizes):
        return None
    return [*terms, out]


@rewrite("product", F.pad)
def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> object:
    """Pad circularly by a concatenation; PyTorch writes into slices of a new tensor."""
    if (
        mode != "circular"
        or min(pad) < 0
        or any(n > input.shape[-1 - i // 2] for i, n in enumerate(pad))
    ):
        return DECLINED
    for i in range(0, len(pad), 2):
        d, (before, behind) = input.dim() - 1 - i // 2, pad[i : i + 2]
        pieces = [
            input.narrow(d, input.shape[d] - before, before),
            input,
            input.narrow(d, 0, behind),
        ]
        if before or behind:
            input = torch.cat([piece for piece in pieces if piece.shape[d]], d)
    return input if any(pad) else input.clone()


@rewrite("body", F.dropout)
def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | Declined:
    """Draw a mask with one byte an element, as CUDA's kernel does and the CPU's does not."""
    if inplace or not training or not 0 < p <= 1 or not isinstance(input, Tensor):
        return DECLINED
    return torch.native_dropout(input, p, True)[0]


@rewrite("product", F.cross_entropy)
def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | Declined:
    """Run F.cross_entropy on volumes, with class indices as targets."""
    if input.dim() < 5 or target.is_floating_point() or label_smoothing:
        return DECLINED
    return _nll_loss(
        input.log_softmax(1),
        target,
        weight,
        size_average=size_average,
        ignore_index=ignore_index,
        reduce=reduce,
        reduction=reduction,
    )


@rewrite("product", F.nll_loss)
def _nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
) -> Tensor | Declined:
    """Compute the loss on volumes [n, c, x, y, z, ...].

    PyTorch flattens them to [n, c, 1, x y z].
    """
    if input.dim() < 5 or size_average is not None or reduce is not None:
        return DECLINED
    counts = target != ignore_index
    # An ignored target may be no class, and gather needs one; it is masked below.
    label = torch.where(counts, target, 0)
    losses = -input.gather(1, label.unsqueeze(1)).squeeze(1)  # [n, x, y, z]
    # The mean is weighted, and leaves ignored targets out.
    scale = torch.ones_like(losses) if weight is None else weight[label]
    losses, scale = (torch.where(counts, t, 0) for t in (losses * scale, scale))
    return (
        losses
        if reduction == "none"
        else losses.sum()
        if reduction == "sum"
        else losses.sum() / scale.sum()
    )


@rewrite("product", torch.istft, Tensor.istft)
def _istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor | Declined:
    """Run istft without checking that the windows cover everything, which reads values.

    Elements that they do not cover are NaN.
    """
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    onesided = input.shape[-2] != n_fft if onesided is None else onesided
    if (
        not input.is_complex()
        or return_complex
        and onesided
        or input.shape[-2] != (n_fft // 2 + 1 if onesided else n_fft)
    ):
        return DECLINED
    spectrum = input.mT * math.sqrt(n_fft) if normalized else input.mT  # [.., t, frequency]
    frames = (
        torch.fft.ifft(spectrum, n_fft)
        if return_complex
        else torch.fft.irfft(spectrum[..., : n_fft // 2 + 1], n_fft)
    )
    if window is None:
        window = torch.ones(width, dtype=frames.real.dtype, device=input.device)
    # A shorter window is centered in its frame.
    window = F.pad(window, ((n_fft - width) // 2, n_fft - width - (n_fft - width) // 2))
    total = n_fft + hop * (frames.shape[-2] - 1)
    # Adds overlapping frames at their places.
    sums, weights = (
        aten.unfold_backward(t, [*t.shape[:-2], total], t.dim() - 2, n_fft, hop)
        for t in (frames * window, window.square().expand(frames.shape[-2], n_fft))
    )
    start = n_fft // 2 if center else 0
    end = total - start if length is None else min(start + length, total)
    signal = sums[..., start:end] / weights[start:end]
    return signal if length is None else F.pad(signal, (0, length - (end - start)))


rewrite("product", torch.bmm, Tensor.bmm)(_matrix_product(3))
rewrite("product", torch.mm, Tensor.mm)(_matrix_product(2))
