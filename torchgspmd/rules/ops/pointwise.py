"""Elementwise operations. Dimensions align from the right, and those of size 1 broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...annotate import mark_sharding_op
from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import rule, rule_for
from ..rewrites import rewrite


def broadcast_dims(
    shape: Sequence[int], result: Sequence[int], names: Sequence[str] = ()
) -> list[str]:
    """Return the factors of an operand that broadcasts to a result with factors d0, d1, ..."""
    offset = len(result) - len(shape)
    names = (names or factors("d", len(result)))[offset:]
    return [name if n == m else "" for name, n, m in zip(names, shape, result[offset:])]


def quotient(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (dividend, divisor) of a division of two values, else None."""
    return (
        node.args
        if node.target is aten.div.Tensor and all(isinstance(n, fx.Node) for n in node.args)
        else None
    )


def pointwise_rule(call: Call, linear: Sequence[Sequence[int]] = (), **keywords: Any) -> FactorRule:
    """Return the rule of an elementwise call. linear: see FactorRule."""
    shape = tuple(call.results[0].shape)
    return call.rule(
        [broadcast_dims(t.shape, shape) for t in call.tensors],
        [broadcast_dims(t.shape, shape) for t in call.results],
        dict(zip(factors("d", len(shape)), shape)),
        linear=[g for g in linear if max(g) < len(call.tensors)],  # x + 1 is not linear in x
        **keywords,
    )


def pointwise(*ops: OpOverload, linear: Sequence[Sequence[int]] = ()) -> None:
    """Register elementwise operations. linear: see FactorRule."""
    rule_for(*ops)(lambda call: pointwise_rule(call, linear))


pointwise(
    aten.abs.default,
    aten.acos.default,
    aten.acosh.default,
    aten.angle.default,
    aten.asin.default,
    aten.asinh.default,
    aten.atan.default,
    aten.atan2.default,
    aten.atanh.default,
    aten.bitwise_and.Scalar,
    aten.bitwise_and.Tensor,
    aten.bitwise_not.default,
    aten.bitwise_or.Scalar,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Scalar,
    aten.bitwise_xor.Tensor,
    aten.ceil.default,
    aten.celu.default,
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_max.default,
    aten.clamp_min.default,
    aten.copysign.Tensor,
    aten.cos.default,
    aten.cosh.default,
    aten.deg2rad.default,
    aten.digamma.default,
    aten.div.Scalar_mode,
    aten.elu.default,
    aten.elu_backward.default,
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.erf.default,
    aten.erfc.default,
    aten.erfinv.default,
    aten.exp.default,
    aten.exp2.default,
    aten.expm1.default,
    aten.floor.default,
    aten.fmax.default,
    aten.fmin.default,
    aten.fmod.Scalar,
    aten.frac.default,
    aten.ge.Scalar,
    aten.ge.Tensor,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.gt.Scalar,
    aten.gt.Tensor,
    aten.hardsigmoid.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardtanh.default,
    aten.hardtanh_backward.default,
    aten.hypot.default,
    aten.isfinite.default,
    aten.isinf.default,
    aten.isnan.default,
    aten.le.Scalar,
    aten.le.Tensor,
    aten.leaky_relu.default,
    aten.leaky_relu_backward.default,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.lgamma.default,
    aten.log.default,
    aten.log10.default,
    aten.log1p.default,
    aten.log2.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten.logaddexp.default,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.logit.default,
    aten.lt.Scalar,
    aten.lt.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.mish.default,
    aten.nan_to_num.default,
    aten.ne.Scalar,
    aten.ne.Tensor,
    aten.nextafter.default,
    aten.polygamma.default,
    aten.pow.Tensor_Scalar,
    aten.reciprocal.default,
    aten.relu.default,
    aten.remainder.Scalar,
    aten.round.default,
    aten.rsqrt.default,
    aten.rsub.Scalar,
    aten.sgn.default,
    aten.sigmoid.default,
    aten.sigmoid_backward.default,
    aten.sign.default,
    aten.signbit.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.sin.default,
    aten.sinc.default,
    aten.sinh.default,
    aten.softplus.default,
    aten.softplus_backward.default,
    aten.sqrt.default,
    aten.tan.default,
    aten.tanh.default,
    aten.tanh_backward.default,
    aten.threshold.default,
    aten.threshold_backward.default,
    aten.trunc.default,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.xlogy.Tensor,
    aten.add.Scalar,
    aten.sub.Scalar,
    aten.square.default,
    aten.__lshift__.Scalar,
    aten.__lshift__.Tensor,
    aten.__rshift__.Scalar,
    aten.__rshift__.Tensor,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
)
pointwise(  # special functions
    aten.complex.default,
    aten.frexp.Tensor,
    aten.gcd.default,
    aten.hardshrink.default,
    aten.hardshrink_backward.default,
    aten.heaviside.default,
    aten.i0.default,
    aten.igamma.default,
    aten.igammac.default,
    aten.lcm.default,
    aten.logaddexp2.default,
    aten.polar.default,
    aten.round.decimals,
    aten.softshrink.default,
    aten.softshrink_backward.default,
    aten.special_airy_ai.default,
    aten.special_bessel_j0.default,
    aten.special_bessel_j1.default,
    aten.special_bessel_y0.default,
    aten.special_bessel_y1.default,
    aten.special_chebyshev_polynomial_t.default,
    aten.special_chebyshev_polynomial_u.default,
    aten.special_chebyshev_polynomial_v.default,
    aten.special_chebyshev_polynomial_w.default,
    aten.special_entr.default,
    aten.special_erfcx.default,
    aten.special_hermite_polynomial_h.default,
    aten.special_hermite_polynomial_he.default,
    aten.special_i0e.default,
    aten.special_i1.default,
    aten.special_i1e.default,
    aten.special_laguerre_polynomial_l.default,
    aten.special_legendre_polynomial_p.default,
    aten.special_log_ndtr.default,
    aten.special_modified_bessel_i0.default,
    aten.special_modified_bessel_i1.default,
    aten.special_modified_bessel_k0.default,
    aten.special_modified_bessel_k1.default,
    aten.special_ndtri.default,
    aten.special_scaled_modified_bessel_k0.default,
    aten.special_scaled_modified_bessel_k1.default,
    aten.special_shifted_chebyshev_polynomial_t.default,
    aten.special_shifted_chebyshev_polynomial_u.default,
    aten.special_shifted_chebyshev_polynomial_v.default,
    aten.special_shifted_chebyshev_polynomial_w.default,
    aten.special_spherical_bessel_j0.default,
    aten.special_zeta.default,
)
pointwise(
    aten.neg.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.clone.default,
    aten.positive.default,
    aten._conj_physical.default,
    aten.conj_physical.default,
    linear=[[0]],
)
pointwise(aten.add.Tensor, aten.sub.Tensor, linear=[[0, 1]])
pointwise(aten.mul.Tensor, linear=[[0], [1]])
pointwise(aten.div.Tensor, linear=[[0]])
pointwise(aten.where.self, linear=[[1, 2]])
pointwise(mark_sharding_op._opoverload)


