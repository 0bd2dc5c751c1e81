"""Convolutions with any number of spatial dimensions, in g groups with c inputs and k outputs each.

    convolution     n (g c) h[2p-1:2p+2], (g k) c r -> n (g k) h
    transposed      n (g c) h[p-1:p+2/2], (g c) k r -> n (g k) h

A result position reads a window of input rows, so a sharded spatial dimension needs a halo. Outside
the input the halo holds zeros, in place of padding. The input's gradient is a convolution too,
transposed if the forward is not. The weight's gradient reads the forward's windows. A sum over
sharded input channels stays pending. The bias is added behind that sum, so that it is added
once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ...compat.private_apis import _select_conv_backend, is_missing
from ...layout.halo_window import Reach
from ...rules.local_builder import LocalBuilder
from ...rules.notation import Call, DimNames, FactorRule, Ints, LocalForm, Shapes, factors
from ...rules.registry import rule_for
from ...rules.rewrites import DECLINED, Declined, rewrite
from .window_rule import cut


def _factors(
    x: Tensor, w: Tensor, positions: Sequence[int], transposed: bool, groups: int
) -> tuple[list[DimNames], dict[str, int], list[str]]:
    """Return the factors for input, weight and output, their sizes, and the window's factors."""
    spatial, windows = factors("h", w.dim() - 2), factors("r", w.dim() - 2)
    a, b = w.shape[:2]
    inner, outer = (a // groups, b) if transposed else (b, a // groups)
    sizes = {"n": x.shape[0], "g": groups, "c": inner, "k": outer}
    sizes |= dict(zip(windows, w.shape[2:])) | dict(zip(spatial, positions))
    weight = (("g", "c"), "k") if transposed else (("g", "k"), "c")
    tensors = ["n", ("g", "c"), *spatial], [*weight, *windows], ["n", ("g", "k"), *spatial]
    return list(tensors), sizes, windows


def _reaches(
    w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Reach]:
    """Return for each spatial dimension the fine rows that a coarse position reads."""
    return [
        Reach(
            -_along_dim(padding, i),
            _along_dim(dilation, i) * (r - 1) - _along_dim(padding, i),
            _along_dim(stride, i),
            fill=0.0,
        )
        for i, r in enumerate(w.shape[2:])
    ]


def _along_dim(values: Sequence[int], i: int) -> int:
    return values[i if len(values) > 1 else 0]


@rule_for(aten.convolution.default)
def _convolution(call: Call) -> FactorRule | Declined:
    if len(call.tensors) != 2:  # a bias that the decomposition could not separate
        return DECLINED
    (x, w), y = call.tensors, call.results[0]
    stride, padding, dilation, transposed, _, groups = call.args[3:9]
    (x_dims, w_dims, y_dims), sizes, windows = _factors(x, w, y.shape[2:], transposed, groups)
    reaches = _reaches(w, stride, padding, dilation)
    return call.rule(
        [x_dims, w_dims],
        [y_dims],
        sizes,
        reduce="c",
        replicated=windows,
        linear=[[0], [1]],
        contraction=True,
        row_access={
            (0, i + 2): reach.inverse(0.0) if transposed else reach
            for i, reach in enumerate(reaches)
        },
        local=LocalForm(_emit, when="n g c k", positional=False, any_size=True),
    )


def _emit(local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
    """Convolve windows, which include the padding.

    A transposed convolution computes all positions that its window touches, then cuts.
    """
    x, w, _, stride, padding, dilation, transposed, rest, _ = args
    spatial = range(len(local.shape(w)) - 2)
    stride, padding, dilation, rest = (
        [_along_dim(v, i) for i in spatial] for v in (stride, padding, dilation, rest)
    )
    # The distance between a window's first and last elements.
    spans = [d * (n - 1) for d, n in zip(dilation, local.shape(w)[2:])]
    sharded, cuts = [i for i in spatial if local.sharded(f"h{i}")], {}
    # The device may have some of the groups.
    groups = (local.results[0].shape if transposed else local.shape(x))[1] // local.shape(w)[1]
    # A sharded dimension's window includes its padding, at both ends.
    rest = [0 if i in sharded else n for i, n in enumerate(rest)]
    # With stride 1, a plain convolution computes the device's own positions alone.
    if sharded and transposed and set(stride) == {1} and not any(rest):
        margins = [0 if i in sharded else spans[i] - padding[i] for i in spatial]
        return _transposed_as_plain(local, x, w, margins, dilation, groups)
    for i in sharded:
        if transposed:
            cuts[i] = cut(local, 0, i + 2, stride[i], padding[i], spans[i])
        padding[i] = cuts[i].spare if transposed else 0
    options = (None, stride, padding, dilation, transposed, rest, groups)
    y = _same_kernel(local, x, w, args[2:], options)
    for i, own in cuts.items():
        y = own.apply(local, y, i + 2)
    return y


def _transposed_as_plain(
    local: LocalBuilder, x: object, w: object, padding: Ints, dilation: Ints, groups: int
) -> object:
    """Return a transposed convolution with stride 1 as a plain one.

    It computes only the device's own positions. Negative padding leaves out rows in x that only
    positions in the padding read.
    """
    if min(padding) < 0:
        # constant_pad_nd lists the last dimension first; negative numbers cut rows.
        left_out = [min(0, n) for n in reversed(padding) for _ in range(2)]
        x = local.call(aten.constant_pad_nd.default, x, left_out)
        padding = [max(0, n) for n in padding]
    inner, outer, *window = local.shape(w)  # (g c), k, r
    # A transposed convolution is a plain one with its window flipped and its channels exchanged.
    w = local.call(aten.reshape.default, w, [groups, inner // groups, outer, *window])
    w = local.call(
        aten.reshape.default,
        local.call(aten.transpose.int, w, 1, 2),
        [groups * outer, inner // groups, *window],
    )
    w = local.call(aten.flip.default, w, list(range(2, 2 + len(window))))
    ones, zeros = [1] * len(window), [0] * len(window)
    options = (None, ones, padding, dilation, False, zeros, groups)
    return local.call(aten.convolution.default, x, w, *options)


@rewrite("wide", aten.mkldnn_convolution.default)
def _wide_convolution(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Convolve in 64 bits, which that kernel does not take."""
    padding, stride, dilation, groups = options
    rest = [0] * len(stride)
    return aten.convolution.default(x, w, bias, stride, padding, dilation, False, rest, groups)


def _same_kernel(
    local: LocalBuilder,
    x: object,
    w: object,
    global_options: Sequence[object],
    options: Sequence[object],
) -> object:
    """Convolve by the kernel that PyTorch takes for the global shapes and `global_options`.

    On the CPU, PyTorch takes another kernel for small shapes. Its rounding differs, which may flip
    a ReLU or a maximum.
    """
    whole = local.operands[:2]
    if any(local.known_size(factor) is None for factor in local.rule.sizes):
        return local.call(aten.convolution.default, x, w, *options)  # each run takes its own
    kernels = {
        _kernel(whole, [t.shape for t in whole], global_options),
        _kernel(whole, [local.shape(x), local.shape(w)], options),
    }
    if "Mkldnn" in kernels and len(kernels) > 1:
        _, stride, padding, dilation, _, _, groups = options
        return local.call(
            aten.mkldnn_convolution.default, x, w, None, padding, stride, dilation, groups
        )
    return local.call(aten.convolution.default, x, w, *options)


def _kernel(
    like: Sequence[Tensor], shapes: Sequence[Sequence[int]], options: Sequence[object]
) -> str:
    """Return the name of PyTorch's CPU kernel; empty on other devices."""
    if is_missing(_select_conv_backend) or any(t.device.type != "cpu" for t in like):
        return ""
    return _select_conv_backend(
        # PyTorch chooses by shapes; expanded scalars have them without their memory.
        *(torch.empty((), dtype=t.dtype).expand(s) for t, s in zip(like, shapes)),
        *options,
        None,
    ).name


@rewrite("decompose", aten.convolution.default)
def _split_bias(x: Tensor, w: Tensor, bias: Tensor | None, *options: object) -> Tensor:
    y = aten.convolution.default(x, w, None, *options)
    return y if bias is None else y + bias.view([-1] + [1] * (x.dim() - 2))


@rule_for(aten.convolution_backward.default)
def _weight_gradient(call: Call) -> FactorRule | Declined:
    """Return the rule for the weight's gradient, which _backward leaves as it is.

    The weight only gives its shape.
    """
    if list(call.args[10]) != [False, True, False]:
        return DECLINED
    grad, x, w = call.tensors
    stride, padding, dilation, transposed, _, groups = call.args[4:10]
    # The coarse tensor has a row for each position; windows read the other tensor.
    few, many = (x, 0) if transposed else (grad, 1)
    (x_dims, w_dims, y_dims), sizes, windows = _factors(x, w, few.shape[2:], transposed, groups)
    reaches = _reaches(w, stride, padding, dilation)
    return call.rule(
        [y_dims, x_dims, w_dims],
        [w_dims],
        sizes,
        reduce=[f for f in sizes if f[0] in "nh"],
        replicated=windows,
        linear=[[0], [1]],
        contraction=True,
        row_access={(many, i + 2): reach for i, reach in enumerate(reaches)},
        local=LocalForm(_emit_weight_gradient, arguments=_local_backward_groups, any_size=True),
    )


def _local_backward_groups(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
    grad, x, w = shapes.operands
    return (*args[:9], (grad if args[7] else x)[1] // w[1], args[10]), kwargs


def _emit_weight_gradient(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    grad, x, w, _, stride, padding, dilation, transposed, rest, _, mask = args
    spatial = range(len(local.shape(w)) - 2)
    padding, rest = (
        [0 if local.sharded(f"h{i}") else _along_dim(v, i) for i in spatial]
        for v in (padding, rest)
    )
    groups = local.shape(grad if transposed else x)[1] // local.shape(w)[1]
    options = (None, stride, padding, dilation, transposed, rest, groups, mask)
    grads = local.call(aten.convolution_backward.default, grad, x, w, *options)
    return [None, local.call(operator.getitem, grads, 1), None]


@rewrite("decompose", aten.convolution_backward.default)
def _backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients for input, weight and bias. The input's is a convolution."""
    *options, mask = rest
    backward, only_weight = aten.convolution_backward.default, [False, True, False]
    if list(mask) == only_weight:
        return backward(grad, x, w, None, *options, mask)
    w_grad = None
    x_grad = _input_gradient(grad, x, w, *options) if mask[0] else None
    if mask[1]:
        # Only the weight's shape counts, so it needs no memory.
        like = w.new_zeros(()).expand(w.shape)
        w_grad = backward(grad, x, like, None, *options, only_weight)[1]
    bias = grad.sum([d for d in range(grad.dim()) if d != 1]) if mask[2] else None
    return x_grad, w_grad, bias


def _input_gradient(grad: Tensor, x: Tensor, w: Tensor, *options: Any) -> Tensor:
    """Compute the input's gradient by a convolution, transposed if the forward is not."""
    spatial, (*geometry, transposed, _, groups) = x.dim() - 2, options
    stride, padding, dilation = (list(v) * (spatial if len(v) == 1 else 1) for v in geometry)
    window = [d * (r - 1) + 1 for d, r in zip(dilation, w.shape[2:])]
    # Output padding: the input's last rows, which no window reached.
    rest = (
        [0] * spatial
        if transposed
        else [
            i - ((o - 1) * s - 2 * p + r)
            for i, o, s, p, r in zip(x.shape[2:], grad.shape[2:], stride, padding, window)
        ]
    )
    result = aten.convolution.default(
        grad, w, None, stride, padding, dilation, not transposed, rest, groups
    )
    for d in range(2, x.dim()):
        if result.shape[d] > x.shape[d]:  # the output padding was a stride or more
            result = result.narrow(d, 0, x.shape[d])
    return result
