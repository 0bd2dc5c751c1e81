"""Windows over the last dimensions: pooling, interpolation, padding by content. Batch and channels may be sharded."""
from __future__ import annotations

import torch

from .registry import rule, shape_argument

aten = torch.ops.aten


def _windowed(name: str, spatial: int, operands: str, results: str = "y", linear: bool = False, shape_at: int | None = None) -> None:
    """Registers an operation. operands, results: for each tensor x (before the window) or y (behind it). shape_at: position of
    the argument that holds the result's whole shape."""
    dims = {1: {"x": "... w", "y": "... v"}, 2: {"x": "... h w", "y": "... u v"}, 3: {"x": "... d h w", "y": "... t u v"}}[spatial]
    whole = " ".join(dims.values()).replace("...", "")
    rule(getattr(aten, name).default, f"{', '.join(dims[t] for t in operands)} -> {', '.join(dims[t] for t in results)}",
         whole=whole, linear=[[0]] if linear else (), local=shape_argument(shape_at) if shape_at is not None else None)


for _n in (2, 3):
    _windowed(f"max_pool{_n}d_with_indices", _n, "x", "yy")
    _windowed(f"max_pool{_n}d_with_indices_backward", _n, "yxy", "x")
    _windowed(f"adaptive_max_pool{_n}d", _n, "x", "yy")
    _windowed(f"adaptive_max_pool{_n}d_backward", _n, "yxy", "x")
    _windowed(f"_adaptive_avg_pool{_n}d", _n, "x", linear=True)
    _windowed(f"_adaptive_avg_pool{_n}d_backward", _n, "yx", "x", linear=True)
    _windowed(f"avg_pool{_n}d", _n, "x", linear=True)
    _windowed(f"avg_pool{_n}d_backward", _n, "yx", "x", linear=True)
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