@rule_for(
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.fmod.Tensor,
    aten.remainder.Tensor,
    aten.remainder.Scalar_Tensor,
    aten.pow.Scalar,
    aten.pow.Tensor_Tensor,
)
def _integer_division(call: Call) -> FactorRule:
    """Return a rule whose padding of divisors and exponents is 1.

    An integer division by zero, or a negative exponent, kills the process, even in padding.
    """
    integers = not (call.results[0].dtype.is_floating_point or call.results[0].dtype.is_complex)
    fill = {len(call.tensors) - 1: 1.0} if integers else {}
    return pointwise_rule(call, local=LocalForm(fill=fill))


def is_linear_cast(call: Call) -> bool:
    """Return whether the cast from the operand's type to the result's is linear.

    A cast of floats to integers rounds, so it is not.
    """
    before, after = call.tensors[0].dtype, call.results[0].dtype
    return (
        before == after
        or after != torch.bool
        and (after.is_floating_point or after.is_complex or not before.is_floating_point)
    )


@rule_for(aten._to_copy.default)
def _to_copy(call: Call) -> FactorRule:
    return pointwise_rule(call, linear=[[0]] if is_linear_cast(call) else ())


rule(aten.view_as_real.default, "... -> ... c", replicated="c", linear=[[0]])
rule(aten.view_as_complex.default, "... c -> ...", replicated="c", linear=[[0]])


@rewrite("decompose", aten._conj.default)
def _conj(x: Tensor) -> Tensor:
    return aten._conj_physical.default(x)


@rewrite("decompose", aten._neg_view.default)
def _neg_view(x: Tensor) -> Tensor:
    return -x


@rewrite("decompose", aten.addcmul.default)
def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a * b if value == 1 else a * b * value)


@rewrite("decompose", aten.addcdiv.default)
def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a / b if value == 1 else a / b * value)
