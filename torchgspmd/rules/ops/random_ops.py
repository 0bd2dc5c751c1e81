"""Random operations, decomposed to `uniform` of custom_ops/random.py.

Its numbers depend on the global position of an element. So they are equal on every mesh, and each
device draws its shard only. Gamma, Poisson, ... have no expression by uniform numbers: every device
draws them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ...custom_ops.random import draw_seed, uniform
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, make_rule
from ..registry import decomposition, rule_for

ours = torch.ops.torchgspmd


@rule_for(ours.draw_seed.default)
def _seed(call: Call) -> Rule:
    return make_rule([], [[]], {})


@rule_for(ours.uniform.default)
def _uniform(call: Call) -> Rule:
    shape = call.results[0].shape
    names = [(f"d{i}",) for i in range(len(shape))]
    return make_rule(
        [[]],
        [names],
        {f"d{i}": n for i, n in enumerate(shape)},
        special=" ".join(n[0] for n in names),
        emit=_emit_uniform,
    )


def _emit_uniform(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    seed, stream, _, first, *rest = args
    starts = [
        local.index(factors[0]) * local.size(factors[0]) if factors else start
        for factors, start in zip(local.rule.results[0], first)
    ]
    return [
        local.call(ours.uniform.default, seed, stream, list(local.results[0].shape), starts, *rest)
    ]


def natively(graph: fx.Graph) -> None:
    """Let a graph draw by PyTorch's own generator, with one seed for each shard."""
    for node in graph.nodes:
        if node.target is ours.uniform.default:
            node.args = (*node.args[:-1], True)


def _draw(
    shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | None, count: int = 1
) -> list[Tensor]:
    """Return `count` independent uniform tensors."""
    dtype, device = (
        dtype or torch.get_default_dtype(),
        torch.device("cpu" if device is None else device),
    )
    seed, shape = draw_seed(), list(shape)
    return [
        uniform(seed, i, shape, [0] * len(shape), shape, dtype, device, False) for i in range(count)
    ]


