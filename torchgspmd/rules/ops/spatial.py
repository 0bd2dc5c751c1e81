"""Operations on spatial dimensions that must be whole: padding by content, unpooling, ...

Batch and channels may be sharded. If a spatial dimension is sharded, pads are decomposed.
"""

from __future__ import annotations

from collections.abc import Callable

from ...compat.operators import aten
from ..notation import Sentence
from ..registry import rule, rule_for, shape_argument
from . import slicing


def _spatial(
    name: str,
    spatial: int,
    operands: str,
    results: str = "y",
    linear: bool = False,
    shape_at: int | None = None,
    splits: Callable | bool = False,
) -> None:
    """Register an operation from spatial sizes x to y.

    operands, results: x or y for each tensor, such as "yx". shape_at: which argument is the global
    result shape. splits: the decomposition for sharded spatial dimensions.
    """
    dims = {
        1: {"x": "... w", "y": "... v"},
        2: {"x": "... h w", "y": "... u v"},
        3: {"x": "... d h w", "y": "... t u v"},
    }[spatial]
    whole = " ".join(dims.values()).replace("...", "")
    rule(
        getattr(aten, name).default,
        f"{', '.join(dims[t] for t in operands)} -> {', '.join(dims[t] for t in results)}",
        whole=whole,
        linear=[[0]] if linear else (),
        local=shape_argument(shape_at) if shape_at is not None else None,
        splits=splits,
    )


for _n in (2, 3):
    _spatial(f"max_unpool{_n}d", _n, "xx")
for _n in (1, 2, 3):
    for _mode in ("reflection", "replication"):
        _spatial(f"{_mode}_pad{_n}d", _n, "x", linear=True, splits=getattr(slicing, f"{_mode}_pad"))
        _spatial(
            f"{_mode}_pad{_n}d_backward",
            _n,
            "yx",
            "x",
            linear=True,
            splits=getattr(slicing, f"{_mode}_pad_backward"),
        )

for _op, _in, _out in (
    (aten.fractional_max_pool2d, "h w", "u v"),
    (aten.fractional_max_pool3d, "d h w", "t u v"),
):
    _sentences = [
        Sentence.parse(f"{_n}c {_in}, {_n or '1 '}c r -> {_n}c {_out}, {_n}c {_out}")
        for _n in ("", "n ")
    ]
    rule_for(_op.default)(
        lambda call, sentences=_sentences, n=len(_in.split()), whole=f"{_in} r {_out}": sentences[
            call.tensors[0].dim() - n - 1
        ].bind(call, whole=whole)
    )
rule(
    aten.fractional_max_pool2d_backward.default,
    "... u v, ... h w, ... u v -> ... h w",
    whole="h w u v",
)
rule(
    aten.fractional_max_pool3d_backward.default,
    "... t u v, ... d h w, ... t u v -> ... d h w",
    whole="d h w t u v",
)
