"""Windows over the last dimensions: pooling, interpolation, padding by content. Batch and channels may be sharded; the
dimensions of the window are whole, but where pooling windows lie side by side."""
from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from .notation import Call, Dim, Rule, make_rule
from .registry import computed, rule, shape_argument

aten = torch.ops.aten


def _windowed(name: str, spatial: int, operands: str, results: str = "y", linear: bool = False, shape_at: int | None = None) -> None:
    """Registers an operation. operands, results: for each tensor x (before the window) or y (behind it). shape_at: position of
    the argument that holds the result's whole shape."""
    dims = {1: {"x": "... w", "y": "... v"}, 2: {"x": "... h w", "y": "... u v"}, 3: {"x": "... d h w", "y": "... t u v"}}[spatial]
    whole = " ".join(dims.values()).replace("...", "")
    rule(getattr(aten, name).default, f"{', '.join(dims[t] for t in operands)} -> {', '.join(dims[t] for t in results)}",
         whole=whole, linear=[[0]] if linear else (), local=shape_argument(shape_at) if shape_at is not None else None)


for _n in (2, 3):
    _windowed(f"adaptive_max_pool{_n}d", _n, "x", "yy")
    _windowed(f"adaptive_max_pool{_n}d_backward", _n, "yxy", "x")
    _windowed(f"_adaptive_avg_pool{_n}d", _n, "x", linear=True)
    _windowed(f"_adaptive_avg_pool{_n}d_backward", _n, "yx", "x", linear=True)
    _windowed(f"max_unpool{_n}d", _n, "xx")
for _n in (1, 2, 3):
    for _mode in ("reflection", "replication"):
        _windowed(f"{_mode}_pad{_n}d", _n, "x", linear=True)
        _windowed(f"{_mode}_pad{_n}d_backward", _n, "yx", "x", linear=True)
for _name, _n in (("upsample_nearest1d", 1), ("_upsample_nearest_exact1d", 1), ("upsample_linear1d", 1), ("upsample_nearest2d", 2),
                  ("_upsample_nearest_exact2d", 2), ("upsample_bilinear2d", 2), ("upsample_bicubic2d", 2), ("_upsample_bilinear2d_aa", 2),
                  ("_upsample_bicubic2d_aa", 2), ("upsample_nearest3d", 3), ("_upsample_nearest_exact3d", 3), ("upsample_trilinear3d", 3)):
    _windowed(_name, _n, "x", linear=True)
    _windowed(f"{_name}_backward", _n, "y", "x", linear=True, shape_at=2)

rule(aten.fractional_max_pool2d.default, "... h w, ... r -> ... u v, ... u v", whole="h w r u v")
rule(aten.fractional_max_pool2d_backward.default, "... u v, ... h w, ... u v -> ... h w", whole="h w u v")
rule(aten.fractional_max_pool3d.default, "... d h w, ... r -> ... t u v, ... t u v", whole="d h w r t u v")
rule(aten.fractional_max_pool3d_backward.default, "... t u v, ... d h w, ... t u v -> ... d h w", whole="d h w t u v")
rule(aten.grid_sampler_2d.default, "n c h w, n u v r -> n c u v", whole="h w r", linear=[[0]])
rule(aten.grid_sampler_3d.default, "n c d h w, n t u v r -> n c t u v", whole="d h w r", linear=[[0]])


def _pooled(x: torch.Tensor, y: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
            dilation: Sequence[int] = (1,)) -> tuple[list[Dim], list[Dim], dict[str, int], str]:
    """Factors of x and y: where windows lie side by side, positions times window of x are the positions of y."""
    count = 3 if len(kernel) == 3 else 2
    lead = [(f"l{i}",) for i in range(x.dim() - count)]
    sizes, whole, fine, coarse = {f"l{i}": n for i, n in enumerate(x.shape[:-count])}, [], [], []
    options = [list(v) * (count if len(v) == 1 else 1) for v in (kernel, stride or kernel, padding, dilation)]
    for i, (k, s, p, d) in enumerate(zip(*options)):
        few, many = y.shape[len(lead) + i], x.shape[len(lead) + i]
        beside = k == s and p == 0 and d == 1 and many == few * k
        sizes |= {f"o{i}": few, f"r{i}": k if beside else many}
        whole += [f"r{i}"] if beside else [f"r{i}", f"o{i}"]
        fine.append((f"o{i}", f"r{i}") if beside else (f"r{i}",))
        coarse.append((f"o{i}",))
    return lead + fine, lead + coarse, sizes, " ".join(whole)


@computed(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _average(call: Call) -> Rule:
    options = call.argument(2, "stride", ()), call.argument(3, "padding", (0,))
    x, y, sizes, whole = _pooled(call.tensors[0], call.results[0], call.args[1], *options)
    return make_rule([x], [y], sizes, whole=whole, linear=[[0]])


@computed(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _average_backward(call: Call) -> Rule:
    x, y, sizes, whole = _pooled(call.tensors[1], call.tensors[0], *call.args[2:5])
    return make_rule([y, x], [x], sizes, whole=whole, linear=[[0]])


@computed(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _maximum(call: Call) -> Rule:
    options = call.argument(2, "stride", ()), call.argument(3, "padding", (0,)), call.argument(4, "dilation", (1,))
    x, y, sizes, whole = _pooled(call.tensors[0], call.results[0], call.args[1], *options)
    return make_rule([x], [y, y], sizes, whole=whole, special=_positions(sizes, whole), emit=_emit_maximum)


@computed(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def _maximum_backward(call: Call) -> Rule:
    x, y, sizes, whole = _pooled(call.tensors[1], call.tensors[0], *call.args[2:6])
    return make_rule([y, x, y], [x], sizes, whole=whole, special=_positions(sizes, whole), emit=_emit_maximum_backward)


def _positions(sizes: dict[str, int], whole: str) -> str:
    return " ".join(name for name in sizes if name[0] == "o" and name not in whole.split())


def _emit_maximum(local, args, kwargs):
    both = local.call(local.node.target, *args, **kwargs)
    values, index = local.call(operator.getitem, both, 0), local.call(operator.getitem, both, 1)
    return [values, _moved(local, index, len(args[1]), 1)]


def _emit_maximum_backward(local, args, kwargs):
    grad = args[0]
    for i, factors in enumerate(local.rule.operands[0]):
        grad = local.masked(grad, i, factors[0], 0.0) if set(factors) & local.rule.special else grad
    return [local.call(local.node.target, grad, *args[1:-1], _moved(local, args[-1], len(args[2]), -1))]


def _moved(local, index, count: int, sign: int):
    """Indices into a device's window positions as indices into all of them (sign 1), or back (-1)."""
    parts, sizes = [], local.rule.sizes
    for i in range(count):
        beside = f"o{i}" in local.rule.special
        mine, every = (local.size(f"o{i}"), sizes[f"o{i}"]) if beside else (1, 1)
        parts.append((local.size(f"r{i}") * mine, sizes.get(f"r{i}", 1) * every))
    old, new = ([p[0] for p in parts], [p[1] for p in parts])[::sign]
    result, step = 0, 1
    for i in reversed(range(count)):
        place = local.call(aten.remainder.Scalar, index, old[i])
        index = local.call(aten.floor_divide.default, index, old[i])
        place = local.call(aten.add.Scalar, place, local.index(f"o{i}") * (sign * parts[i][0]))
        place = local.call(aten.mul.Scalar, local.call(aten.clamp.default, place, 0, new[i] - 1), step)
        result = place if isinstance(result, int) else local.call(aten.add.Tensor, result, place)
        step *= new[i]
    return result
