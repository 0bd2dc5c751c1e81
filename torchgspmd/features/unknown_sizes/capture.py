"""Replacements for functions whose kernels need sizes, where only a run knows these.

    F.pad(x[:n], (0, m - n))          a concatenation
    F.interpolate(x, size=n)          rows that are looked up, with their weights
    F.adaptive_avg_pool1d(x[:n], 2)   a product with each row's shares in the results

Only row counts are computed with. All other dimensions stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ...capture.traced_values import is_transforming
from ...compat.private_apis import is_functorch_wrapped_tensor, pad_sequence
from ...errors import ShardingError
from ...rules.rewrites import DECLINED, rewrite


class _WithPositions(Function):
    """A computation at one torch.vmap level, with positions as one more leading dimension."""

    @staticmethod
    def forward(run: Callable[..., Tensor], front: int, *tensors: Tensor) -> Tensor:
        raise AssertionError("the level of torch.vmap is not entered")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: the operation that `run` calls is differentiated."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Callable[..., Tensor], front: int, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        """Run with the positions in front."""
        # An operand that torch.vmap does not map is the same at all positions.
        batched = (
            x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[2:])
        )
        return with_positions(run, front + 1, *batched), 0


def with_positions(run: Callable[..., Tensor], front: int, *tensors: Tensor) -> Tensor:
    """Return run(front, *tensors). front: the number of position dimensions that lead."""
    # Operands that torch.vmap does not map have no positions at its level.
    if is_transforming() and any(map(is_functorch_wrapped_tensor, tensors)):
        return _WithPositions.apply(run, front, *tensors)  # pyright: ignore
    return run(front, *tensors)


def is_unknown(*values: Any) -> bool:
    """Return whether a shape or number among the values is known only in a run."""
    for value in values:
        if isinstance(value, Tensor):
            value = tuple(value.shape)
        if isinstance(value, (tuple, list)) and is_unknown(*value):
            return True
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return True
    return False


def arange_of(x: Tensor, count: Any) -> Tensor:
    return torch.arange(count, device=x.device)


def each_dim(value: Any, count: int) -> list:
    """Return a value for each dimension: a list as it is, or a number repeated."""
    return list(value) * (count if len(value) == 1 else 1) if _is_list(value) else [value] * count


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


# --------------------------------------------------------------------------------- moved rows


@rewrite("vmap value", F.pad)
def _pad(
    input: Tensor, pad: Sequence[Any], mode: str = "constant", value: float | None = None
) -> Any:
    if not is_unknown(input, tuple(pad)):
        return DECLINED
    # Under torch.vmap, its positions become one more leading dimension.
    return with_positions(lambda _, x: padded(x, pad, mode, value), 0, input)


def padded(input: Tensor, pad: Sequence[Any], mode: str, value: float | None) -> Tensor:
    """Pad the last dimensions with rows before and after."""
    if not _is_number(*pad):
        return input.clone()  # new memory, also where nothing is added
    # F.pad lists the last dimension first.
    for at in range(0, len(pad), 2):
        dim, (before, after) = input.dim() - 1 - at // 2, pad[at : at + 2]
        if not _is_number(before, after):
            continue
        if mode == "constant":
            input = _pad_dim(input, dim, before, after, 0 if value is None else value)
        else:
            # Add x's own rows before and after it: reflect, replicate, circular.
            size = input.shape[dim]
            rows = arange_of(input, size + before + after) - before
            if mode == "circular":
                rows = rows.remainder(size)
            elif mode == "replicate":
                rows = rows.clamp(0, size - 1)
            else:
                # Mirrored at row 0 and at row size - 1.
                rows = (size - 1) - ((size - 1) - rows.abs()).abs()
            input = input.index_select(dim, rows)
    return input


def _is_number(*counts: Any) -> bool:
    return any(isinstance(n, torch.SymInt) or n != 0 for n in counts)


def _pad_dim(x: Tensor, dim: int, before: Any, after: Any, value: float) -> Tensor:
    """Add constant rows before and after; negative numbers cut rows off."""
    # A number that only a run knows has no known sign, so it cuts nothing.
    cuts = [max(-n, 0) if isinstance(n, int) else 0 for n in (before, after)]
    if any(cuts):
        x = x.narrow(dim, cuts[0], x.shape[dim] - sum(cuts))
    rows = [
        x.new_full([*x.shape[:dim], count, *x.shape[dim + 1 :]], value)
        if isinstance(count, torch.SymInt) or count > 0
        else None
        for count in (before, after)
    ]
    pieces = [piece for piece in (rows[0], x, rows[1]) if piece is not None]
    return torch.cat(pieces, dim) if len(pieces) > 1 else x.clone()


@rewrite("value", torch.diff, Tensor.diff)
def _diff(
    input: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Any:
    if not is_unknown(input, prepend, append):
        return DECLINED
    pieces = [t for t in (prepend, input, append) if t is not None]
    x = torch.cat(pieces, dim) if len(pieces) > 1 else input
    for _ in range(n):
        size = x.shape[dim]
        later, earlier = x.narrow(dim, 1, size - 1), x.narrow(dim, 0, size - 1)
        # As in PyTorch: two booleans differ by xor.
        x = later ^ earlier if x.dtype is torch.bool else later - earlier
    return x if n else x.clone()


@rewrite("value", torch.roll, Tensor.roll)
def _roll(input: Tensor, shifts: Any, dims: Any = ()) -> Any:
    if not is_unknown(input, shifts):
        return DECLINED
    dims = list(dims) if _is_list(dims) else [dims]
    if not dims:
        # Without dims, PyTorch rolls the flattened tensor.
        return _roll(input.reshape(-1), shifts, 0).view(input.shape)
    for shift, dim in zip(each_dim(shifts, 1), dims):
        size = input.shape[dim]
        input = input.index_select(dim, (arange_of(input, size) - shift).remainder(size))
    return input


@rewrite("value", Tensor.repeat, torch.tile, Tensor.tile)
def _repeat(input: Tensor, *counts: Any, dims: Any = ()) -> Any:
    counts = tuple(dims) or (tuple(counts[0]) if counts and _is_list(counts[0]) else counts)
    if not is_unknown(input, counts):
        return DECLINED
    # Missing dimensions lead with size 1, as in PyTorch.
    rank = max(len(counts), input.dim())
    counts = (*[1] * (rank - len(counts)), *counts)
    sizes = [*[1] * (rank - input.dim()), *input.shape]
    # A dimension of size 1 before each dimension, which expands by the count.
    apart = input.view([n for size in sizes for n in (1, size)])
    repeated = apart.expand([n for pair in zip(counts, sizes) for n in pair])
    # New memory: a write to the result is none to the input, of which `repeated` is a view.
    return repeated.clone().reshape([count * size for count, size in zip(counts, sizes)])


@rewrite("value", pad_sequence)
def _pad_sequence(
    sequences: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    if not is_unknown(*sequences):
        return DECLINED
    longest = sequences[0].shape[0]
    for each in sequences[1:]:
        # max() would compare sizes that only a run knows.
        longest = torch.sym_max(longest, each.shape[0])
    at_left = padding_side == "left"
    padded = []
    for each in sequences:
        missing = longest - each.shape[0]
        counts = (missing, 0) if at_left else (0, missing)
        padded.append(_pad_dim(each, 0, *counts, padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


# ------------------------------------------------------------------------------- interpolation


@rewrite("value", F.interpolate)
def _interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    if not is_unknown(input, size, scale_factor) or mode not in (*_TAPS, "area"):
        return DECLINED
    if antialias:
        if not is_unknown(scale_factor):
            return DECLINED
        raise ShardingError.here(
            "F.interpolate(antialias=True) scales by a number that depends on values",
            why="its kernel takes the number when the program is made",
            fix="compute the number from sizes or arguments, or leave out antialias",
        )
    dims = range(2, input.dim())
    factors = each_dim(scale_factor, len(dims))
    sizes = each_dim(size, len(dims))
    if size is None:
        sizes = [_scaled(input.shape[dim], factor) for dim, factor in zip(dims, factors)]
    if mode == "area":
        return _adaptive_average(input, sizes)
    for dim, count, factor in zip(dims, sizes, factors):
        # Otherwise PyTorch computes the ratio from the rounded sizes.
        given = None if size is not None or recompute_scale_factor else factor
        input = _resample(input, dim, count, given, mode, bool(align_corners))
    return input


def _scaled(size: Any, factor: Any) -> Any:
    # A whole factor keeps the size a product of integers.
    if not is_unknown(factor) and float(factor).is_integer():
        factor = int(factor)
    return (
        torch.sym_int(size * factor)
        if isinstance(factor, float | torch.SymFloat)
        else (size * factor)
    )


def _nearest(place: Tensor, size: Any) -> list[tuple[Tensor, None]]:
    return [(place.floor(), None)]


def _linear(place: Tensor, size: Any) -> list[tuple[Tensor, Tensor]]:
    first = place.floor()
    return [(first, 1 - (place - first)), (first + 1, place - first)]


def _cubic(place: Tensor, size: Any) -> list[tuple[Tensor, Tensor]]:
    """Return four rows with the weights of Keys' kernel, a = -0.75."""
    first, a = place.floor(), -0.75
    t = place - first
    far, near = [s + 1 for s in (t, 1 - t)], [t, 1 - t]
    outer = [((a * s - 5 * a) * s + 8 * a) * s - 4 * a for s in far]
    inner = [((a + 2) * s - (a + 3)) * s * s + 1 for s in near]
    weights = (outer[0], inner[0], inner[1], outer[1])
    return [(first + i - 1, weight) for i, weight in enumerate(weights)]


