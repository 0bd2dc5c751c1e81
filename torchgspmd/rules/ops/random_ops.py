"""Random operations, decomposed to custom_ops/random.py's `uniform`.

Its numbers depend on an element's global position. So they are equal on every mesh, and each device
draws its shard only. Gamma, Poisson, ... have no expression by uniform numbers: every device draws
them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ..custom_ops.random import DRAW_SEED, draw_seed, keep_mask, uniform
from ..flat_call import FlatCall
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import host_reads, rule_for
from ..rewrites import rewrite, rewrite_of

ours = torch.ops.torchgspmd
DRAWS = (ours.uniform.default, ours.keep_mask.default)  # numbers by an element's position


@rule_for(ours.draw_seed.default, ours.draw_seeds.default)
def _draw_seed(call: Call) -> FactorRule:
    names = factors("d", call.results[0].dim())
    return call.rule([], [names], replicated=names)


@rule_for(*DRAWS)
def _drawn_by_place(call: Call) -> FactorRule:
    names = factors("d", call.results[0].dim())
    return call.rule([[]], [names], local=LocalForm(partial(_emit_draw, call.target), when=names))


@rewrite("keep", *DRAWS)
def _kept_draw(
    flat: FlatCall, seed: Any, number: int, _: object, first: object, __: object, *rest: Any
) -> tuple[Any, ...]:
    """Draw with the parts of a flattened dimension: an element keeps its number in the whole."""
    shape = [n for parts in flat.results[0] for n in parts]
    return seed, number, shape, [0] * len(shape), shape, *rest


@host_reads(*DRAWS)
def _reads_seed(node: fx.Node) -> str | None:
    """Return why the host reads a draw's seed; None if the kernel for CUDA does."""
    if node.args[-1]:
        return 'with advanced={"rng": "native"} the host seeds a generator'
    return "the host reads the seed of float64 draws" if _is_double(node) else None


def _is_double(node: fx.Node) -> bool:
    return node.meta.get("dtype") == torch.float64


def _emit_draw(target: object, local: LocalBuilder, args: tuple, kwargs: dict) -> fx.Node:
    seed, number, _, first, *rest = args
    starts = [
        local.start(names[0]) if names else start
        for names, start in zip(local.rule.results[0], first)
    ]
    # The whole shape stays an argument: numbers depend on global positions.
    shape = list(local.results[0].shape)
    return local.call(target, seed, number, shape, starts, *rest)


def has_own_seed(op: Any) -> bool:
    """Return whether an operator draws a seed, or becomes `uniform`, also in place (`normal_`)."""
    if op is DRAW_SEED:
        return True
    name = op.name().split("::")[-1].split(".")[0].removesuffix("_")
    packets = [getattr(aten, each, None) for each in (name, f"{name}_functional")]
    return any(
        rewrite_of("decompose", getattr(packet, overload))
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
    )


def natively(graph: fx.Graph) -> fx.Graph:
    """Draw by PyTorch's own generator, with one seed for each shard. Return the graph.

    Numbers that are drawn again in another layout would differ: these stay hashes of positions.
    """
    draws: dict[Any, list[fx.Node]] = {}
    for node in (n for op in DRAWS for n in graph.find_nodes(op="call_function", target=op)):
        draws.setdefault((_drawn(node.args[0]), node.args[1]), []).append(node)
    for repeated in draws.values():
        if len({node.meta["spec"] for node in repeated}) == 1:
            for node in repeated:
                node.args = (*node.args[:-1], True)
    return graph


def _drawn(seed: fx.Node) -> fx.Node:
    """Return the node that draws a seed, past the rows that loop iterations take."""
    while seed.all_input_nodes:
        seed = seed.all_input_nodes[0]
    return seed


def _draw(
    shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | None, count: int = 1
) -> list[Tensor]:
    """Return `count` independent uniform tensors."""
    dtype = dtype or torch.get_default_dtype()
    device = torch.device("cpu" if device is None else device)
    seed, shape = draw_seed(), list(shape)
    # The capture draws the whole tensor; _emit_draw puts the shard's position in.
    return [
        uniform(seed, i, shape, [0] * len(shape), shape, dtype, device, False) for i in range(count)
    ]


