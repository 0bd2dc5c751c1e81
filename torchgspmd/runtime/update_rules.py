"""What one step of an optimizer does to the parameters of a group, in place: train_step's table.

The numbers are those of torch.optim; one that changes (the step, the learning rate) may be a
tensor, or a symbol in a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..custom_ops.updates import adam, adam_, rate
from ..errors import ShardingError, user_line

Group = Mapping[str, Any]
States = Mapping[str, Tensor]


class Rule(NamedTuple):
    """A row of the table.

    states: the states of a parameter before the first step. update: one step of parameters, from
    (parameters, gradients, states of each, step, group). refused: options that have to be off.
    """

    states: Callable[[Tensor, Group], dict[str, Tensor]]
    update: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[States], Tensor, Group], None]
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
        if torch.compiler.is_compiling():
            for p, g, m, v in zip(*lists):
                for old, new in zip((p, m, v), adam(p, g, m, v, *options)):
                    old.copy_(new)
        else:
            adam_(*lists, *options)


def _sgd_states(parameter: Tensor, group: Group) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}


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


_REFUSED = ("amsgrad", "differentiable")
RULES: dict[type[Optimizer], Rule] = {
    Adam: Rule(_adam_states, _adam, _REFUSED),
    AdamW: Rule(_adam_states, _adam, _REFUSED),
    SGD: Rule(_sgd_states, _sgd, _REFUSED[1:]),
}
