"""Matrix products. All become custom_ops/nd.py's einsum, whose equation is its rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.operators import aten
from ..custom_ops.nd import einsum, split_equation, summed_alone
from ..custom_ops.scaled_mm import BLOCK, block_scaled_mm, plain_scales, scaled_mm, spread
from ..flat_call import FlatCall
from ..notation import Call, FactorRule, LocalForm
from ..registry import rule, rule_for
from ..rewrites import DECLINED, rewrite

ours = torch.ops.torchgspmd


@rule_for(ours.einsum.default)
def _einsum(call: Call) -> FactorRule:
    a, b, out = split_equation(call.args[0])
    return call.rule(
        [a, b],
        [out],
        reduce=[letter for letter in dict.fromkeys(a + b) if letter not in out],
        linear=[[0], [1]],
        contraction=True,
        text=f"{' '.join(a)}, {' '.join(b)} -> {' '.join(out)}",
    )


@rewrite("keep", ours.einsum.default)
def _kept_einsum(flat: FlatCall, equation: str, *operands: Any) -> tuple[Any, ...]:
    """Give each part of a flattened dimension a letter."""
    tensors = split_equation(equation)
    free = iter(c for c in ascii_letters if c not in equation)
    parts: dict[str, str] = {}
    for letters, groups in zip(tensors, (*flat.operands, *flat.groups)):
        for letter, count in zip(letters, groups):
            if len(parts.setdefault(letter, letter)) < count:
                parts[letter] += "".join(next(free) for _ in range(count - 1))
    a, b, out = ("".join(map(parts.__getitem__, letters)) for letters in tensors)
    return f"{a},{b}->{out}", *operands


for _op, _equation in (
    (aten.mm, "mk,kn->mn"),
    (aten.bmm, "bmk,bkn->bmn"),
    (aten.mv, "mk,k->m"),
    (aten.dot, "k,k->"),
):
    rewrite("decompose", _op.default)(partial(einsum, _equation))


@rule_for(ours.scaled_mm.default)
def _scaled_mm(call: Call) -> FactorRule:
    a, b, scale_a, scale_b = (tuple(t.shape) for t in call.tensors)
    sizes = {"m": a[0], "k": a[1], "n": b[1]}
    # Scales for rows or columns are sharded with these; a single number is replicated.
    by_row = ["m", ""] if scale_a == (a[0], 1) else [""] * len(scale_a)
    by_column = ["", "n"] if scale_b == (1, b[1]) else [""] * len(scale_b)
    return call.rule(
        [["m", "k"], ["k", "n"], by_row, by_column],
        [["m", "n"]],
        sizes,
        reduce="k",
        contraction=True,
    )


@rule_for(ours.block_scaled_mm.default)
def _block_scaled_mm(call: Call) -> FactorRule:
    """Return a rule by which shards along k have whole blocks, with the scales of these."""
    k, blocks = call.tensors[0].shape[1], call.tensors[2].shape[1]
    is_whole = k == blocks * BLOCK  # otherwise the last block has fewer numbers
    row = ["q", "i"] if is_whole else ["k"]
    return call.rule(
        [["m", row], [row, "n"], ["m", "q"], ["n", "q"]],
        [["m", "n"]],
        {"q": blocks, "i": BLOCK} if is_whole else {"q": blocks, "k": k},
        reduce=row,
        replicated="i" if is_whole else "q k",
        contraction=True,
        # A padded scale must not be NaN.
        local=LocalForm(fill={2: 1.0, 3: 1.0}),
    )


rule(ours.plain_scales.default, "f -> r c", replicated="f r c")


@rewrite("decompose", aten._scaled_mm.default)
def _decompose_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> object:
    """Decline float8 results: a sum over shards would have too few bits."""
    if scale_result is not None or out_dtype is None or out_dtype.itemsize == 1:
        return DECLINED
    if scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu and a.dtype.itemsize == 1:
        (m, k), n = a.shape, b.shape[1]
        scales = (_plain(scale, rows, k) for scale, rows in ((scale_a, m), (scale_b, n)))
        product = block_scaled_mm(a, b, *scales, out_dtype)
    else:
        product = scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum)
    return product if bias is None else product + bias


@rewrite("decompose", aten._scaled_mm_v2.default)
def _decompose_by_recipe(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> object:
    """Decompose F.scaled_mm by the recipes that `torch._scaled_mm` has."""
    how = [*recipe_a, *swizzle_a], [*recipe_b, *swizzle_b]
    if contraction_dim or len(scale_a) != 1 or how[0] != how[1] or how[0] not in _recipes():
        return DECLINED
    scales = scale_a[0], scale_b[0]
    return _decompose_scaled_mm(a, b, *scales, bias, None, out_dtype, use_fast_accum)


def _recipes() -> list[list[int]]:
    """Return the recipes of `torch._scaled_mm`, each with its order of scales."""
    kinds, orders = F.ScalingType, F.SwizzleType
    blocks = [kinds.BlockWise1x32.value, orders.SWIZZLE_32_4_4.value]
    whole = [kinds.TensorWise.value, kinds.RowWise.value]
    return [blocks, *([kind] for kind in whole), *([k, orders.NO_SWIZZLE.value] for k in whole)]


def _plain(scale: Tensor, rows: int, k: int) -> Tensor:
    """Return a float32 scale for each block of each row, from the order that a card reads."""
    return plain_scales(scale.flatten(), rows, -(-k // BLOCK)).float()


@rewrite("wide", aten._scaled_mm.default, ours.scaled_mm.default)
def _wide_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *others: object, **named: object
) -> Tensor:
    bias = [x for x in (*others, named.get("bias")) if isinstance(x, Tensor)]
    if scale_a.dim() == 1 and scale_a.numel() > 1:
        (m, k), n = a.shape, b.shape[1]
        scales = (plain_scales(s, rows, -(-k // BLOCK)) for s, rows in ((scale_a, m), (scale_b, n)))
        return sum(bias, _wide_block_scaled_mm(a, b, *scales))
    return sum(bias, (a * scale_a) @ (b * scale_b))


@rewrite("wide", aten._scaled_mm_v2.default)
def _wide_by_recipe(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    scale_a, _, _, scale_b, _, _, *others = rest
    return _wide_scaled_mm(a, b, scale_a[0], scale_b[0], *others)


@rewrite("wide", ours.block_scaled_mm.default)
def _wide_block_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *_: object
) -> Tensor:
    return spread(a, scale_a) @ spread(b.t(), scale_b).t()


@rewrite("decompose", aten.vdot.default)
def _vdot(a: Tensor, b: Tensor) -> Tensor:
    return einsum("k,k->", a.conj_physical(), b)


@rewrite("decompose", aten.addmm.default, aten.baddbmm.default)
def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = einsum("mk,kn->mn", a, b) if a.dim() == 2 else einsum("bmk,bkn->bmn", a, b)
    product = product if alpha == 1 else product * alpha
    # As in PyTorch, beta=0 drops a bias even if it is NaN.
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


@rewrite("decompose", aten.addbmm.default)
def _addbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = einsum("bmk,bkn->mn", a, b) * alpha
    return product if beta == 0 else product + bias * beta


@rewrite("decompose", aten._trilinear.default)
def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Sum the product a * b * c over `sumdim`. Each lacks the dimensions in its `expand`."""
    letters = [chr(ord("a") + d) for d in range(a.dim() + len(expand1))]
    first, second, third, out = (
        "".join(x for d, x in enumerate(letters) if d not in dims)
        for dims in (expand1, expand2, expand3, sumdim)
    )
    terms = [
        (a, first, second + third + out),
        (b, second, first + third + out),
        (c, third, first + second + out),
    ]
    # einsum wants each letter in two tensors, so the others are summed before.
    (a, first), (b, second), (c, third) = (summed_alone(*term) for term in terms)
    shared = "".join(x for x in dict.fromkeys(first + second) if x in third + out)
    return einsum(f"{shared},{third}->{out}", einsum(f"{first},{second}->{shared}", a, b), c)