def _wide(dtype: torch.dtype | None) -> torch.dtype:
    # float16 has 2048 uniform numbers: too few for a logarithm's tail.
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _draw_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return uniform numbers for a tensor's elements, in the type to compute in."""
    return _draw(x.shape, _wide(dtype or x.dtype), x.device)[0]


def _normal(shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """Return normal numbers (Box and Muller, 1958)."""
    dtype = dtype or torch.get_default_dtype()
    u, v = _draw(shape, _wide(dtype), device, 2)
    if dtype.is_complex:
        radius = (-(-u).log1p()).sqrt()
        return torch.complex(radius * (2 * math.pi * v).cos(), radius * (2 * math.pi * v).sin()).to(
            dtype
        )
    # u < 1, so log(1 - u) is finite; log(u) would not be at 0.
    return ((-2 * (-u).log1p()).sqrt() * (2 * math.pi * v).cos()).to(dtype)


def _normal_like(x: Tensor) -> Tensor:
    return _normal(x.shape, _wide(x.dtype), x.device)


def _unit_exponential(x: Tensor) -> Tensor:
    return -(-_draw_like(x)).log1p()


@rewrite("decompose", aten.rand.default, aten.rand.generator)
def _rand(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: object,
) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    if dtype.is_complex:
        return torch.complex(*_draw(size, _wide(dtype), device, 2)).to(dtype)
    return _draw(size, dtype, device)[0]


@rewrite("decompose", aten.randn.default, aten.randn.generator)
def _randn(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: object,
) -> Tensor:
    return _normal(size, dtype, device)


@rewrite("decompose", aten.randint.low, aten.randint.low_generator)
def _randint_low(
    low: int,
    high: int,
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: object,
) -> Tensor:
    # 53 bits reach every integer of a range up to 2^53.
    unit = _draw(size, torch.float64, device)[0]
    return ((unit * (high - low)).floor() + low).to(dtype or torch.int64)


@rewrite("decompose", aten.randint.default, aten.randint.generator)
def _randint(high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _randint_low(0, high, size, **options)


def _like(x: Tensor, dtype: object = None, device: object = None, **_: object) -> tuple:
    """Return (shape, dtype, device) for numbers drawn like x."""
    return x.shape, dtype or x.dtype, device or x.device


@rewrite("decompose", aten.rand_like.default)
def _rand_like(x: Tensor, **options: object) -> Tensor:
    return _rand(*_like(x, **options))


@rewrite("decompose", aten.randn_like.default)
def _randn_like(x: Tensor, **options: object) -> Tensor:
    return _normal(*_like(x, **options))


@rewrite("decompose", aten.randint_like.default)
def _randint_like(x: Tensor, high: int, **options: object) -> Tensor:
    return _randint_low(0, high, *_like(x, **options))


@rewrite("decompose", aten.randint_like.low_dtype)
def _randint_like_low(x: Tensor, low: int, high: int, **options: object) -> Tensor:
    return _randint_low(low, high, *_like(x, **options))


@rewrite("decompose", aten.bernoulli.p)
def _bernoulli_p(x: Tensor, p: float = 0.5, **_: object) -> Tensor:
    return (_draw(x.shape, torch.float32, x.device)[0] < p).to(x.dtype)


@rewrite("decompose", aten.bernoulli.default)
def _bernoulli(x: Tensor, **_: object) -> Tensor:
    return (_draw_like(x) < x).to(x.dtype)


@rewrite("decompose", aten.bernoulli.Tensor)
def _bernoulli_tensor(x: Tensor, p: Tensor, **_: object) -> Tensor:
    return (_draw_like(x, p.dtype) < p).to(x.dtype)


@rewrite("decompose", aten.uniform.default)
def _uniform_between(x: Tensor, low: float = 0.0, high: float = 1.0, **_: object) -> Tensor:
    return (_draw_like(x) * (high - low) + low).to(x.dtype)


@rewrite("decompose", aten.normal_functional.default)
def _normal_functional(x: Tensor, mean: float = 0.0, std: float = 1.0, **_: object) -> Tensor:
    return (_normal_like(x) * std + mean).to(x.dtype)


@rewrite("decompose", aten.normal.Tensor_Tensor)
def _normal_tensors(mean: Tensor, std: Tensor, **_: object) -> Tensor:
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return (_normal(shape, mean.dtype, mean.device) * std + mean).to(mean.dtype)


@rewrite("decompose", aten.normal.Tensor_float)
def _normal_mean(mean: Tensor, std: float = 1.0, **_: object) -> Tensor:
    return _normal(mean.shape, mean.dtype, mean.device) * std + mean


@rewrite("decompose", aten.normal.float_Tensor)
def _normal_std(mean: float, std: Tensor, **_: object) -> Tensor:
    return _normal(std.shape, std.dtype, std.device) * std + mean


@rewrite("decompose", aten.exponential.default)
def _exponential(x: Tensor, rate: float = 1.0, **_: object) -> Tensor:
    return (_unit_exponential(x) / rate).to(x.dtype)


@rewrite("decompose", aten.log_normal.default)
def _log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0, **_: object) -> Tensor:
    return (_normal_like(x) * std + mean).exp().to(x.dtype)


@rewrite("decompose", aten.cauchy.default)
def _cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0, **_: object) -> Tensor:
    return (((_draw_like(x) - 0.5) * math.pi).tan() * sigma + median).to(x.dtype)