def _wide(dtype: torch.dtype | None) -> torch.dtype:
    """Return the type to compute in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _normal(shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """Return normal numbers (Box and Muller, 1958)."""
    dtype = dtype or torch.get_default_dtype()
    if dtype.is_complex:
        u, v = _draw(shape, _wide(dtype), device, 2)
        radius = (-(-u).log1p()).sqrt()
        return torch.complex(radius * (2 * math.pi * v).cos(), radius * (2 * math.pi * v).sin()).to(
            dtype
        )
    u, v = _draw(shape, _wide(dtype), device, 2)
    return ((-2 * (-u).log1p()).sqrt() * (2 * math.pi * v).cos()).to(dtype)


@decomposition(aten.rand.default)
def _rand(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    if dtype.is_complex:
        return torch.complex(*_draw(size, _wide(dtype), device, 2)).to(dtype)
    return _draw(size, dtype, device)[0]


@decomposition(aten.rand_like.default)
def _rand_like(
    x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return _rand(x.shape, dtype=dtype or x.dtype, device=device or x.device)


@decomposition(aten.randn.default)
def _randn(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _normal(size, dtype, device)


@decomposition(aten.randn_like.default)
def _randn_like(
    x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return _normal(x.shape, dtype or x.dtype, device or x.device)


@decomposition(aten.randint.low)
def _randint_low(
    low: int,
    high: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return ((_draw(size, torch.float64, device)[0] * (high - low)).floor() + low).to(
        dtype or torch.int64
    )


@decomposition(aten.randint.default)
def _randint(
    high: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _randint_low(0, high, size, dtype=dtype, device=device)


@decomposition(aten.randint_like.default)
def _randint_like(
    x: Tensor,
    high: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _randint_low(0, high, x.shape, dtype=dtype or x.dtype, device=device or x.device)


@decomposition(aten.randint_like.low_dtype)
def _randint_like_low(
    x: Tensor,
    low: int,
    high: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _randint_low(low, high, x.shape, dtype=dtype or x.dtype, device=device or x.device)


@decomposition(aten.bernoulli.p)
def _bernoulli_p(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    return (_draw(x.shape, torch.float32, x.device)[0] < p).to(x.dtype)


@decomposition(aten.bernoulli.default)
def _bernoulli(x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    return (_draw(x.shape, _wide(x.dtype), x.device)[0] < x).to(x.dtype)


@decomposition(aten.bernoulli.Tensor)
def _bernoulli_tensor(x: Tensor, p: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    return (_draw(x.shape, _wide(p.dtype), x.device)[0] < p).to(x.dtype)


@decomposition(aten.uniform.default)
def _uniform_between(
    x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    return (_draw(x.shape, _wide(x.dtype), x.device)[0] * (high - low) + low).to(x.dtype)


@decomposition(aten.normal_functional.default)
def _normal_functional(
    x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    return (_normal(x.shape, _wide(x.dtype), x.device) * std + mean).to(x.dtype)


@decomposition(aten.normal.Tensor_Tensor)
def _normal_tensors(
    mean: Tensor, std: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return (_normal(shape, mean.dtype, mean.device) * std + mean).to(mean.dtype)


@decomposition(aten.normal.Tensor_float)
def _normal_mean(
    mean: Tensor, std: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    return _normal(mean.shape, mean.dtype, mean.device) * std + mean


@decomposition(aten.normal.float_Tensor)
def _normal_std(mean: float, std: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    return _normal(std.shape, std.dtype, std.device) * std + mean


@decomposition(aten.exponential.default)
def _exponential(
    x: Tensor, rate: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    return (-(-_draw(x.shape, _wide(x.dtype), x.device)[0]).log1p() / rate).to(x.dtype)


@decomposition(aten.log_normal.default)
def _log_normal(
    x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: torch.Generator | None = None
) -> Tensor:
    return (_normal(x.shape, _wide(x.dtype), x.device) * std + mean).exp().to(x.dtype)


@decomposition(aten.cauchy.default)
def _cauchy(
    x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    return (
        ((_draw(x.shape, _wide(x.dtype), x.device)[0] - 0.5) * math.pi).tan() * sigma + median
    ).to(x.dtype)


@decomposition(aten.geometric.default)
def _geometric(x: Tensor, p: float, *, generator: torch.Generator | None = None) -> Tensor:
    u = _draw(x.shape, torch.float64, x.device)[0]
    return (
        ((-u).log1p() / math.log1p(-p)).floor().add(1).to(x.dtype) if p < 1 else torch.ones_like(x)
    )


@decomposition(aten.randperm.default)
def _randperm(
    n: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return _draw([n], torch.float64, device)[0].argsort().to(dtype or torch.int64)


@decomposition(aten.multinomial.default)
def _multinomial(
    weights: Tensor,
    count: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    if not replacement:  # the largest of weight / exponential sample
        keys = weights / -(-_draw(weights.shape, _wide(weights.dtype), weights.device)[0]).log1p()
        return keys.topk(count)[1]
    ends = weights.cumsum(-1)
    ends = ends / ends[..., -1:]
    places = torch.searchsorted(
        ends, _draw([*weights.shape[:-1], count], weights.dtype, weights.device)[0], right=True
    )
    return places.clamp_max(weights.shape[-1] - 1)


@decomposition(aten.rrelu_with_noise_functional.default)
def _rrelu(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 0.3333333333333333,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slope = (_draw(x.shape, _wide(x.dtype), x.device)[0] * (upper - lower) + lower).to(x.dtype)
    slope = torch.where(x > 0, 1.0, slope).to(x.dtype)
    return x * slope, slope


@decomposition(aten.native_dropout.default)
def _native_dropout(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _draw(x.shape, torch.float32, x.device)[0] < 1 - p
    return x * (mask.to(x.dtype) / (1 - p)) if p < 1 else x * 0, mask


@decomposition(aten.native_dropout_backward.default)
def _native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad * mask.to(grad.dtype) * scale


@rule_for(
    aten.binomial.default,
    aten.poisson.default,
    aten._standard_gamma.default,
    aten._sample_dirichlet.default,
)
def _replicated_draw(call: Call) -> Rule:
    """Return a rule by which every device draws all numbers."""
    shape = call.results[0].shape
    names = [(f"d{i}",) for i in range(len(shape))]
    return make_rule(
        [names] * len(call.tensors),
        [names],
        {f"d{i}": n for i, n in enumerate(shape)},
        whole=" ".join(n[0] for n in names),
    )
