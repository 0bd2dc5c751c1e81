"""Operations that need replicated spatial dimensions: padding by content, unpooling, grids.

Batch and channels may be sharded. If a spatial dimension is sharded, reflection and replication
pads are split into slices, flips and concatenations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...compat.operators import aten
from ...rules.memory_order import ordered
from ...rules.notation import Call, FactorRule, Sentence, Split, factors
from ...rules.registry import rule, rule_for
from ...rules.rewrites import rewrite

_DIMS = {
    1: {"x": "... w", "y": "... v"},
    2: {"x": "... h w", "y": "... u v"},
    3: {"x": "... d h w", "y": "... t u v"},
}


def _spatial(name: str, spatial: int, operands: str, results: str, split: Callable | None) -> None:
    """Register an operation from spatial sizes x to y.

    operands, results: x or y for each tensor, such as "yx".
    """
    dims, op = _DIMS[spatial], getattr(aten, name).default
    rule(
        op,
        f"{', '.join(dims[t] for t in operands)} -> {', '.join(dims[t] for t in results)}",
        replicated=" ".join(dims.values()).replace("...", ""),
        linear=[[0]] if split else (),
        split=Split() if split else None,
    )
    if split:
        rewrite("split", op)(split)


def _pad_dims(x: Tensor, pads: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return pads as (dimension, rows before, rows behind); pads begin with the last dimension."""
    return [
        (x.dim() - 1 - i // 2, pads[i], pads[i + 1])
        for i in range(0, len(pads), 2)
        if pads[i] or pads[i + 1]
    ]


def _reflection_pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    """Compute F.pad in mode "reflect" by slices, flips and concatenations. Negative pads cut."""
    for d, before, behind in _pad_dims(x, pads):
        # A reflection leaves out the border row itself.
        front = x.narrow(d, 1, max(before, 0)).flip(d)
        back = x.narrow(d, x.shape[d] - 1 - max(behind, 0), max(behind, 0)).flip(d)
        x = _surround(d, [front], x, [back], before, behind)
    return x


def _replication_pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    """Compute F.pad in mode "replicate" by slices and concatenations. Negative pads cut."""
    for d, before, behind in _pad_dims(x, pads):
        front = [x.narrow(d, 0, 1)] * max(before, 0)
        back = [x.narrow(d, x.shape[d] - 1, 1)] * max(behind, 0)
        x = _surround(d, front, x, back, before, behind)
    return x


def _surround(
    d: int, front: list[Tensor], x: Tensor, back: list[Tensor], before: int, behind: int
) -> Tensor:
    """Concatenate x with pieces around it, without the rows that negative pads cut."""
    start = max(-before, 0)
    # Only negative pads cut; the others add pieces below.
    x = x.narrow(d, start, x.shape[d] - start - max(-behind, 0))
    return torch.cat([piece for piece in (*front, x, *back) if piece.shape[d]], d)


def _reflection_pad_backward(grad: Tensor, x: Tensor, pads: Sequence[int]) -> Tensor:
    """Return the gradient: each row sums its readers' gradients."""
    # The forward's steps in reverse.
    for d, before, behind in reversed(_pad_dims(x, pads)):
        n, total = x.shape[d], grad.shape[d]
        front = grad.narrow(d, 0, max(before, 0)).flip(d)
        back = grad.narrow(d, total - max(behind, 0), max(behind, 0)).flip(d)
        grad = _add_pieces(d, n, grad, before, behind, [(front, 1), (back, n - 1 - max(behind, 0))])
    return grad


def _replication_pad_backward(grad: Tensor, x: Tensor, pads: Sequence[int]) -> Tensor:
    """Return the gradient: the first and last row sum their readers' gradients."""
    for d, before, behind in reversed(_pad_dims(x, pads)):
        n, total = x.shape[d], grad.shape[d]
        pieces = [(grad.narrow(d, i, 1), 0) for i in range(max(before, 0))]
        pieces += [(grad.narrow(d, total - 1 - i, 1), n - 1) for i in range(max(behind, 0))]
        grad = _add_pieces(d, n, grad, before, behind, pieces)
    return grad


def _add_pieces(
    d: int, n: int, grad: Tensor, before: int, behind: int, pieces: list[tuple[Tensor, int]]
) -> Tensor:
    """Add pieces to the middle's gradient. Piece (x, i) starts at row i of n."""

    def pad_to_size(piece: Tensor, start: int) -> Tensor:
        pads = [0, 0] * (grad.dim() - 1 - d) + [start, n - start - piece.shape[d]]
        return aten.constant_pad_nd(piece, pads)

    first = max(before, 0)
    middle = grad.narrow(d, first, grad.shape[d] - first - max(behind, 0))
    result = pad_to_size(middle, max(-before, 0))
    for piece, start in pieces:
        result = result + pad_to_size(piece, start) if piece.shape[d] else result
    return result


for _n in (2, 3):
    _spatial(f"max_unpool{_n}d", _n, "xx", "y", None)
for _n in (1, 2, 3):
    for _mode, _forward, _backward in (
        ("reflection", _reflection_pad, _reflection_pad_backward),
        ("replication", _replication_pad, _replication_pad_backward),
    ):
        _spatial(f"{_mode}_pad{_n}d", _n, "x", "y", _forward)
        _spatial(f"{_mode}_pad{_n}d_backward", _n, "yx", "x", _backward)

for _op, _in, _out in (
    (aten.fractional_max_pool2d, "h w", "u v"),
    (aten.fractional_max_pool3d, "d h w", "t u v"),
):
    # Without and with a batch dimension.
    _sentences = [
        Sentence.parse(f"{_n}c {_in}, {_n or '1 '}c r -> {_n}c {_out}, {_n}c {_out}")
        for _n in ("", "n ")
    ]
    rule_for(_op.default)(
        lambda call, sentences=_sentences, n=len(_in.split()), names=f"{_in} r {_out}": sentences[
            call.tensors[0].dim() - n - 1
        ].bind(call, replicated=names)
    )
rule(
    aten.fractional_max_pool2d_backward.default,
    "... u v, ... h w, ... u v -> ... h w",
    replicated="h w u v",
)
rule(
    aten.fractional_max_pool3d_backward.default,
    "... t u v, ... d h w, ... t u v -> ... d h w",
    replicated="d h w t u v",
)
for _op in (
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
):
    ordered(_op, "indices")  # read as if they were contiguous

rule(aten.grid_sampler_2d.default, "n c h w, n u v r -> n c u v", replicated="h w r", linear=[[0]])
rule(
    aten.grid_sampler_3d.default,
    "n c d h w, n t u v r -> n c t u v",
    replicated="d h w r",
    linear=[[0]],
)


@rule_for(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def _grid_backward(call: Call) -> FactorRule:
    """Return the rule for the gradients of image and grid.

    The grid's gradient is a sum over channels, the image's a sum over the grid.
    """
    image, spatial = call.tensors[1], call.tensors[1].dim() - 2
    inner, outer = factors("x", spatial), factors("h", spatial)
    dims = [["n", "c", *outer], ["n", "c", *inner], ["n", *outer, "t"]]
    asked = [dims[1 if r.shape == image.shape else 2] for r in call.results]
    return call.rule(
        dims, dims[1:] if len(asked) == 2 else asked, replicated=[*inner, "t"], reduce=["c", *outer]
    )