@rewrite("decompose", aten.geometric.default)
def _geometric(x: Tensor, p: float, **_: object) -> Tensor:
    u = _draw(x.shape, torch.float64, x.device)[0]
    return (
        ((-u).log1p() / math.log1p(-p)).floor().add(1).to(x.dtype) if p < 1 else torch.ones_like(x)
    )


@rewrite("decompose", aten.randperm.default, aten.randperm.generator)
def _randperm(
    n: int, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: object
) -> Tensor:
    # Keys of 53 bits: equal ones, which would bias the order, are rare.
    return _draw([n], torch.float64, device)[0].argsort().to(dtype or torch.int64)


@rewrite("decompose", aten.multinomial.default)
def _multinomial(weights: Tensor, count: int, replacement: bool = False, **_: object) -> Tensor:
    if not replacement:  # the largest of weight / exponential sample
        return (weights / _unit_exponential(weights)).topk(count)[1]
    ends = weights.cumsum(-1)
    ends = ends / ends[..., -1:]
    units = _draw([*weights.shape[:-1], count], weights.dtype, weights.device)[0]
    # right=True: a weight of 0 has an empty interval, so it is never drawn.
    return torch.searchsorted(ends, units, right=True).clamp_max(weights.shape[-1] - 1)


@rewrite("decompose", aten.rrelu_with_noise_functional.default)
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
    slope = (_draw_like(x) * (upper - lower) + lower).to(x.dtype)
    slope = torch.where(x > 0, 1.0, slope).to(x.dtype)
    return x * slope, slope


@rewrite("decompose", aten.native_dropout.default)
def _native_dropout(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = kept(draw_seed(), p, x)
    return masked(x, mask, p), mask


def kept(seed: Tensor, p: float, x: Tensor) -> Tensor:
    """Return which elements dropout keeps in a whole tensor."""
    shape = list(x.shape)
    return keep_mask(seed, p, shape, [0] * len(shape), shape, x.device, False)


def masked(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return the elements that are kept, times 1 / (1 - p): one kernel, as for the gradient."""
    return aten.native_dropout_backward(x, mask, 1 / (1 - p) if p < 1 else 0.0)


@rule_for(
    aten.binomial.default,
    aten.poisson.default,
    aten._standard_gamma.default,
    aten._sample_dirichlet.default,
)
def _replicated_draw(call: Call) -> FactorRule:
    """Return a rule by which every device draws all numbers."""
    names = factors("d", call.results[0].dim())
    return call.rule([names] * len(call.tensors), [names], replicated=names)
