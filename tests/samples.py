"""Arguments for every operation that has a rule: the prover splits each of their factors and
compares (test_prover.py).

Sizes are such that 2 and 3 devices divide some of them, leave padding in others, and leave whole
devices with nothing but padding in the small ones. A new rule needs a line here: sample(op,
arguments...) with functions that make them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchgspmd.features.tables  # noqa: F401 (registers all operations)
from torchgspmd.compat.operators import AbsentOperator, aten
from torchgspmd.features.attention.flex_capture import _functions
from torchgspmd.features.recurrences.affine_states import ALGEBRAS

ours = torch.ops.torchgspmd
SAMPLES: dict[Any, list[Callable[[], tuple[tuple, dict]]]] = {}


def sample(ops: Any, *args: Any, **kwargs: Any) -> None:
    """Registers one call of an operation or of several. A function among the arguments is called to
    make a tensor.
    """

    def make() -> tuple[tuple, dict]:
        torch.manual_seed(0)

        def value(a: Any) -> Any:
            return a() if callable(a) else [value(b) for b in a] if isinstance(a, list) else a

        return tuple(map(value, args)), {name: value(a) for name, a in kwargs.items()}

    for op in ops if isinstance(ops, (list, tuple)) else [ops]:
        if isinstance(op, AbsentOperator):  # doctor lists it
            continue
        SAMPLES.setdefault(op, []).append(make)


def unit(*shape: int) -> Callable[[], Tensor]:
    """Numbers between 0.1 and 0.9."""
    return lambda: torch.rand(*shape) * 0.8 + 0.1


def real(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def ints(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, shape)


def bools(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(*shape) > 0.5


def named(text: str, overload: str = "default") -> list[Any]:
    return [getattr(getattr(aten, name), overload) for name in text.split()]


# -------------------------------------------------------------------------------------- elementwise

sample(
    named(
        "abs acos angle asin asinh atan atanh ceil celu cos cosh deg2rad digamma elu erf erfc "
        "erfinv exp exp2 expm1 floor frac gelu "
        "hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p "
        "log2 logical_not logit mish "
        "nan_to_num neg positive reciprocal relu round rsqrt sgn sigmoid sign signbit silu sin "
        "sinc sinh softplus sqrt square tan "
        "tanh trunc clone conj_physical log_sigmoid_forward"
    ),
    unit(4, 5),
)
sample(named("abs neg relu sign"), ints(9, 7))
sample(aten.acosh.default, lambda: torch.rand(4, 5) + 1.1)
sample(aten.polygamma.default, 1, unit(4, 5))
sample(
    [
        *named(
            "atan2 floor_divide fmax fmin hypot logaddexp maximum minimum nextafter logical_and "
            "logical_or logical_xor sigmoid_backward "
            "tanh_backward"
        ),
        aten.pow.Tensor_Tensor,
        *named("copysign eq fmod ge gt le lt ne remainder xlogy add sub mul div", "Tensor"),
    ],
    unit(4, 5),
    unit(4, 5),
)
sample(
    [*named("add sub mul div", "Tensor"), aten.maximum.default, aten.atan2.default],
    real(4, 5),
    real(5),
)
sample([*named("add sub mul div", "Tensor"), aten.minimum.default], real(4, 1), real(3, 1, 5))
sample(named("eq ge gt le lt ne fmod remainder mul div add sub", "Scalar"), real(4, 5), 0.5)
sample(named("eq ge gt le lt ne mul add sub", "Scalar"), ints(5, 7), 2)
sample(aten.rsub.Scalar, real(4, 5), 2)
for decoupled in (False, True):
    sample(
        ours.adam.default,
        *(real(4, 5), real(4, 5), real(4, 5), unit(4, 5), lambda: torch.tensor(3.0)),
        *(lambda: torch.tensor(0.1), 0.9, 0.99, 0.1, 1e-8, decoupled, not decoupled),
    )
sample([aten.add.Tensor, aten.sub.Tensor], real(4, 5), real(5), alpha=0.5)
sample(named("bitwise_and bitwise_or bitwise_xor", "Scalar"), ints(9, 7), 5)
sample(named("bitwise_and bitwise_or bitwise_xor", "Tensor"), ints(9, 4, 5), ints(9, 5))
sample(aten.bitwise_not.default, bools(7))
sample(
    [
        aten.__lshift__.Tensor,
        aten.__rshift__.Tensor,
        aten.bitwise_left_shift.Tensor,
        aten.bitwise_right_shift.Tensor,
    ],
    ints(9, 4, 5),
    ints(3, 5),
)
sample(
    [
        aten.__lshift__.Scalar,
        aten.__rshift__.Scalar,
        aten.bitwise_left_shift.Tensor_Scalar,
        aten.bitwise_right_shift.Tensor_Scalar,
    ],
    ints(9, 4, 5),
    2,
)
sample(aten._conj_physical.default, lambda: torch.randn(4, 5, dtype=torch.complex64))
sample(aten.pow.Tensor_Scalar, unit(4, 5), 2.5)
sample([aten.pow.Scalar, aten.remainder.Scalar_Tensor], 2, unit(4, 5))
sample(aten.lerp.Scalar, real(4, 5), real(4, 5), 0.3)
sample(aten.lerp.Tensor, real(4, 5), real(4, 5), unit(5))
sample(aten.div.Tensor_mode, real(4, 5), unit(5), rounding_mode="floor")
sample(aten.div.Scalar_mode, real(4, 5), 0.3, rounding_mode="trunc")
sample(aten.clamp.default, real(4, 5), -0.5, 0.5)
sample(aten.clamp.Tensor, real(4, 5), lambda: torch.full((5,), -0.5), unit(4, 1))
sample(aten.clamp_max.default, real(4, 5), 0.5)
sample(aten.clamp_min.default, real(4, 5), -0.5)
sample(aten.masked_fill.Scalar, real(4, 5), bools(5), 7.0)
sample(aten.masked_fill.Scalar, real(4, 5), bools(5), 0.0)
sample(aten.masked_fill.Tensor, real(4, 5), bools(4, 1), lambda: torch.tensor(7.0))
sample(aten.where.self, bools(4, 1), real(4, 5), real(5))
sample(aten.where.ScalarOther, bools(4, 5), real(4, 5), 2.0)
sample(aten.where.ScalarSelf, bools(4, 5), 2.0, real(4, 5))
sample(aten._to_copy.default, real(4, 5), dtype=torch.float64)
sample(aten._to_copy.default, real(4, 5), dtype=torch.int64)
sample(aten._to_copy.default, real(4, 5), dtype=torch.bfloat16)
sample(aten.to.dtype, real(4, 5), torch.bfloat16)
sample(aten.threshold.default, real(4, 5), 0.1, 2.0)
sample(aten.threshold_backward.default, real(4, 5), real(4, 5), 0.1)
sample(aten.elu_backward.default, real(4, 5), 1.0, 1.0, 1.0, False, real(4, 5))
sample(aten.gelu_backward.default, real(4, 5), real(4, 5), approximate="tanh")
sample(named("hardsigmoid_backward hardswish_backward silu_backward"), real(4, 5), real(4, 5))
sample(aten.hardtanh_backward.default, real(4, 5), real(4, 5), -0.5, 0.5)
sample(aten.leaky_relu_backward.default, real(4, 5), real(4, 5), 0.1, False)
sample(aten.softplus_backward.default, real(4, 5), real(4, 5), 1.0, 20.0)
sample(
    aten.log_sigmoid_backward.default,
    real(4, 5),
    lambda: torch.full((4, 5), 0.5),
    lambda: torch.full((4, 5), -0.5).exp(),
)
sample(
    named(
        "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
        "special_entr special_erfcx "
        "special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 "
        "special_modified_bessel_i1 "
        "special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
        "special_spherical_bessel_j0 i0 hardshrink softshrink"
    ),
    unit(4, 5),
)
sample(
    named(
        "special_chebyshev_polynomial_t special_chebyshev_polynomial_u "
        "special_chebyshev_polynomial_v special_chebyshev_polynomial_w "
        "special_hermite_polynomial_h special_hermite_polynomial_he "
        "special_laguerre_polynomial_l special_legendre_polynomial_p "
        "special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
        "special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w"
    ),
    unit(4, 5),
    lambda: torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]),
)
sample(aten.special_zeta.default, lambda: torch.rand(4, 5) + 1.5, unit(5))
sample(named("igamma igammac heaviside logaddexp2 complex polar"), unit(4, 5), unit(4, 5))
sample(named("gcd lcm"), ints(9, 4, 5), ints(9, 5))
sample(aten.frexp.Tensor, real(4, 5))
sample(aten.round.decimals, real(4, 5), decimals=1)
sample(named("hardshrink_backward softshrink_backward"), real(4, 5), real(4, 5), 0.5)
sample(aten.view_as_real.default, lambda: torch.randn(4, 5, dtype=torch.complex64))
sample(aten.view_as_complex.default, real(4, 5, 2))
sample(ours.mark_sharding.default, real(4, 5), "m=2", "? ?")

# ------------------------------------------------------------------------------------- contractions

sample(ours.einsum.default, "mk,kn->mn", real(4, 7), real(7, 5))
sample(ours.einsum.default, "bsk,nk->bsn", real(2, 5, 7), real(4, 7))
sample(ours.einsum.default, "abst,tbax->axbs", real(2, 3, 5, 7), real(7, 3, 2, 4))
sample(ours.einsum.default, "k,k->", real(7), real(7))
sample(ours.einsum.default, "a,b->ab", real(4), real(5))


def float8(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape).to(torch.float8_e4m3fn)


_SCALED = float8(4, 7), float8(7, 5)
sample(ours.scaled_mm.default, *_SCALED, unit(1), unit(1), torch.bfloat16, False)
sample(ours.scaled_mm.default, *_SCALED, unit(4, 1), unit(1, 5), torch.bfloat16, True)


def powers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.exp2(torch.randint(-2, 3, shape).float())


def _of_blocks(k: int) -> tuple:
    """Return two matrices in float8, and a scale for each 32 numbers of a row or column."""
    blocks = -(-k // 32)
    return float8(4, k), float8(k, 5), powers(4, blocks), powers(5, blocks), torch.bfloat16


sample(ours.block_scaled_mm.default, *_of_blocks(96))
sample(ours.block_scaled_mm.default, *_of_blocks(48))  # the last block is not full
sample(ours.plain_scales.default, real(1024), 100, 6)


def ends(*numbers: int) -> Callable[[], Tensor]:
    return lambda: torch.tensor(numbers, dtype=torch.int32)


sample(ours.grouped_mm.default, real(7, 4), real(5, 4, 3), ends(2, 2, 5, 6, 7))
sample(ours.grouped_mm.default, real(8, 4), real(3, 4, 6), ends(0, 8, 8))
sample(ours.grouped_mm.default, real(7, 4), real(3, 4, 6), ends(1, 3, 6))
sample(ours.grouped_outer.default, real(7, 4), real(7, 3), ends(2, 2, 5, 6, 7))
sample(ours.grouped_outer.default, real(7, 4), real(7, 3), ends(0, 6))
sample(ours.within.default, torch.ones(4, 2, 3, dtype=torch.long), 1, None)
sample(ours.take_blocks.default, real(7, 4), ends(2, 2, 5, 6, 7), 2)
sample(ours.put_blocks.default, real(3, 7, 4), ends(2, 2, 5, 6, 7), 3)
sample(ours.block_mm.default, real(2, 7, 4), real(2, 3, 4, 5), ends(2, 2, 5, 6, 7), 2)
sample(ours.block_outer.default, real(4, 7, 4), real(4, 7, 3), ends(2, 4, 7), 4)
for choice in (lambda: torch.tensor([4, -1, 0, 2, 2, 0, 0]),):  # the group of each row, of five
    sample(ours.take_blocks.default, real(7, 4), choice, 2, 5)
    sample(ours.put_blocks.default, real(3, 7, 4), choice, 3, 5)
    sample(ours.block_mm.default, real(2, 7, 4), real(2, 3, 4, 5), choice, 2, 5)
    sample(ours.block_outer.default, real(2, 7, 4), real(2, 7, 3), choice, 2, 5)
for each in (lambda: torch.stack([x() for x in (ends(0, 3, 4), ends(2, 2, 6), ends(5, 7, 7))]),):
    sample(ours.grouped_mm.default, real(3, 7, 4), real(3, 3, 4, 5), each)
    sample(ours.grouped_outer.default, real(3, 7, 4), real(3, 7, 2), each)
    sample(ours.take_blocks.default, real(3, 7, 4), each, 2)
    sample(ours.put_blocks.default, real(3, 2, 7, 4), each, 2)
    sample(ours.block_mm.default, real(3, 2, 7, 4), real(3, 2, 2, 4, 5), each, 2)
    sample(ours.block_outer.default, real(3, 2, 7, 4), real(3, 2, 7, 2), each, 2)
    sample(ours.within.default, torch.ones(3, 4, 2, 3, dtype=torch.long), 1, None)
sample(ours.attention.default, real(2, 4, 5, 8), real(2, 4, 5, 8), real(2, 4, 5, 8), True, 0.3)
sample(ours.attention.default, real(3, 2, 5, 8), real(3, 2, 7, 8), real(3, 2, 7, 8), False, 0.3)


sample(ours.attention.default, real(3, 2, 5, 8), real(3, 2, 7, 8), real(3, 2, 7, 6), True, 0.3)


def _attention_backward(width: int, heads: int = 4, dropout: bool = False) -> tuple[tuple, dict]:
    """width: of the values. heads: of the keys."""
    torch.manual_seed(0)
    (q, grad), (k, v) = ([torch.randn(3, n, 5, size) for size in (8, width)] for n in (4, heads))
    options = (None, None, torch.tensor(7), 0.4) if dropout else ()
    out, lse = ours.attention.default(q, k, v, True, 0.3, *options)
    return (grad, q, k, v, out, lse, True, 0.3, *options), {}


SAMPLES[ours.attention_backward.default] = [
    partial(_attention_backward, 8, heads=2, dropout=True),
    *(partial(_attention_backward, width) for width in (8, 6)),
    partial(_attention_backward, 8, heads=2),
]


def seen(*shape: int) -> Callable[[], Tensor]:
    """A mask that leaves every query its first key, and some queries nothing more."""

    def make() -> Tensor:
        mask = torch.rand(*shape) < 0.5
        mask[..., 0] = True
        return mask

    return make


_GROUPS = real(2, 4, 5, 8), real(2, 2, 6, 8), real(2, 2, 6, 8)
sample(ours.attention.default, *_GROUPS, True, 0.3)
sample(ours.attention.default, *_GROUPS, False, 0.3, seen(2, 1, 5, 6))
sample(ours.attention.default, *_GROUPS, False, 0.3, real(4, 5, 6))
for _causal in (False, True):
    sample(ours.attention_parts.default, *_GROUPS, _causal, 0.3, None, [0, 0, 5, 5], 3)
_ZIGZAG = 0.3, 3, [0, 0, 12, 12]  # scale, shards, region
sample(ours.zigzag_attention.default, real(4, 12, 8), *(real(2, 12, 8),) * 2, *_ZIGZAG)


def _zigzag_attention_backward() -> tuple[tuple, dict]:
    torch.manual_seed(0)
    (q, grad), (k, v) = ([torch.randn(s) for _ in range(2)] for s in ((4, 12, 8), (2, 12, 8)))
    out, lse = ours.zigzag_attention.default(q, k, v, *_ZIGZAG)
    return (grad, q, k, v, out, lse, *_ZIGZAG), {}


SAMPLES[ours.zigzag_attention_backward.default] = [_zigzag_attention_backward]
sample(ours.attention_parts.default, *_GROUPS, False, 0.3, seen(2, 1, 1, 6), [0, 0, 5, 5], 3)
_DROPOUT = lambda: torch.tensor(1 << 40 | 5), 0.4  # noqa: E731
sample(ours.attention.default, *_GROUPS, True, 0.3, None, None, *_DROPOUT)
sample(ours.attention.default, *_GROUPS, False, 0.3, seen(2, 1, 5, 6), None, *_DROPOUT)
sample(ours.attention_parts.default, *_GROUPS, True, 0.3, None, [0, 0, 5, 5], 3, *_DROPOUT)

_FLEX = (
    "aten.ge.Tensor(q, k)",
    "aten.add.Tensor(score, aten.mul.Tensor(aten.index.Tensor(u0, [h]), aten.sub.Tensor(k, q)))",
    "grad",
    0.3,
)


def _flex_attention(backward: bool) -> tuple[tuple, dict]:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2, 4))
    slopes = torch.rand(4)
    if not backward:
        return (q, k, v, [slopes], *_FLEX), {}
    out, lse = ours.flex_attention.default(q, k, v, [slopes], *_FLEX)
    return (grad, q, k, v, out, lse, [slopes], *_FLEX), {}


SAMPLES[ours.flex_attention.default] = [partial(_flex_attention, False)]
SAMPLES[ours.flex_attention_backward.default] = [partial(_flex_attention, True)]


def _learned(count: int) -> tuple[tuple, dict]:
    """Return a call with so many buffers that need a gradient."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, *sizes, 32) for sizes in ((2, 6), (1, 8), (1, 8), (2, 6)))
    x = [torch.rand(size) for size in ((2, 6, 8), (2,), (2, 13), ())]
    for each in x[:count]:
        each.requires_grad_()

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * x[3] + x[0][h, i, j] + x[1][h] * x[2][h, i - j + 7]

    buffers, texts = _functions(q, score, lambda b, h, i, j: i >= j)
    functions = [x.detach() for x in buffers], *texts, 0.3
    out, lse = ours.flex_attention.default(q, k, v, *functions)
    return (grad, q, k, v, out, lse, *functions), {}


