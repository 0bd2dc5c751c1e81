"""Inline PyTorch's Python functions, so that a mode sees the calls in them.

F.gumbel_softmax, for example, passes itself to an active TorchFunctionMode as one call. The mode is
off while it handles the call, and would miss products and attention inside.
Functions over lists of tensors, which torch.optim calls with foreach=True and fused=True, are run
tensor by tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rules.custom_ops.updates import adam, adam_formula, rate
from ...rules.ops.bags import bag_max
from ...rules.rewrites import DECLINED, Declined, rewrite, rewrite_of


def bodies(function: Callable) -> tuple[Callable, ...]:
    """Return functions that compute the same by calls that a mode sees, the better first.

    One that declines is followed by the next.
    """
    row = rewrite_of("body", function)
    return _copies(function) if row is None else (row, *_copies(function))


@cache
def _copies(function: Callable) -> tuple[Callable, ...]:
    copies = tensor_by_tensor(function), _copy_without_dispatch(function)
    return tuple(copy for copy in copies if copy is not None)


def _copy_without_dispatch(function: Callable) -> Callable | None:
    """Return a copy of torch's Python function that runs instead of dispatching to a mode.

    Return None for other functions.
    """
    if not isinstance(function, FunctionType) or not str(function.__module__).startswith("torch."):
        return None
    overrides = {
        name: (lambda *tensors: False)
        for name in function.__code__.co_names
        if name.startswith("has_torch_function") and name in function.__globals__
    }
    # A copy of a method with super() would not be the method that super() looks up.
    if not overrides or "__class__" in function.__code__.co_freevars:
        return None
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **overrides},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@rewrite("body", F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: object = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | Declined:
    """Reduce the rows in weight [v, d] by bag; return [b, d].

    input is [b, l] with equally long bags, or [n] with the bags' offsets [b]. Gradients are dense.
    """
    if max_norm is not None or scale_grad_by_freq or mode not in ("sum", "mean", "max"):
        return DECLINED
    if (
        input.dim() == 1
        and (offsets is None or not input.numel())
        or per_sample_weights is not None
        and mode != "sum"
    ):
        return DECLINED
    if padding_idx is None:
        counts = torch.ones_like(input, dtype=torch.bool)
    else:
        counts = input != padding_idx % weight.shape[0]
    if input.dim() == 1:
        assert offsets is not None
        bags = offsets.shape[0] - include_last_offset
        places = torch.arange(input.shape[0], device=input.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets[:bags], places, right=True) - 1  # by place
    else:
        bag, bags = None, input.shape[0]
    if mode == "max":
        best = bag_max(weight, input, counts, bag, bags)
        # PyTorch gives zeros for an empty bag.
        return best.masked_fill((_number(counts, bag, bags) == 0).unsqueeze(-1), 0)
    rows = F.embedding(input, weight)  # [b, l, d] or [n, d]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is not None:
        rows = rows * counts.unsqueeze(-1)
    if bag is None:
        total = rows.sum(1)
    else:
        total = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
    if mode == "sum":
        return total
    return total / _number(counts, bag, bags).clamp(min=1).unsqueeze(-1)


def _number(counts: Tensor, bag: Tensor | None, bags: int) -> Tensor:
    """Return how many rows a bag has."""
    if bag is None:
        return counts.sum(1)
    return counts.new_zeros(bags, dtype=torch.long).index_add(0, bag, counts.long())


@rewrite("body", torch.segment_reduce)
def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor | Declined:
    """Reduce consecutive rows in data [n, ...] into segments [b, ...].

    lengths [b] or offsets [b + 1] say where a segment ends.
    """
    bounds = lengths if lengths is not None else offsets
    if axis or indices is not None or bounds is None or bounds.dim() != 1:
        return DECLINED
    if reduce not in _REDUCTIONS or reduce == "mean" and initial is not None:
        return DECLINED
    ends = bounds.cumsum(0) if lengths is not None else bounds[1:]
    places = torch.arange(data.shape[0], device=data.device, dtype=ends.dtype)
    segment = torch.searchsorted(ends, places, right=True)
    neutral, scatter = _REDUCTIONS[reduce]
    start = data.new_full((ends.shape[0], *data.shape[1:]), neutral if initial is None else initial)
    if scatter is None:
        total = start.index_add(0, segment, data)
        count = ends.diff(prepend=ends.new_zeros(1)) if lengths is None else lengths
        count = count.reshape(-1, *[1] * (data.dim() - 1))
        return total / count if reduce == "mean" else total
    index = segment.reshape(-1, *[1] * (data.dim() - 1)).expand_as(data)
    return start.scatter_reduce(0, index, data, scatter)


# A reduction's neutral value, and its name in scatter_reduce.
_REDUCTIONS: dict[str, tuple[float, str | None]] = {
    "sum": (0.0, None),
    "mean": (0.0, None),
    "prod": (1.0, "prod"),
    "max": (float("-inf"), "amax"),
    "min": (float("inf"), "amin"),
}


def tensor_by_tensor(function: Callable) -> Callable | None:
    """Return a body of torch._foreach_x that calls torch.x or Tensor.x_ for each tensor.

    Return None for other functions.
    """
    name = getattr(function, "__name__", "").removeprefix("_foreach_")
    if name in _FUSED:
        return _FUSED[name] if function is getattr(torch, name) else None
    if function is not getattr(torch, f"_foreach_{name}", None):
        return None
    single = _SINGLE.get(name) or getattr(Tensor if name.endswith("_") else torch, name)

    def body(*args: Any, **kwargs: Any) -> Sequence[Tensor]:
        count = max(len(a) for a in args if isinstance(a, (list, tuple)))
        results = tuple(
            single(*(_entry(a, i) for a in args), **{k: _entry(a, i) for k, a in kwargs.items()})
            for i in range(count)
        )
        return args[0] if name.endswith("_") else results

    return body


def _entry(argument: Any, i: int) -> Any:
    # A vector holds one number for each tensor.
    packed = isinstance(argument, (list, tuple)) or isinstance(argument, Tensor) and argument.dim()
    return argument[i] if packed else argument


def _addc(combine: Callable, name: str) -> Callable:
    """Return addcmul or addcdiv, by add or add_; `value` or `scalars` may be a tensor."""

    def body(x: Tensor, a: Any, b: Any, value: Any = 1, scalars: Any = None) -> Tensor:
        factor, term = value if scalars is None else scalars, combine(a, b)
        return getattr(x, name)(term if isinstance(factor, int) and factor == 1 else term * factor)

    return body


def _in_place_bound(bound: Callable, name: str) -> Callable:
    """Return maximum_ or minimum_, which Tensor lacks; the other operand may be a number."""
    return lambda x, other: (
        x.copy_(bound(x, other)) if isinstance(other, Tensor) else getattr(x, name)(other)
    )


_SINGLE: dict[str, Callable] = {
    "addcdiv": _addc(operator.truediv, "add"),
    "addcdiv_": _addc(operator.truediv, "add_"),
    "addcmul": _addc(operator.mul, "add"),
    "addcmul_": _addc(operator.mul, "add_"),
    "maximum": lambda x, other: (
        torch.maximum(x, other) if isinstance(other, Tensor) else x.clamp_min(other)
    ),
    "minimum": lambda x, other: (
        torch.minimum(x, other) if isinstance(other, Tensor) else x.clamp_max(other)
    ),
    "maximum_": _in_place_bound(torch.maximum, "clamp_min_"),
    "minimum_": _in_place_bound(torch.minimum, "clamp_max_"),
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "powsum": lambda x, ord=2, dtype=None: x.to(dtype or x.dtype).abs().pow(ord).sum(),
}


# ------------------------------------------------------------ optimizers as one kernel


def _adam(decoupled: bool) -> Callable:
    """Return the body for _fused_adam_, or for _fused_adamw_ (decoupled weight decay)."""

    def body(
        params: Any,
        grads: Any,
        exp_avgs: Any,
        exp_avg_sqs: Any,
        max_exp_avg_sqs: Any,
        state_steps: Any,
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Any = None,
        found_inf: Any = None,
    ) -> Any:
        if grad_scale is not None or found_inf is not None:
            return DECLINED
        options = beta1, beta2, weight_decay, eps, decoupled, maximize
        for i, (p, g, m, v, step) in enumerate(
            zip(params, grads, exp_avgs, exp_avg_sqs, state_steps)
        ):
            if amsgrad:
                new = adam_formula(p, g, m, v, max_exp_avg_sqs[i], step, lr, *options)
            else:
                new = adam(p, g, m, v, step, rate(lr, step), *options)
            # The formula reads old values, so the copies come last.
            old = (p, m, v, *max_exp_avg_sqs[i : i + 1])
            for tensor, value in zip(old, new):
                tensor.copy_(value)
        return params

    return body


def _sgd(
    params: Any,
    grads: Any,
    momentum_buffer_list: Any,
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> object:
    """Run _fused_sgd_ tensor by tensor."""
    if grad_scale is not None or found_inf is not None:
        return DECLINED
    for i, (p, g) in enumerate(zip(params, grads)):
        g = (-g if maximize else g) + p * weight_decay
        if momentum:
            buffer = momentum_buffer_list[i]
            buffer.copy_(g if is_first_step else buffer * momentum + g * (1 - dampening))
            g = g + buffer * momentum if nesterov else buffer
        p.sub_(g * lr)
    return params


_FUSED: dict[str, Callable] = {
    "_fused_adam_": _adam(False),
    "_fused_adamw_": _adam(True),
    "_fused_sgd_": _sgd,
}