_TAPS: dict[str, Callable] = {
    "nearest": _nearest,
    "nearest-exact": _nearest,
    "linear": _linear,
    "bilinear": _linear,
    "trilinear": _linear,
    "bicubic": _cubic,
}


def _resample(
    x: Tensor, dim: int, count: Any, factor: float | None, mode: str, align_corners: bool
) -> Tensor:
    """Return x with `count` rows along one dimension, each from a few rows in x."""
    size, is_nearest = x.shape[dim], mode.startswith("nearest")
    # PyTorch computes positions in float32, except for float64.
    dtype = torch.float32 if is_nearest or x.dtype in (torch.half, torch.bfloat16) else x.dtype
    rows = arange_of(x, count).to(dtype)
    if align_corners:
        place = rows * ((size - 1) / torch.sym_max(count - 1, 1))
    else:
        ratio = size / count if factor is None else 1 / factor
        middle = 0.0 if mode == "nearest" else 0.5
        place = (rows + middle) * ratio - (0.0 if is_nearest else 0.5)
        # PyTorch clamps positions to 0 in all modes but bicubic.
        place = place if mode == "bicubic" else place.clamp_min(0)
    result = None
    for row, weight in _TAPS[mode](place, size):
        taken = x.index_select(dim, row.long().clamp(0, size - 1))
        if weight is not None:
            taken = taken * weight.to(x.dtype).view([-1] + [1] * (x.dim() - 1 - dim))
        result = taken if result is None else result + taken
    assert result is not None
    return result


