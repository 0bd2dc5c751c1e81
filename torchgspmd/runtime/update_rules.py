"""What one step of an optimizer does to one parameter, in place: the table of train_step.

The formulas are those of torch.optim; a number that changes (the step, the learning rate) may be a
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..errors import ShardingError, user_line

Group = Mapping[str, Any]
States = Mapping[str, Tensor]


class Rule(NamedTuple):
    """A row of the table.

    states: the states of a parameter before the first step. update: one step, in place. refused:
    options that have to be off.
    """

    states: Callable[[Tensor, Group], dict[str, Tensor]]
    update: Callable[[Tensor, Tensor, States, Tensor, Group], None]
    refused: tuple[str, ...] = ()

    def check(self, group: Group) -> None:
        """Raise ShardingError for an option of the optimizer that the rule lacks."""
        for option in self.refused:
            if group.get(option):
                raise ShardingError(
                    f"train_step has no rule for {option}={group[option]}",
                    where=user_line(),
                    fix="leave it out, or parallelize the model alone",
                )


def _adam_states(parameter: Tensor, group: Group) -> dict[str, Tensor]:
    return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}


def _adam(p: Tensor, g: Tensor, states: States, step: Tensor, group: Group) -> None:
    """Adam (arXiv 1412.6980), with decoupled weight decay AdamW (arXiv 1711.05101)."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    mean, square = states["exp_avg"], states["exp_avg_sq"]
    g = -g if group["maximize"] else g
    if group["decoupled_weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    elif group["weight_decay"]:
        g = g + p * group["weight_decay"]
    step = step.double()  # as Python's numbers, in which torch.optim computes the corrections
    mean.lerp_(g, 1 - beta1)
    square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = (square.sqrt() / (1 - beta2**step).sqrt()).add_(group["eps"])
    p.sub_(mean / root * (lr / (1 - beta1**step)))


def _sgd_states(parameter: Tensor, group: Group) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}


def _sgd(p: Tensor, g: Tensor, states: States, step: Tensor, group: Group) -> None:
    g = -g if group["maximize"] else g
    if group["weight_decay"]:
        g = g + p * group["weight_decay"]
    if group["momentum"]:
        # The first buffer is the gradient itself, whatever the dampening.
        fresh = torch.where(step == 1, 1.0, 1 - group["dampening"]).to(g.dtype)
        moving = states["momentum_buffer"].mul_(group["momentum"]).add_(g * fresh)
        g = g + moving * group["momentum"] if group["nesterov"] else moving
    p.sub_(g * group["lr"])


_REFUSED = ("amsgrad", "differentiable")
RULES: dict[type[Optimizer], Rule] = {
    Adam: Rule(_adam_states, _adam, _REFUSED),
    AdamW: Rule(_adam_states, _adam, _REFUSED),
    SGD: Rule(_sgd_states, _sgd, _REFUSED[1:]),
}
