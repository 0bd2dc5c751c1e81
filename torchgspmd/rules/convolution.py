"""Convolutions of any number of spatial dimensions, transposed or not, in groups g of c input and k output channels:

    n (g c) i, (g k) c r -> n (g k) o               transposed: n (g c) i, (g c) k r -> n (g k) o

Batch, groups and channels may be sharded; a sum over sharded input channels stays pending. The bias is added behind
it, so that it is added once. Spatial dimensions are whole, but for windows that do not overlap.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from .notation import Call, Dims, Rule, Shapes, make_rule
from .registry import computed, decomposition

aten = torch.ops.aten


def _factors(x, w, y, stride, padding, dilation, transposed: bool, groups: int) -> tuple[tuple[Dims, Dims, Dims], dict[str, int], str]:
    """Dimensions of input, weight and output as factors, sizes, and which factors are whole.

    Windows that lie side by side, such as those of a patch embedding or of a 1x1 kernel, make a dimension of positions
    times window. Of other spatial dimensions only those have names that the arithmetic is counted by.
    """
    sizes = {"n": x.shape[0], "g": groups, "c": x.shape[1] // groups, "k": y.shape[1] // groups}
    whole, fine, coarse, window = [], [], [], []
    many, few = (y, x) if transposed else (x, y)
    for i, r in enumerate(w.shape[2:]):
        beside = (_at(stride, i) == r and not _at(padding, i) and (_at(dilation, i) == 1 or r == 1)
                  and many.shape[i + 2] == few.shape[i + 2] * r)
        sizes |= {f"o{i}": few.shape[i + 2], f"r{i}": r}
        whole += [f"r{i}"] if beside else [f"r{i}", f"o{i}"]
        fine.append((f"o{i}", f"r{i}") if beside else ())
        coarse.append((f"o{i}",))
        window.append((f"r{i}",))
    near, far = (coarse, fine) if transposed else (fine, coarse)
    weight = (("g", "c"), ("k",)) if transposed else (("g", "k"), ("c",))
    return ((("n",), ("g", "c"), *near), (*weight, *window), (("n",), ("g", "k"), *far)), sizes, " ".join(whole)


def _at(values: Sequence[int], i: int) -> int:
    return values[i if len(values) > 1 else 0]


@computed(aten.convolution.default)
def _convolution(call: Call) -> Rule | None:
    if len(call.tensors) != 2:                                              # with a bias only where it could not be split off
        return None
    (x, w, y), sizes, whole = _factors(*call.tensors, call.results[0], *call.args[3:7], call.args[8])
    return make_rule([x, w], [y], sizes, reduce="c", whole=whole, linear=[[0], [1]], contraction=True, local=_local_groups)


def _local_groups(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
    x, w = shapes.operands
    return (*args[:8], (shapes.results[0] if args[6] else x)[1] // w[1]), kwargs


@decomposition(aten.convolution.default)
def _bias(x, w, bias, *options):
    y = aten.convolution.default(x, w, None, *options)
    return y if bias is None else y + bias.view([-1] + [1] * (x.dim() - 2))


@computed(aten.convolution_backward.default)
def _weight_gradient(call: Call) -> Rule | None:
    """The one piece that _backward leaves: the gradient of the weight, which takes part by its shape alone."""
    if list(call.args[10]) != [False, True, False]:
        return None
    grad, x, w = call.tensors
    (x, w, y), sizes, whole = _factors(x, w, grad, *call.args[4:8], call.args[9])
    positions = " ".join(name for name in sizes if name[0] == "o" and name not in whole.split())
    return make_rule([y, x, w], [w], sizes, reduce=f"n {positions}", whole=whole, linear=[[0], [1]], contraction=True,
                     local=_local_backward_groups)


def _local_backward_groups(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
    grad, x, w = shapes.operands
    return (*args[:9], (grad if args[7] else x)[1] // w[1], args[10]), kwargs


@decomposition(aten.convolution_backward.default)
def _backward(grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask):
    """The input's gradient is a convolution as well, transposed if the forward's was not."""
    options = (stride, padding, dilation, transposed, output_padding, groups)
    if list(mask) == [False, True, False]:
        return aten.convolution_backward.default(grad, x, w, None, *options, mask)
    return (_input_gradient(grad, x, w, *options) if mask[0] else None,
            aten.convolution_backward.default(grad, x, w.new_zeros(()).expand(w.shape), None, *options, [False, True, False])[1]
            if mask[1] else None,
            grad.sum([d for d in range(grad.dim()) if d != 1]) if mask[2] else None)


def _input_gradient(grad, x, w, stride, padding, dilation, transposed, output_padding, groups):
    spatial = x.dim() - 2
    stride, padding, dilation = (list(v) * (spatial if len(v) == 1 else 1) for v in (stride, padding, dilation))
    window = [d * (r - 1) + 1 for d, r in zip(dilation, w.shape[2:])]
    rest = [0] * spatial if transposed else [
        i - ((o - 1) * s - 2 * p + r) for i, o, s, p, r in zip(x.shape[2:], grad.shape[2:], stride, padding, window)]
    result = aten.convolution.default(grad, w, None, stride, padding, dilation, not transposed, rest, groups)
    for d in range(2, x.dim()):
        if result.shape[d] > x.shape[d]:                                    # output padding of at least a stride
            result = result.narrow(d, 0, x.shape[d])
    return result
