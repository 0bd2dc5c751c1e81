"""PyTorch's functions over lists of tensors, tensor by tensor.

torch.optim calls them with foreach=True and fused=True.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...rules.custom_ops.updates import adam, adam_formula, rate
from ...rules.rewrites import DECLINED


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
