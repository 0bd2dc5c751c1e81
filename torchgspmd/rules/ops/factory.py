"""Operations that create tensors: of random numbers, of one number, of numbers that count.

Random ones are decomposed to custom_ops/random.py's `uniform`. Its numbers depend on an element's
global position. So they are equal on every mesh, and each device draws its shard only. Gamma,
Poisson, ... have no expression by uniform numbers: every device draws them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ..custom_ops.random import DRAW_SEED, draw_seed, keep_mask, uniform
from ..flat_call import FlatCall
from ..local_builder import LocalBuilder
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import host_reads, rule_for, shape_argument
from ..rewrites import rewrite, rewrite_of
from .pointwise import named

ours = torch.ops.torchgspmd
Dtype = torch.dtype | None
Device = torch.device | None
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
    is_double = node.meta.get("dtype") == torch.float64
    return "the host reads the seed of float64 draws" if is_double else None


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


def _draw(shape: Sequence[int], dtype: Dtype, device: Device, count: int = 1) -> list[Tensor]:
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


def _normal(shape: Sequence[int], dtype: Dtype, device: Device) -> Tensor:
    """Return normal numbers (Box and Muller, 1958)."""
    dtype = dtype or torch.get_default_dtype()
    u, v = _draw(shape, _wide(dtype), device, 2)
    if dtype.is_complex:
        radius, angle = (-(-u).log1p()).sqrt(), 2 * math.pi * v
        return torch.complex(radius * angle.cos(), radius * angle.sin()).to(dtype)
    # u < 1, so log(1 - u) is finite; log(u) would not be at 0.
    return ((-2 * (-u).log1p()).sqrt() * (2 * math.pi * v).cos()).to(dtype)


def _normal_like(x: Tensor) -> Tensor:
    return _normal(x.shape, _wide(x.dtype), x.device)


def _unit_exponential(x: Tensor) -> Tensor:
    return -(-_draw_like(x)).log1p()


@rewrite("decompose", aten.rand.default, aten.rand.generator)
def _rand(size: Sequence[int], dtype: Dtype = None, device: Device = None, **_: object) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    if dtype.is_complex:
        return torch.complex(*_draw(size, _wide(dtype), device, 2)).to(dtype)
    return _draw(size, dtype, device)[0]


@rewrite("decompose", aten.randn.default, aten.randn.generator)
def _randn(size: Sequence[int], dtype: Dtype = None, device: Device = None, **_: object) -> Tensor:
    return _normal(size, dtype, device)


@rewrite("decompose", aten.randint.low, aten.randint.low_generator)
def _randint_low(
    low: int, high: int, size: Sequence[int], dtype: Dtype = None, device: Device = None, **_: Any
) -> Tensor:
    # 53 bits reach every integer of a range up to 2^53.
    unit = _draw(size, torch.float64, device)[0]
    return ((unit * (high - low)).floor() + low).to(dtype or torch.int64)


def _like(x: Tensor, dtype: object = None, device: object = None, **_: object) -> tuple:
    """Return (shape, dtype, device) for numbers drawn like x."""
    return x.shape, dtype or x.dtype, device or x.device


def _randint(high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _randint_low(0, high, size, **options)


def _geometric(x: Tensor, p: float, **_: object) -> Tensor:
    u = _draw(x.shape, torch.float64, x.device)[0]
    return (
        ((-u).log1p() / math.log1p(-p)).floor().add(1).to(x.dtype) if p < 1 else torch.ones_like(x)
    )


# Operations as formulas of uniform, normal and exponential numbers.
_FORMULAS: dict[Any, Callable[..., Tensor]] = {
    aten.rand_like.default: lambda x, **how: _rand(*_like(x, **how)),
    aten.randn_like.default: lambda x, **how: _normal(*_like(x, **how)),
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint_like.default: lambda x, high, **how: _randint_low(0, high, *_like(x, **how)),
    aten.randint_like.low_dtype: lambda x, low, high, **how: _randint_low(
        low, high, *_like(x, **how)
    ),
    aten.bernoulli.p: lambda x, p=0.5, **_: (_draw(x.shape, torch.float32, x.device)[0] < p).to(
        x.dtype
    ),
    aten.bernoulli.default: lambda x, **_: (_draw_like(x) < x).to(x.dtype),
    aten.bernoulli.Tensor: lambda x, p, **_: (_draw_like(x, p.dtype) < p).to(x.dtype),
    aten.uniform.default: lambda x, low=0.0, high=1.0, **_: (_draw_like(x) * (high - low) + low).to(
        x.dtype
    ),
    aten.normal_functional.default: lambda x, mean=0.0, std=1.0, **_: (
        _normal_like(x) * std + mean
    ).to(x.dtype),
    aten.normal.Tensor_Tensor: lambda mean, std, **_: (
        _normal(torch.broadcast_shapes(mean.shape, std.shape), mean.dtype, mean.device) * std + mean
    ).to(mean.dtype),
    aten.normal.Tensor_float: lambda mean, std=1.0, **_: (
        _normal(mean.shape, mean.dtype, mean.device) * std + mean
    ),
    aten.normal.float_Tensor: lambda mean, std, **_: (
        _normal(std.shape, std.dtype, std.device) * std + mean
    ),
    aten.exponential.default: lambda x, rate=1.0, **_: (_unit_exponential(x) / rate).to(x.dtype),
    aten.log_normal.default: lambda x, mean=1.0, std=2.0, **_: (
        (_normal_like(x) * std + mean).exp().to(x.dtype)
    ),
    aten.cauchy.default: lambda x, median=0.0, sigma=1.0, **_: (
        ((_draw_like(x) - 0.5) * math.pi).tan() * sigma + median
    ).to(x.dtype),
    aten.geometric.default: _geometric,
}
for _op, _formula in _FORMULAS.items():
    rewrite("decompose", _op)(_formula)


@rewrite("decompose", aten.randperm.default, aten.randperm.generator)
def _randperm(n: int, dtype: Dtype = None, device: Device = None, **_: object) -> Tensor:
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


@rule_for(*named("binomial poisson _standard_gamma _sample_dirichlet"))
def _replicated_draw(call: Call) -> FactorRule:
    names = factors("d", call.results[0].dim())
    return call.rule([names] * len(call.tensors), [names], replicated=names)


# One number, and numbers that count. Without operands, the result may have any layout.


@rule_for(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def _full(call: Call) -> FactorRule:
    zeros = call.target is aten.zeros.default or call.argument(1, "fill_value", None) == 0
    # Zeros are a sum of zeros: a device may hold them as its term of a pending sum.
    linear = [[]] if zeros else ()
    result = factors("d", call.results[0].dim())
    return call.rule([], [result], local=shape_argument(0), linear=linear)


@rule_for(aten.scalar_tensor.default)
def _scalar(call: Call) -> FactorRule:
    return call.rule([], [[]])


@rule_for(aten.arange.start_step)
def _arange(call: Call) -> FactorRule:
    start, step = call.args[0], call.argument(2, "step", 1)

    def emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        options = {**kwargs, "dtype": local.results[0].dtype}
        # The shard's positions are start + (offset + i) * step; offset may be a graph value.
        values = local.call(aten.arange.start_step, 0, local.size("d0"), 1, **options)
        offset = local.start("d0")
        scaled = values if step == 1 else local.call(aten.mul.Scalar, values, step)
        return local.call(aten.add.Scalar, scaled, offset * step + start)

    return call.rule([], [["d0"]], local=LocalForm(emit, when="d0"))


@rewrite("decompose", aten.arange.default)
def _arange_end(end: float, **options: object) -> Tensor:
    return aten.arange.start_step(0, end, 1, **options)


@rewrite("decompose", aten.arange.start)
def _arange_start(start: float, end: float, **options: object) -> Tensor:
    return aten.arange.start_step(start, end, 1, **options)


def _register_filled(arguments: Callable, *ops: OpOverload) -> None:
    """Decompose operations to `full`. arguments: a call's arguments -> (shape, value)."""

    @rewrite("decompose", *ops)
    def filled(
        x: Tensor,
        *args: object,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: object,
    ) -> Tensor:
        shape, value = arguments(x, *args)
        dtype, device = dtype or x.dtype, x.device if device is None else device
        return aten.full.default(list(shape), value, dtype=dtype, device=device)


# empty_like may hold anything, so it holds zeros: equal on all devices.
_register_filled(lambda x: (x.shape, 0), aten.zeros_like.default, aten.empty_like.default)
_register_filled(lambda x: (x.shape, 1), aten.ones_like.default)
_register_filled(lambda x, value: (x.shape, value), aten.full_like.default, aten.fill.Scalar)
_register_filled(
    lambda x, size, *_: (size, 0),
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_register_filled(lambda x, size: (size, 1), aten.new_ones.default)
_register_filled(lambda x, size, value: (size, value), aten.new_full.default)


@rewrite("decompose", aten.fill.Tensor)
def _fill_tensor(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.dtype).expand(x.shape)


@rewrite("decompose", aten.copy.default)
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    source = source.to(x.dtype)
    return (source if source.shape == x.shape else source.expand(x.shape)).clone()
