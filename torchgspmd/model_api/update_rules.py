"""train_step's table: an optimizer's step on a group's parameters, in place.

The numbers are torch.optim's. One that changes (the step, the learning rate) may be a tensor, or a
symbol in a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from ..rules.custom_ops.updates import adam, adam_, rate

Group = Mapping[str, Any]
States = Mapping[str, Tensor]


class Rule(NamedTuple):
    """One optimizer's row in the table.

    states: a parameter's states before the first step. update: one step, given (parameters,
    gradients, states, step, group). refused: options that have to be off.
    """

    states: Callable[[Tensor, Group], dict[str, Tensor]]
    update: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[States], Tensor, Group], None]
    refused: tuple[str, ...] = ()


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return an optimizer's row, if it has one; else its own step runs (own_step.py)."""
    rule = RULES.get(type(optimizer))
    if rule and not any(g.get(option) for g in optimizer.param_groups for option in rule.refused):
        return rule
    return None


def _zeros(parameter: Tensor, *names: str) -> dict[str, Tensor]:
    return {name: torch.zeros_like(parameter) for name in names}


def _adam(
    ps: Sequence[Tensor], gs: Sequence[Tensor], states: Sequence[States], step: Tensor, group: Group
) -> None:
    beta1, beta2 = group["betas"]
    options = (
        *(step, rate(group["lr"], step), beta1, beta2, group["weight_decay"], group["eps"]),
        *(group["decoupled_weight_decay"], group["maximize"]),
    )
    alike: dict[Any, list[int]] = {}
    for i, p in enumerate(ps):
        alike.setdefault((p.dtype, p.device), []).append(i)
    for members in alike.values():
        lists = (
            [ps[i] for i in members],
            [gs[i] for i in members],
            [states[i]["exp_avg"] for i in members],
            [states[i]["exp_avg_sq"] for i in members],
        )
        # One parameter at a time in a capture: each has a layout of its own.
        if torch.compiler.is_compiling():
            for p, g, m, v in zip(*lists):
                for old, new in zip((p, m, v), adam(p, g, m, v, *options)):
                    old.copy_(new)
        else:
            adam_(*lists, *options)


def _sgd(
    ps: Sequence[Tensor], gs: Sequence[Tensor], states: Sequence[States], step: Tensor, group: Group
) -> None:
    for p, g, state in zip(ps, gs, states):
        g = -g if group["maximize"] else g
        if group["weight_decay"]:
            g = g + p * group["weight_decay"]
        if group["momentum"]:
            # The first buffer is the gradient itself, whatever the dampening.
            fresh = torch.where(step == 1, 1.0, 1 - group["dampening"]).to(g.dtype)
            moving = state["momentum_buffer"].mul_(group["momentum"]).add_(g * fresh)
            g = g + moving * group["momentum"] if group["nesterov"] else moving
        p.sub_(g * group["lr"])


def _adafactor_states(parameter: Tensor, group: Group) -> dict[str, Tensor]:
    if parameter.dim() < 2:
        return _zeros(parameter, "variance")
    # A matrix [n, m] keeps n + m numbers, not n m: factored second moments, section 3.
    rows, columns = [*parameter.shape[:-1], 1], [*parameter.shape[:-2], 1, parameter.shape[-1]]
    return {"row_var": parameter.new_zeros(rows), "col_var": parameter.new_zeros(columns)}


def _adafactor(
    ps: Sequence[Tensor], gs: Sequence[Tensor], states: Sequence[States], step: Tensor, group: Group
) -> None:
    """Adafactor (arXiv 1804.04235): torch.optim's reads norms, these stay tensors."""
    lr, (eps1, eps2), count = group["lr"], group["eps"], step.double()
    decay = count ** group["beta2_decay"]
    rho = torch.minimum(count.rsqrt(), torch.ones_like(count) * lr)  # lr may be a symbol
    for p, g, state in zip(ps, gs, states):
        g = -g if group["maximize"] else g
        floor = torch.finfo(p.dtype).eps if eps1 is None else eps1
        alpha = _root_mean_square(p).clamp_min(eps2) * rho
        if group["weight_decay"]:
            p.mul_(1 - lr * group["weight_decay"])
        squares = g.square()
        if g.dim() < 2:
            variance = state["variance"].lerp_(squares, decay.to(p.dtype))
        else:
            rows = state["row_var"].lerp_(squares.mean(-1, keepdim=True), decay.to(p.dtype))
            columns = state["col_var"].lerp_(squares.mean(-2, keepdim=True), decay.to(p.dtype))
            variance = rows * columns / rows.mean(-2, keepdim=True).clamp_min(floor)
        change = variance.clamp_min(floor * floor).rsqrt() * g
        shrink = (_root_mean_square(change) / group["d"]).clamp_min(1.0)
        p.sub_(change * (alpha / shrink).to(p.dtype))


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt().double()


_REFUSED = ("amsgrad", "differentiable")  # the optimizer's own step has them
RULES: dict[type[Optimizer], Rule] = {
    Adam: Rule(lambda p, _: _zeros(p, "exp_avg", "exp_avg_sq"), _adam, _REFUSED),
    AdamW: Rule(lambda p, _: _zeros(p, "exp_avg", "exp_avg_sq"), _adam, _REFUSED),
    Adafactor: Rule(_adafactor_states, _adafactor),
    SGD: Rule(
        lambda p, group: _zeros(p, *["momentum_buffer"] * bool(group["momentum"])),
        _sgd,
        _REFUSED[1:],
    ),
}
