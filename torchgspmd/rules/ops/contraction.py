"""Matrix products. All become the einsum of custom_ops/nd.py, whose equation is its rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat.operators import aten
from ...custom_ops.nd import einsum, split_equation, summed_alone
from ..notation import Call, Rule, make_rule
from ..registry import decomposition, rule, rule_for

ours = torch.ops.torchgspmd


@rule_for(ours.einsum.default)
def _einsum(call: Call) -> Rule:
    a, b, out = split_equation(call.args[0])
    x, y = call.tensors
    sizes = {**dict(zip(a, x.shape)), **dict(zip(b, y.shape))}
    summed = {letter: "sum" for letter in sizes if letter not in out}
    return make_rule(
        [[(c,) for c in a], [(c,) for c in b]],
        [[(c,) for c in out]],
        sizes,
        reduce=summed,
        linear=[[0], [1]],
        contraction=True,
        text=f"{' '.join(a)}, {' '.join(b)} -> {' '.join(out)}",
    )


rule(
    ours.attention.default,
    "b h s d, b h t d, b h t e -> b h s e, b h s",
    whole="s t d e",
    contraction=True,
)
rule(
    ours.attention_backward.default,
    "b h s e, b h s d, b h t d, b h t e, b h s e, b h s -> b h s d, b h t d, b h t e",
    whole="s t d e",
    contraction=True,
)


@decomposition(aten.mm.default)
def _mm(a: Tensor, b: Tensor) -> Tensor:
    return einsum("mk,kn->mn", a, b)


@decomposition(aten.bmm.default)
def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return einsum("bmk,bkn->bmn", a, b)


@decomposition(aten.mv.default)
def _mv(a: Tensor, b: Tensor) -> Tensor:
    return einsum("mk,k->m", a, b)


@decomposition(aten.dot.default)
def _dot(a: Tensor, b: Tensor) -> Tensor:
    return einsum("k,k->", a, b)


@decomposition(aten.vdot.default)
def _vdot(a: Tensor, b: Tensor) -> Tensor:
    return einsum("k,k->", a.conj_physical(), b)


@decomposition(aten.addmm.default, aten.baddbmm.default)
def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = einsum("mk,kn->mn", a, b) if a.dim() == 2 else einsum("bmk,bkn->bmn", a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


@decomposition(aten.addbmm.default)
def _addbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = einsum("bmk,bkn->mn", a, b) * alpha
    return product if beta == 0 else product + bias * beta


@decomposition(aten._trilinear.default)
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
    """Sum the product of a, b and c over `sumdim`. Each lacks the dimensions in its `expand`."""
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
    (a, first), (b, second), (c, third) = (summed_alone(*term) for term in terms)
    shared = "".join(x for x in dict.fromkeys(first + second) if x in third + out)
    return einsum(f"{shared},{third}->{out}", einsum(f"{first},{second}->{shared}", a, b), c)


rule(aten._cdist_forward.default, "... p m, ... r m -> ... p r", whole="m")
rule(
    aten._cdist_backward.default,
    "... p r, ... p m, ... r m, ... p r -> ... p m",
    whole="m",
    reduce="r",
)
