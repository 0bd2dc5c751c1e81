"""Runs an optimizer's own `step` in the program, if update_rules.py has no row for it.

The step runs on the program's tensors instead of the optimizer's parameters and states. So it has
to compute with tensors: it may not ask for their values. torch's optimizers do so with
capturable=True, which they get here.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ShardingError, user_line

CAPTURABLE = {"capturable": True, "foreach": False, "fused": False}


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
        raise ShardingError(
            f"{type(optimizer).__name__} steps by a closure, and train_step runs the model once",
            where=user_line(),
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


def own_step(
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
