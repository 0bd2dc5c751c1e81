"""Elementwise operations. Dimensions align from the right, and size 1 broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ...layout.mark import mark_sharding_op
from ..custom_ops.updates import adam
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import ordered, rule, rule_for
from ..rewrites import rewrite


def broadcast_dims(
    shape: Sequence[int], result: Sequence[int], names: Sequence[str] = ()
) -> list[str]:
    """Return an operand's factors if it broadcasts to a result with factors d0, d1, ..."""
    offset = len(result) - len(shape)
    names = (names or factors("d", len(result)))[offset:]
    return [name if n == m else "" for name, n, m in zip(names, shape, result[offset:])]


def quotient(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (dividend, divisor) if a node divides two values, else None."""
    return (
        node.args
        if node.target is aten.div.Tensor and all(isinstance(n, fx.Node) for n in node.args)
        else None
    )


def pointwise_rule(
    call: Call, linear: Sequence[Sequence[int]] = (), **keywords: object
) -> FactorRule:
    """Return an elementwise call's rule. linear: see FactorRule."""
    shape = tuple(call.results[0].shape)
    return call.rule(
        [broadcast_dims(t.shape, shape) for t in call.tensors],
        [broadcast_dims(t.shape, shape) for t in call.results],
        dict(zip(factors("d", len(shape)), shape)),
        linear=[g for g in linear if max(g) < len(call.tensors)],  # x + 1 is not linear in x
        **keywords,
    )


CONJUGATES = {aten._conj.default, aten._conj_physical.default, aten.conj_physical.default}


def named(text: str) -> list[Any]:
    """Return operators by their names, such as `abs eq.Scalar`."""
    words = (word.partition(".") for word in text.split())
    return [getattr(getattr(aten, name), overload or "default") for name, _, overload in words]


def pointwise(*ops: OpOverload, linear: Sequence[Sequence[int]] = ()) -> None:
    """Register elementwise operations. linear: see FactorRule."""
    rule_for(*ops)(lambda call: pointwise_rule(call, linear))
    _ELEMENTWISE.update(op.name().partition("::")[2].partition(".")[0] for op in ops)


def is_elementwise(name: str) -> bool:
    """Whether the operators with a name, such as `add`, are elementwise."""
    return name in _ELEMENTWISE


_ELEMENTWISE: set[str] = set()


pointwise(
    *named("""
        __lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor abs acos acosh
        add.Scalar angle asin asinh atan atan2 atanh bitwise_and.Scalar bitwise_and.Tensor
        bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not bitwise_or.Scalar
        bitwise_or.Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
        bitwise_xor.Scalar bitwise_xor.Tensor ceil celu clamp clamp.Tensor clamp_max clamp_min
        copysign.Tensor cos cosh deg2rad digamma div.Scalar_mode elu elu_backward eq.Scalar
        eq.Tensor erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod.Scalar frac ge.Scalar
        ge.Tensor gelu gelu_backward gt.Scalar gt.Tensor hardsigmoid hardsigmoid_backward hardswish
        hardswish_backward hardtanh hardtanh_backward hypot isfinite isinf isnan le.Scalar le.Tensor
        leaky_relu leaky_relu_backward lgamma log log10 log1p log2
        log_sigmoid_backward log_sigmoid_forward logaddexp logical_and logical_not logical_or
        logical_xor logit lt.Scalar lt.Tensor masked_fill.Tensor maximum minimum
        mish nan_to_num ne.Scalar ne.Tensor nextafter polygamma pow.Tensor_Scalar reciprocal relu
        remainder.Scalar round rsqrt rsub.Scalar sgn sigmoid sigmoid_backward sign signbit silu
        silu_backward sin sinc sinh softplus softplus_backward sqrt square sub.Scalar tan tanh
        tanh_backward threshold threshold_backward trunc where.ScalarOther where.ScalarSelf
        xlogy.Tensor
    """),
)
pointwise(
    *named("""
        frexp.Tensor gcd hardshrink hardshrink_backward heaviside i0 igamma igammac lcm
        logaddexp2 polar round.decimals softshrink softshrink_backward special_airy_ai
        special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h
        special_hermite_polynomial_he special_i0e special_i1 special_i1e
        special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta
    """),
)
pointwise(
    *named("""
        _conj_physical clone conj_physical div.Scalar mul.Scalar neg positive
    """),
    linear=[[0]],
)
# x + y is linear in both together, x * y in each alone, x + w (y - x) in x and y together.
pointwise(*named("add.Tensor complex lerp.Scalar lerp.Tensor sub.Tensor"), linear=[[0, 1]])
pointwise(aten.mul.Tensor, linear=[[0], [1]])
pointwise(aten.div.Tensor, aten.native_dropout_backward.default, linear=[[0]])
pointwise(aten.where.self, linear=[[1, 2]])
rule_for(aten.masked_fill.Scalar)(
    lambda call: pointwise_rule(call, linear=[[0]] if call.args[2] == 0 else ())
)
# adam's operands have the parameter's shape, or are single numbers.
pointwise(mark_sharding_op._opoverload, adam._opoverload)


@rule_for(
    *named("div.Tensor_mode floor_divide fmod.Tensor remainder.Tensor remainder.Scalar_Tensor"),
    *named("pow.Scalar pow.Tensor_Tensor"),
)
def _integer_division(call: Call) -> FactorRule:
    """Return a rule that pads divisors and exponents with 1.

    An integer division by zero, or a negative exponent, kills the process, even in padding.
    """
    integers = not (call.results[0].dtype.is_floating_point or call.results[0].dtype.is_complex)
    fill = {len(call.tensors) - 1: 1.0} if integers else {}
    return pointwise_rule(call, local=LocalForm(fill=fill))


def is_linear_cast(call: Call) -> bool:
    """Return whether the cast from the operand's type to the result's is linear.

    A cast from floats to integers rounds, so it is not.
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


def is_float_cast(node: fx.Node) -> bool:
    """Return whether an operation casts between floating dtypes, on one device."""
    if node.target is not aten._to_copy.default or "memory_format" in node.kwargs:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return (
        before.is_floating_point() and after.is_floating_point() and before.device == after.device
    )


# A cast of sums, not of their terms: it is not linear. fx_passes/expand/reduce_dtype.py inserts it.
pointwise(aten.to.dtype)

rule(aten.fake_quantize_per_tensor_affine_cachemask.default, "... -> ..., ...")


@rule_for(aten.fake_quantize_per_channel_affine_cachemask.default)
def _fake_quantize_channels(call: Call) -> FactorRule:
    x, axis = call.tensors[0], call.dim(3)
    names = factors("d", x.dim())
    channels = [names[axis]]  # scale and zero point have one number per channel
    return call.rule([names, channels, channels], [names, names], dict(zip(names, x.shape)))


rule(aten.view_as_real.default, "... -> ... c", replicated="c", linear=[[0]])
rule(aten.view_as_complex.default, "... c -> ...", replicated="c", linear=[[0]])
ordered(aten.view_as_complex.default)  # refuses two parts that are not neighbors


for _op, _formula in {
    aten._conj.default: lambda x: aten._conj_physical.default(x),
    aten._neg_view.default: lambda x: -x,
    aten.addcmul.default: lambda x, a, b, *, value=1: x + (a * b if value == 1 else a * b * value),
    aten.addcdiv.default: lambda x, a, b, *, value=1: x + (a / b if value == 1 else a / b * value),
}.items():
    rewrite("decompose", _op)(_formula)