def _token_order() -> tuple[tuple, dict]:
    mask = "aten.eq.Tensor(aten.index.Tensor(u0, [q]), aten.index.Tensor(u0, [k]))"
    return ([torch.arange(24) // 5], mask, 1, 2, 24, 2, 6, 1.0), {}


SAMPLES[ours.token_order.default] = [_token_order]
for _count in range(1, 5):
    _op = getattr(ours, f"flex_attention_backward_{_count}").default
    SAMPLES[_op] = [partial(_learned, _count)]

sample(aten._cdist_forward.default, real(2, 4, 3), real(2, 5, 3), 2.0, None)
sample(aten._cdist_forward.default, real(4, 3), real(5, 3), 1.0, None)


def _cdist_backward(p: float) -> Callable[[], tuple[tuple, dict]]:
    def make() -> tuple[tuple, dict]:
        torch.manual_seed(0)
        x, y = torch.randn(2, 4, 3), torch.randn(2, 5, 3)
        return (torch.randn(2, 4, 5), x, y, p, aten._cdist_forward.default(x, y, p, None)), {}

    return make


SAMPLES[aten._cdist_backward.default] = [_cdist_backward(2.0), _cdist_backward(1.0)]

# -------------------------------------------------------------------------------------------- loops

for _op in (ours.loop_carry.default, ours.loop_stack.default, ours.loop_total.default):
    sample(_op, real(4, 5), "1x3")
sample(ours.loop_const.default, real(4, 5), "1x?")
sample(ours.loop_row.default, real(3, 4, 5), "1x3")
sample(ours.stage_send.default, real(4, 5), 1, [0, 0], "stage", "1f1b")
sample(ours.stage_head.default, real(4, 5))

# ----------------------------------------------------------------------------------- linear algebra


def definite(*shape: int) -> Callable[[], Tensor]:
    """Symmetric matrices with positive eigenvalues."""
    return lambda: (x := torch.rand(*shape)) @ x.mT + torch.eye(shape[-1])


def unsymmetric(*shape: int) -> Callable[[], Tensor]:
    """Matrices whose transposes have other factors."""
    return lambda: definite(*shape)() + torch.rand(*shape).triu(1)


def _after(op: Any, first: Callable[[], tuple], *args: Any) -> None:
    """A sample whose arguments another operation makes."""

    def make() -> tuple[tuple, dict]:
        torch.manual_seed(0)
        return (*first(), *(a() if callable(a) else a for a in args)), {}

    SAMPLES.setdefault(op, []).append(make)


sample(
    named(
        "_linalg_det _linalg_eigh _linalg_slogdet _linalg_svd linalg_cholesky_ex linalg_inv_ex "
        "linalg_lu linalg_lu_factor_ex "
        "linalg_qr linalg_matrix_exp geqrf"
    ),
    definite(5, 3, 3),
)
sample(
    named(
        "_linalg_det _linalg_slogdet _linalg_svd linalg_inv_ex linalg_lu linalg_lu_factor_ex "
        "linalg_qr linalg_matrix_exp geqrf"
    ),
    unsymmetric(5, 3, 3),
)
sample([ours.linear_sum_assignment.default], lambda: torch.rand(3, 5), False)
sample([aten._linalg_svd.default], definite(5, 3, 3), False, False)
sample(aten._linalg_eigh.default, definite(5, 3, 3), "L", False)
sample(aten.linalg_eig.default, definite(5, 3, 3))
sample(aten.linalg_ldl_factor_ex.default, definite(5, 3, 3))
sample(aten._linalg_solve_ex.default, definite(5, 3, 3), real(5, 3, 2))
sample(aten._linalg_solve_ex.default, definite(5, 3, 3), real(5, 3))
sample(aten._linalg_solve_ex.default, unsymmetric(5, 3, 3), real(5, 3, 2))
sample(aten.cholesky_solve.default, real(5, 3, 2), definite(5, 3, 3))
sample(aten.linalg_solve_triangular.default, definite(2, 5, 3, 3), real(5, 3, 2), upper=True)
sample(aten.triangular_solve.default, real(5, 3, 2), definite(5, 3, 3))
_after(
    aten.linalg_lu_solve.default, lambda: torch.linalg.lu_factor(definite(5, 3, 3)()), real(5, 3, 2)
)
_after(aten.lu_unpack.default, lambda: torch.linalg.lu_factor(definite(5, 3, 3)()))
_after(aten.lu_unpack.default, lambda: torch.linalg.lu_factor(definite(5, 3, 3)()), False)
_after(
    aten.linalg_ldl_solve.default,
    lambda: torch.linalg.ldl_factor(definite(5, 3, 3)()),
    real(5, 3, 2),
)
_after(aten.linalg_householder_product.default, lambda: torch.geqrf(definite(5, 3, 3)()))
_after(aten.ormqr.default, lambda: torch.geqrf(definite(5, 3, 3)()), real(5, 3, 2))
sample(aten._fft_r2c.default, real(4, 6, 5), [1], 0, True)
sample(aten._fft_r2c.default, real(4, 6, 5), [1], 0, False)
sample(aten.view.dtype, real(4, 6, 5), torch.int32)
sample(aten.view.dtype, real(4, 6, 5), torch.int16)
sample(aten._fft_c2c.default, lambda: torch.randn(4, 6, 5, dtype=torch.complex64), [0, 2], 0, True)
sample(aten._fft_c2r.default, lambda: torch.randn(4, 6, 5, dtype=torch.complex64), [1], 2, 10)

sample(
    ours.ctc_losses.default,
    lambda: torch.randn(7, 4, 5).log_softmax(-1),
    lambda: torch.randint(1, 5, (4, 3)),
    lambda: torch.tensor([7, 6, 7, 5]),
    lambda: torch.tensor([3, 2, 1, 3]),
    0,
    False,
)
sample(
    ours.ctc_losses.default,
    lambda: torch.randn(7, 4, 5).log_softmax(-1),
    lambda: torch.randint(1, 5, (9,)),
    lambda: torch.tensor([7, 6, 7, 5]),
    lambda: torch.tensor([3, 2, 1, 3]),
    0,
    True,
)

# ----------------------------------------------------------------------------------- making tensors

sample([aten.full.default], [4, 5], 2.0)
sample([aten.zeros.default, aten.ones.default], [4, 5])
sample(aten.empty.memory_format, [0, 5])
sample(aten.scalar_tensor.default, 3.0)
sample(aten.arange.start_step, 1, 12, 2)
sample(aten.arange.start_step, 0.5, 3.0, 0.5)
sample(ours.draw_seed.default)
sample(ours.draw_seeds.default, [2, 3])
for _native in (False, True):
    sample(
        ours.uniform.default,
        lambda: torch.tensor(1 << 40),
        1,
        [1],
        [0],
        [1],
        torch.float32,
        torch.device("cpu"),
        _native,
    )
for _dtype in (torch.float32, torch.float64, torch.bfloat16):
    sample(
        ours.uniform.default,
        lambda: torch.tensor(3 << 40),
        1,
        [4, 5, 7],
        [0, 0, 0],
        [4, 5, 7],
        _dtype,
        torch.device("cpu"),
        False,
    )
sample(aten.native_dropout_backward.default, real(4, 5), bools(4, 5), 2.0)
sample(
    ours.keep_mask.default,
    lambda: torch.tensor(5 << 40),
    0.3,
    [4, 5, 7],
    [0, 0, 0],
    [4, 5, 7],
    torch.device("cpu"),
    False,
)
sample(
    [aten.poisson.default, aten._standard_gamma.default, aten._sample_dirichlet.default], unit(4, 5)
)
sample(aten.binomial.default, lambda: torch.full((4, 5), 9.0), unit(4, 5))

# --------------------------------------------------------------------------------------- looking up

sample(aten.embedding.default, real(7, 4), ints(7, 3, 5))
sample(aten.embedding.default, real(4, 5), ints(4, 5))
sample(aten.embedding_dense_backward.default, real(3, 5, 4), ints(7, 3, 5), 7, -1, False)
sample(aten.embedding_dense_backward.default, real(5, 4), ints(7, 5), 7, 2, False)
sample(aten.embedding_dense_backward.default, real(9, 4), ints(7, 9), 7, -1, True)
sample(aten.gather.default, real(4, 7), 1, ints(7, 4, 3))
sample(aten.gather.default, real(7, 5), 0, ints(7, 3, 4))
sample(aten.scatter.value, real(4, 7), 1, ints(7, 4, 1), 2.0)
sample(aten.scatter.value, real(7, 5), -2, ints(7, 2, 5), 2.0)
sample(aten.index_select.default, real(4, 7, 2), 1, ints(7, 5))
sample(aten.index_select.default, real(7, 2), 0, ints(7, 3))

sample(aten.searchsorted.Tensor, lambda: torch.linspace(-1, 1, 5), real(4, 7))
sample(aten.searchsorted.Tensor, lambda: torch.randn(4, 5).sort(-1)[0], real(4, 7), right=True)
sample(
    aten.searchsorted.Tensor,
    lambda: torch.tensor([-1, 0, 3, 2**63 - 1]),
    lambda: torch.tensor([-2, 0, 3, 2**63 - 1]),
    right=True,
)
sample(
    aten.searchsorted.Tensor,
    lambda: torch.linspace(-1, 1, 5),
    lambda: torch.tensor([torch.inf, -torch.inf, torch.nan, 0.5]),
    right=True,
)
sample(
    aten.searchsorted.Tensor,
    lambda: torch.tensor([0.4, -1.0, 0.2]),
    real(7),
    sorter=lambda: torch.tensor([1, 2, 0]),
)
sample(aten.bucketize.Tensor, real(4, 7), lambda: torch.linspace(-1, 1, 5))
sample(aten.fake_quantize_per_tensor_affine_cachemask.default, real(4, 7), 0.1, 0, -8, 7)
sample(
    aten.fake_quantize_per_channel_affine_cachemask.default,
    real(4, 7),
    lambda: torch.rand(7) + 0.1,
    lambda: torch.zeros(7, dtype=torch.int32),
    1,
    -8,
    7,
)
sample(aten.histc.default, real(4, 7), 5, -1, 1)
sample(aten.histc.default, real(9), 3, -1, 1)
sample(
    [aten._embedding_bag.default, aten._embedding_bag_forward_only.default],
    real(7, 4),
    ints(7, 6),
    lambda: torch.tensor([0, 2, 2]),
)
sample(
    [aten._embedding_bag.default], real(7, 4), ints(7, 6), lambda: torch.tensor([0, 2, 2]), False, 2
)
sample(
    [aten._embedding_bag.default, aten._embedding_bag_forward_only.default],
    real(7, 4),
    ints(7, 6),
    lambda: torch.tensor([0, 2, 4]),
    False,
    0,
    False,
    unit(6),
)
for _bag in (None, lambda: torch.tensor([0, 2, 2, 1, 0, 2, 0])):
    _index = [ints(7, 7), bools(7)] if _bag else [ints(7, 5, 3), bools(5, 3)]
    sample(ours.bag_max.default, real(7, 4), *_index, _bag, 5)
    sample(ours.bag_first.default, real(7, 4), *_index, _bag, real(5, 4), torch.int32)
sample(
    aten.grid_sampler_2d_backward.default,
    real(3, 2, 5, 4),
    real(3, 2, 4, 5),
    unit(3, 5, 4, 2),
    0,
    0,
    False,
    [True, True],
)
sample(
    aten.grid_sampler_2d_backward.default,
    real(3, 2, 5, 4),
    real(3, 2, 4, 5),
    unit(3, 5, 4, 2),
    0,
    1,
    True,
    [True, True],
)
sample(
    aten.grid_sampler_3d_backward.default,
    real(2, 8, 4, 5, 4),
    real(2, 8, 2, 2, 3),
    unit(2, 4, 5, 4, 3),
    0,
    0,
    False,
    [True, True],
)

# ------------------------------------------------------------------------------------ normalization

sample([aten._softmax.default, aten._log_softmax.default], real(4, 5, 7), 1, False)
sample([aten._softmax.default, aten._log_softmax.default], real(4, 5), -1, False)
sample(aten._safe_softmax.default, real(4, 5), -1)
sample(
    aten._safe_softmax.default,
    lambda: torch.randn(4, 5).masked_fill(torch.eye(4, 1) > 0, -float("inf")),
    -1,
)
sample(
    [aten._softmax_backward_data.default],
    real(4, 5),
    lambda: torch.randn(4, 5).softmax(1),
    1,
    torch.float32,
)
sample(
    [aten._log_softmax_backward_data.default],
    real(4, 5),
    lambda: torch.randn(4, 5).log_softmax(0),
    0,
    torch.float32,
)
sample(aten.native_layer_norm.default, real(4, 5, 7), [7], real(7), real(7), 1e-5)
sample(aten.native_layer_norm.default, real(3, 4, 5), [4, 5], None, None, 1e-5)
sample(aten.native_layer_norm.default, real(4, 7), [7], real(7), None, 1e-5)


def _layer_norm_backward(weighted: bool, mask: list[bool]) -> Callable[[], tuple[tuple, dict]]:
    def make() -> tuple[tuple, dict]:
        torch.manual_seed(0)
        x, grad, weight, bias = (
            torch.randn(3, 5, 7),
            torch.randn(3, 5, 7),
            torch.randn(7),
            torch.randn(7),
        )
        weight, bias = (weight, bias) if weighted else (None, None)
        _, mean, rstd = aten.native_layer_norm.default(x, [7], weight, bias, 1e-5)
        return (grad, x, [7], mean.contiguous(), rstd.contiguous(), weight, bias, mask), {}

    return make


SAMPLES[aten.native_layer_norm_backward.default] = [
    _layer_norm_backward(True, [True, True, True]),
    _layer_norm_backward(False, [True, False, False]),
    _layer_norm_backward(True, [False, True, True]),
]

# --------------------------------------------------------------------------------------- reductions

sample([aten.sum.dim_IntList, aten.amax.default, aten.amin.default], real(4, 5, 7), [1])
sample([aten.sum.dim_IntList, aten.amax.default, aten.amin.default], real(4, 5, 7), [0, -1], True)
sample(
    [aten.amax.default, aten.amin.default, aten.sum.dim_IntList],
    lambda: torch.randint(-9, 9, (4, 5)),
    [0],
)
sample(aten.sum.dim_IntList, real(4, 5), [])
sample(aten.sum.dim_IntList, real(4, 5), None)
sample(aten.sum.dim_IntList, bools(4, 5), [0])
sample([aten.amax.default, aten.amin.default], bools(4, 5), [0])
sample(aten.prod.dim_int, real(4, 5), 1)
sample(named("sum max min prod median nanmedian"), real(4, 5))
sample(named("sum max min prod"), lambda: torch.randint(1, 4, (5,)))
sample(aten.sum.dim_IntList, real(4, 5), [0], dtype=torch.int64)
sample([aten.argmax.default, aten.argmin.default], real(4, 5))
sample([aten.argmax.default, aten.argmin.default], real(4, 5), 1, True)
sample(
    [aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default],
    real(4, 5, 7),
    1,
)
sample(aten.kthvalue.default, real(4, 5), 2, 1)
sample([aten.kthvalue.default], real(4, 5, 7), 3)
sample(aten.mode.default, ints(3, 4, 5, 7))

# -------------------------------------------------------------------------------------- rearranging

VIEWS = named("view _unsafe_view reshape")
sample(VIEWS, real(4, 6), [2, 2, 3, 2])
sample(VIEWS, real(2, 6, 5), [12, 5])
sample(VIEWS, real(6, 4), [2, 12])
sample(VIEWS, real(5, 7), [35])
sample(VIEWS, real(5, 6), [5, 1, 2, 3])
sample(VIEWS, real(4, 6), [3, 8])
sample(aten.permute.default, real(4, 5, 7), [2, 0, 1])
sample(aten.permute.default, real(4, 5, 7), [-1, 0, -2])
sample(aten.t.default, real(4, 5))
sample(aten.t.default, real(4))
sample(aten.transpose.int, real(4, 5, 7), 0, -1)
sample(aten.expand.default, real(4, 1, 5), [3, 4, 7, 5])
sample(aten.expand.default, real(4, 5), [-1, -1])
sample(aten.unsqueeze.default, real(4, 5), 1)
sample(aten.squeeze.default, real(4, 1, 5))
sample(aten.squeeze.dim, real(4, 1, 5), 1)
sample(aten.squeeze.dim, real(4, 5), 1)
sample(aten.squeeze.dims, real(1, 4, 1, 5), [0, 2])
sample(aten.cat.default, [real(4, 5), real(4, 2), real(4, 4)], 1)
sample(aten.cat.default, [real(4, 5), real(2, 5)])
sample(aten.cat.default, [real(7, 5), real(2, 5), real(1, 5)])
sample(aten.stack.default, [real(4, 5), real(4, 5)], 1)
sample(aten.split.Tensor, real(4, 5), 2, 1)
sample(aten.split_with_sizes.default, real(4, 5), [1, 4], 1)
sample(aten.unbind.int, real(4, 5, 3), 2)
sample(aten.flip.default, real(4, 5, 7), [1])
sample(aten.flip.default, real(4, 5, 7), [0, 2])
sample(aten.roll.default, real(4, 5, 7), [2], [1])
sample(aten.roll.default, real(4, 5), [3])
sample(aten.roll.default, real(7, 5), [-2, 1], [0, -1])
sample(ours.ring_rows.default, real(4, 7), 1, -2, 10)
sample(ours.ring_rows.default, real(6, 5), 0, 4, 6)
for _scan in ("cumsum", "cumprod", "logcumsumexp"):
    sample(torch.ops.torchgspmd.suffix_scan.default, real(4, 5, 7), 1, _scan)
for _reverse in (False, True):
    _states = real(7, 4, 5, 3), real(4, 5, 3), _reverse
    for _algebra in ALGEBRAS:
        _scale = real(7, 4, 5, 5 if "matrices" in _algebra else 3)
        sample(ours.affine_states.default, _scale, *_states, _algebra)
sample(named("cumsum cumprod logcumsumexp cummax cummin"), real(4, 5, 7), 1)
sample(ours.carried_gradient.default, real(4, 5, 7), bools(4, 5, 7), 1)
for _size in (5, 12):
    sample(
        ours.extreme_gradient.default,
        real(4, _size),
        lambda size=_size: torch.randint(0, 3, (4, size)).cummax(1).indices,
        1,
    )
sample(aten.sort.default, real(4, 5), 1, True)
sample(aten.sort.stable, real(4, 5), stable=True, dim=0)
sample(aten.topk.default, real(4, 5), 2)
sample(aten.topk.default, real(4, 5), 2, 0)
sample([aten.tril.default, aten.triu.default], real(3, 4, 5))
sample([aten.tril.default, aten.triu.default], real(3, 4, 5), 1)
sample(aten.slice.Tensor, real(4, 5), 1, 1, 4)
sample(aten.slice.Tensor, real(4, 7), 1, 0, 7, 2)
sample(aten.slice.Tensor, real(4, 5), 0, 0, 99)
sample(aten.slice.Tensor, real(7, 5), 0, -4, 6)
sample(aten.slice.Tensor, real(4, 5), 1, 3, 4)
sample(aten.slice_backward.default, real(4, 3), [4, 7], 1, 1, 6, 2)
sample(aten.slice_backward.default, real(4, 3), [4, 10], 1, 0, 9, 3)
sample(aten.slice_backward.default, real(4, 5), [4, 9], 1, 2, 7, 1)
sample(aten.slice_backward.default, real(4, 1), [4, 9], 1, 2, 3, 1)
sample(aten.constant_pad_nd.default, real(4, 5), [1, 2])
sample(aten.constant_pad_nd.default, real(4, 5), [0, 0, 2, -1], 3.0)
sample(aten.select.int, real(4, 5, 7), 1, 2)
sample(aten.select.int, real(4, 5, 7), -1, -1)
sample(aten.select_backward.default, real(4, 7), [4, 5, 7], 1, 2)

# --------------------------------------------------------------------------------- writing by index

sample(
    aten.scatter.src,
    real(4, 7),
    1,
    lambda: torch.rand(4, 3).mul(0).long() + torch.tensor([5, 0, 2]),
    real(4, 3),
)
sample(aten.scatter.reduce, unit(4, 7), 1, ints(7, 4, 3), unit(4, 3), reduce="add")
sample(aten.scatter.value_reduce, unit(4, 7), 1, ints(7, 4, 3), 2.0, reduce="multiply")
sample(aten.scatter_add.default, real(4, 7), 1, ints(7, 4, 5), real(4, 5))
sample(aten.scatter_add.default, real(7, 5), 0, ints(7, 3, 5), real(4, 5))
for _how in ("sum", "prod", "mean", "amax", "amin"):
    sample(aten.scatter_reduce.two, unit(4, 7), 1, ints(7, 4, 5), unit(4, 5), _how)
    sample(
        aten.scatter_reduce.two, unit(4, 7), 1, ints(7, 4, 5), unit(4, 5), _how, include_self=False
    )
sample(aten.index_add.default, real(4, 7, 2), 1, ints(7, 5), real(4, 5, 2))
sample(aten.index_add.default, real(7, 2), 0, ints(7, 5), real(5, 2), alpha=0.5)
sample(aten.index_copy.default, real(4, 7, 2), 1, lambda: torch.randperm(7)[:5], real(4, 5, 2))
sample(aten.index_fill.int_Scalar, real(4, 7), 1, ints(7, 3), 2.0)
sample(aten.index_reduce.default, real(4, 7, 2), 1, ints(7, 5), real(4, 5, 2), "amax")
sample(aten.index_fill.int_Tensor, real(4, 7), 1, ints(7, 3), lambda: torch.tensor(2.0))
sample(
    [aten.index_put.default, aten._unsafe_index_put.default],
    real(4, 7),
    [lambda: torch.tensor([3, 1])],
    real(2, 7),
)
sample(
    [aten.index_put.default, aten._unsafe_index_put.default],
    real(7, 4),
    [ints(7, 5)],
    real(5, 4),
    True,
)
sample([aten.index_put.default], real(7, 4, 5), [ints(7, 5), ints(4, 5)], real(5, 5), True)
sample(
    [aten.index_put.default, aten._unsafe_index_put.default],
    real(4, 7),
    [lambda: torch.tensor([True, False, True, False])],
    real(7),
)
sample([aten.index.Tensor, aten._unsafe_index.Tensor], real(7, 4), [ints(7, 5)])
sample([aten.index.Tensor, aten._unsafe_index.Tensor], real(4, 7, 5), [None, ints(7, 3, 2)])
sample([aten.index.Tensor], real(7, 4, 5), [ints(7, 6), ints(4, 6)])
sample([aten.index.Tensor], real(7, 4, 5), [ints(7, 6), None, ints(5, 6)])

# ------------------------------------------------------------------------- convolutions and windows


def _backward_of(forward: Any, backward: Any, first: Callable, *args: Any) -> None:
    """A sample of grad, x, arguments: of pads and adaptive pools."""

    def make() -> tuple[tuple, dict]:
        torch.manual_seed(0)
        x = first()
        out = forward(x, *args)
        grad = torch.randn_like(out[0] if isinstance(out, tuple) else out)
        return (grad, x, out[1]) if isinstance(out, tuple) else (grad, x, *args), {}

    sample(forward, first, *args)
    SAMPLES.setdefault(backward, []).append(make)


def _convolution(
    x: tuple,
    w: tuple,
    groups: int = 1,
    stride: int = 1,
    padding: int = 0,
    transposed: bool = False,
    bias: bool = True,
) -> None:
    n = len(x) - 2
    tail = ([stride] * n, [padding] * n, [1] * n, transposed, [0] * n, groups)
    channels = w[1] * groups if transposed else w[0]
    sample(aten.convolution.default, real(*x), real(*w), real(channels) if bias else None, *tail)

    def make() -> tuple[tuple, dict]:
        torch.manual_seed(0)
        data, weight = torch.randn(x), torch.randn(w)
        grad = torch.randn_like(aten.convolution.default(data, weight, None, *tail))
        return (grad, data, weight, [channels] if bias else None, *tail, [True, True, bias]), {}

    SAMPLES.setdefault(aten.convolution_backward.default, []).append(make)


sample(ours.join_rows.default, real(3, 7, 5), 1)
sample(ours.join_rows.default, real(6, 4, 2), 0)
sample(ours.split_rows.default, real(3, 35), 1, 5)
sample(ours.split_rows.default, real(24, 2), 0, 4)
_convolution((3, 4, 9), (5, 4, 3), padding=1)
_convolution((3, 4, 8, 6), (5, 4, 3, 3), padding=1, stride=2)
_convolution((3, 4, 8, 6), (6, 4, 2, 2), stride=2, bias=False)
_convolution((2, 6, 7, 5), (4, 3, 3, 3), groups=2)
_convolution((2, 4, 7, 5), (4, 1, 3, 3), groups=4, padding=1)
_convolution((2, 4, 5, 4), (4, 5, 2, 2), transposed=True, stride=2)
_convolution((2, 4, 5, 4, 4), (3, 4, 2, 2, 2))


def _sizes(n: int, size: int) -> tuple[int, ...]:
    return (3, 4, *[size] * n)


for _n in (1, 2, 3):
    for _pad in ("reflection", "replication"):
        _backward_of(
            getattr(aten, f"{_pad}_pad{_n}d").default,
            getattr(aten, f"{_pad}_pad{_n}d_backward").default,
            real(*_sizes(_n, 4)),
            [1, 2] * _n,
        )
    for _kind in [f"upsample_nearest{_n}d", f"_upsample_nearest_exact{_n}d"]:
        sample(getattr(aten, _kind).default, real(*_sizes(_n, 7)), [11] * _n)
        sample(
            getattr(aten, f"{_kind}_backward").default,
            real(*_sizes(_n, 11)),
            [11] * _n,
            list(_sizes(_n, 7)),
        )
for _kind, _n in [
    ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2),
    ("upsample_bicubic2d", 2),
    ("_upsample_bilinear2d_aa", 2),
    ("_upsample_bicubic2d_aa", 2),
    ("upsample_trilinear3d", 3),
]:
    sample(getattr(aten, _kind).default, real(*_sizes(_n, 7)), [11] * _n, False)
    sample(
        getattr(aten, f"{_kind}_backward").default,
        real(*_sizes(_n, 11)),
        [11] * _n,
        list(_sizes(_n, 7)),
        False,
    )
for _n in (2, 3):
    _backward_of(
        getattr(aten, f"adaptive_max_pool{_n}d").default,
        getattr(aten, f"adaptive_max_pool{_n}d_backward").default,
        real(*_sizes(_n, 5)),
        [2] * _n,
    )

    def _adaptive_average(n: int = _n) -> tuple[tuple, dict]:
        torch.manual_seed(0)
        return (torch.randn(_sizes(n, 2)), torch.randn(_sizes(n, 5))), {}

    sample(getattr(aten, f"_adaptive_avg_pool{_n}d").default, real(*_sizes(_n, 5)), [2] * _n)
    SAMPLES[getattr(aten, f"_adaptive_avg_pool{_n}d_backward").default] = [_adaptive_average]
    _window = ([3] * _n, [2] * _n, [1] * _n)
    sample(getattr(aten, f"avg_pool{_n}d").default, real(*_sizes(_n, 6)), *_window, False, True)
    sample(
        getattr(aten, f"avg_pool{_n}d_backward").default,
        real(*_sizes(_n, 3)),
        real(*_sizes(_n, 6)),
        *_window,
        False,
        False,
        None,
    )

    def _max_backward(n: int = _n, window: tuple = _window) -> tuple[tuple, dict]:
        torch.manual_seed(0)
        x = torch.randn(_sizes(n, 6))
        out, where = getattr(aten, f"max_pool{n}d_with_indices").default(x, *window)
        return (torch.randn_like(out), x, *window, [1] * n, False, where), {}

    sample(getattr(aten, f"max_pool{_n}d_with_indices").default, real(*_sizes(_n, 6)), *_window)
    SAMPLES[getattr(aten, f"max_pool{_n}d_with_indices_backward").default] = [_max_backward]

    def _unpool(n: int = _n) -> tuple[tuple, dict]:
        torch.manual_seed(0)
        out, where = getattr(aten, f"max_pool{n}d_with_indices").default(
            torch.randn(_sizes(n, 4)), [2] * n, [2] * n
        )
        return (out, where, [4] * n, *([[2] * n, [0] * n] if n == 3 else [])), {}

    SAMPLES[getattr(aten, f"max_unpool{_n}d").default] = [_unpool]

    def _fractional(n: int = _n, backward: bool = False, batch: bool = True) -> tuple[tuple, dict]:
        torch.manual_seed(0)
        x, samples = torch.randn(_sizes(n, 6)[not batch :]), torch.rand(3 if batch else 1, 4, n)
        if not backward:
            return (x, [2] * n, [3] * n, samples), {}
        out, where = getattr(aten, f"fractional_max_pool{n}d").default(x, [2] * n, [3] * n, samples)
        return (torch.randn_like(out), x, [2] * n, [3] * n, where), {}

    SAMPLES[getattr(aten, f"fractional_max_pool{_n}d").default] = [
        _fractional,
        lambda n=_n: _fractional(n, batch=False),
    ]
    SAMPLES[getattr(aten, f"fractional_max_pool{_n}d_backward").default] = [
        lambda n=_n: _fractional(n, True)
    ]
sample(aten.grid_sampler_2d.default, real(3, 4, 5, 5), unit(3, 2, 3, 2), 0, 0, False)
sample(aten.grid_sampler_3d.default, real(3, 4, 5, 5, 5), unit(3, 2, 3, 2, 3), 0, 0, False)
sample(aten.slice_scatter.default, real(4, 7), real(4, 3), 1, 2, 5)
sample(aten.slice_scatter.default, real(4, 7), real(4, 3), 1, 1, 7, 2)
sample(aten.slice_scatter.default, real(4, 7), real(4, 1), 1, 6, 7)
sample(aten.slice_scatter.default, real(4, 7), real(4, 7), 1, 0, 7)