# ------------------------------------------------------------------------------------- pooling


def _bins(x: Tensor, size: Any, count: Any) -> Tensor:
    """Return which rows [size] belong to each of the `count` results in adaptive pooling."""
    result, row = arange_of(x, count).unsqueeze(1), arange_of(x, size)
    first = result * size // count
    # Rounded up, so that neighbors may share a row.
    after = ((result + 1) * size + (count - 1)) // count
    return (row >= first) & (row < after)


def _adaptive_average(x: Tensor, counts: Sequence[Any]) -> Tensor:
    for dim, count in zip(range(x.dim() - len(counts), x.dim()), counts):
        # A single result is a mean, which needs no matrix.
        if count is not None and not isinstance(count, torch.SymInt) and count == 1:
            x = x.mean(dim, keepdim=True)
        elif count is not None:
            bins = _bins(x, x.shape[dim], count).to(x.dtype)
            shares = bins / bins.sum(1, keepdim=True)
            x = (x.transpose(dim, -1) @ shares.T).transpose(dim, -1)
    return x


def _adaptive_maximum(x: Tensor, counts: Sequence[Any]) -> Tensor:
    for dim, count in zip(range(x.dim() - len(counts), x.dim()), counts):
        if count is not None:
            # [.., results, rows]: each result sees its own rows alone.
            rows = x.transpose(dim, -1).unsqueeze(-2)
            bins = _bins(x, x.shape[dim], count)
            x = rows.masked_fill(~bins, -math.inf).max(-1).values.transpose(dim, -1)
    return x


def _register_adaptive(pool: Callable, dims: int, *targets: Callable) -> None:
    @rewrite("value", *targets)
    def adaptive(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        counts = each_dim(output_size, dims)
        if return_indices or not is_unknown(input.shape[-dims:], counts):
            return DECLINED
        return pool(input, counts)


for _dims in (1, 2, 3):
    _register_adaptive(_adaptive_average, _dims, getattr(F, f"adaptive_avg_pool{_dims}d"))
    _register_adaptive(_adaptive_maximum, _dims, getattr(F, f"adaptive_max_pool{_dims}d"))


def _register_maximum(dims: int, *targets: Callable) -> None:
    @rewrite("value", *targets)
    def maximum(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices or ceil_mode or not is_unknown(input.shape[-dims:]):
            return DECLINED
        sizes = each_dim(kernel_size, dims)
        strides = sizes if stride in (None, [], ()) else each_dim(stride, dims)
        rest = zip(sizes, strides, each_dim(padding, dims), each_dim(dilation, dims))
        for dim, numbers in zip(range(input.dim() - dims, input.dim()), rest):
            input = _window_maximum(input, dim, *numbers)
        return input


def _window_maximum(
    x: Tensor, dim: int, size: int, stride: int, padding: int, dilation: int
) -> Tensor:
    """Return the largest of `size` rows around each `stride`-th row."""
    x = _pad_dim(x, dim, padding, padding, -math.inf)
    count = (x.shape[dim] - dilation * (size - 1) - 1) // stride + 1
    first = arange_of(x, count) * stride
    rows = [x.index_select(dim, first + i * dilation) for i in range(size)]
    return torch.stack(rows).max(0).values


for _dims in (1, 2, 3):
    _register_maximum(_dims, getattr(F, f"max_pool{_dims}d"))
