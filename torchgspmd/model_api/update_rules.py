"""train_step's table: an optimizer's step on a group's parameters, in place.

The numbers are torch.optim's. One that changes (the step, the learning rate) may be a tensor, or a
symbol in a capture.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from ..errors import ShardingError
from ..rules.custom_ops.updates import adam, adam_, rate

CAPTURABLE = {"capturable": True, "foreach": False, "fused": False}

Group = Mapping[str, Any]
States = Mapping[str, Tensor]


class Rule(NamedTuple):
    """One optimizer's row in the table.

    states: a parameter's states before the first step. update: one step, given (parameters,
    gradients, states, step, group). counts: whether all parameters share the step's number.
    refused: options that have to be off.
    """

    states: Callable[[Tensor, Group], dict[str, Tensor]]
    update: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[States], Tensor, Group], None]
    refused: tuple[str, ...] = ()
    counts: bool = True


def rule_of(optimizer: Optimizer) -> Rule:
    """Return an optimizer's row, or else its own step."""
    rule = RULES.get(type(optimizer))
    if rule and not any(g.get(option) for g in optimizer.param_groups for option in rule.refused):
        return rule
    states = first_states(optimizer)
    return Rule(
        lambda parameter, group: states[parameter], partial(traced_step, optimizer), counts=False
    )


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


# An optimizer without a row: its own `step` runs on the program's tensors instead of its parameters
# and states. It may not ask for their values; torch's optimizers then have capturable=True.
class _Recorder(dict):
    """One parameter's states. first: a copy of each state's first value."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}

    def __setitem__(self, name: object, value: object) -> None:
        self.first.setdefault(name, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(name, value)

    def update(self, *args: object, **values: object) -> None:
        for name, value in dict(*args, **values).items():
            self[name] = value

    def setdefault(self, name: object, value: object = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]


def first_states(optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """Return each parameter's states before the first step; numbers as 0-d tensors.

    A step with zero gradients, on copies of the parameters, creates them.

    Raises:
        ShardingError: The step needs a closure, which would run the model anew.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ShardingError.here(
            f"{type(optimizer).__name__} steps by a closure, and train_step runs the model once",
            fix="parallelize the model alone, and step the optimizer as usual",
        )
    # A copy of each parameter: the step with zero gradients may still decay weights.
    copies = {
        p: nn.Parameter(p.detach().clone()) for g in optimizer.param_groups for p in g["params"]
    }
    groups = [{**g, "params": [copies[p] for p in g["params"]]} for g in optimizer.param_groups]
    states: Any = defaultdict(_Recorder)
    for p, copy in copies.items():
        copy.grad = torch.zeros_like(copy)
        for name, value in optimizer.state.get(p, {}).items():  # Adagrad has states at once
            states[copy][name] = value.clone() if isinstance(value, Tensor) else value
    _step(optimizer, groups, states)
    return {
        p: {
            name: _as_tensor(value, p.device)
            for name, value in states[copy].first.items()
            if isinstance(value, (Tensor, int, float))
        }
        for p, copy in copies.items()
    }


def _as_tensor(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a state; numbers as float64, in which torch computes with them where they are read."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float64, device=device)
    is_number = not value.dim() and value.is_floating_point()
    return value.double().to(device) if is_number else value


def traced_step(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    _: Tensor,
    group: Mapping[str, object],
) -> None:
    """Step a group's parameters and states in place. Each state has its own count."""
    options = dict(group)
    if torch.compiler.is_compiling():
        options |= {name: value for name, value in CAPTURABLE.items() if name in group}
    before = [p.grad for p in parameters]
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient
    _step(
        optimizer,
        [{**options, "params": [*parameters]}],
        defaultdict(dict, {p: dict(state) for p, state in zip(parameters, states)}),
    )
    for p, gradient in zip(parameters, before):
        p.grad = gradient


def _step(optimizer: Optimizer, groups: list[dict[str, object]], states: object) -> None:
    """Step with other groups and states than the optimizer has, and without its hooks."""
    # A twin without __init__: the real optimizer keeps its groups, states and hooks.
    twin = object.__new__(type(optimizer))
    hooks = {name: {} for name in vars(optimizer) if name.endswith("_hooks")}
    twin.__dict__.update({**vars(optimizer), **hooks, "param_groups": groups, "state": states})
    step: Any = type(optimizer).step
    with torch.no_grad():
        # Without hooks on all optimizers: ours follows each step on XLA.
        getattr(step, "__wrapped__" if getattr(step, "hooked", False) else "__call__")(twin)