# A distance is a root over m: shards of m have no terms that add up to it.
rule(aten._cdist_forward.default, "... p m, ... r m -> ... p r", replicated="m")
rule(
    aten._cdist_backward.default,
    "... p r, ... p m, ... r m, ... p r -> ... p m",
    replicated="m",
    reduce="r",
)


# torchao's kernels that give each 32 numbers of a row or column a scale (MX): shards have whole
# blocks. They are there on machines that have them, so the rules stand under their names.


@rule_for("torchao::triton_to_mxfp8_dim0")
def _by_row(call: Call) -> FactorRule:
    """Return a rule for x [..., c] -> numbers [..., c], scales [..., c / block]."""
    *lead, columns = call.tensors[0].shape
    block = call.argument(1, "inner_block_size", BLOCK)
    names = [f"d{i}" for i in range(len(lead))]
    row = [*names, ["q", "i"]]
    sizes = {"q": columns // block, "i": block}
    return call.rule([row], [row, [*names, "q"]], sizes, replicated="i")


@rule_for("torchao::triton_to_mxfp8_dim1")
def _by_column(call: Call) -> FactorRule:
    """Return a rule for x [r, c] -> numbers [r, c], scales [c, r / block]."""
    block = call.argument(1, "inner_block_size", BLOCK)
    sizes = {"q": call.tensors[0].shape[0] // block, "i": block}
    both = [["q", "i"], "c"]
    return call.rule([both], [both, ["c", "q"]], sizes, replicated="i")


@rule_for("torchao::mxfp8_quantize")
def _by_both(call: Call) -> FactorRule:
    """Return a rule for x [r, c] -> numbers by row and by column, scales by row and by column.

    Results that are not asked for are empty.
    """
    rows, columns = call.tensors[0].shape
    by_row, by_column = call.argument(1, "rowwise"), call.argument(2, "colwise")
    row, column = (["rq", "ri"] if by_column else ["r"]), (["cq", "ci"] if by_row else ["c"])
    sizes = {"ri": BLOCK, "ci": BLOCK, "rq": rows // BLOCK, "cq": columns // BLOCK}
    whole = {name: size for name, size in sizes.items() if name in (*row, *column)}
    numbers = [row, column]
    return call.rule(
        [numbers],
        [
            numbers if by_row else [""],
            numbers if by_column else [""],
            [row, "cq", ""] if by_row else [""],
            [column, "rq"] if by_column else [""],
        ],
        {**whole, **({} if by_column else {"r": rows}), **({} if by_row else {"c": columns})},
        replicated=[name for name in ("ri", "ci") if name in whole],
    )
