"""Optimizers' state in checkpoints, by parameter names.

Where an optimizer has no state, torch's get_state_dict makes one by a step with zero gradients.
That is not the state before the first step: AdamW has counted one. It is a place to read into.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

Optimizers = Optimizer | Sequence[Optimizer] | None


def state_of(
    model: nn.Module, optimizers: Optimizers
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return weights, optimizer states, and the parameters that have no state yet, by name.

    The optimizers stay as they are. Those parameters' states are places to read into.
    """
    # Before torch's step, which gives every parameter a state.
    known = {id(p) for each in _listed(optimizers) for p in each.state}
    with _without_gradients(optimizers):
        found: Any = get_state_dict(model, _listed(optimizers))
    weights, state = found
    fresh = [name for _, p, name in _named(optimizers, state) if id(p) not in known]
    _forget(optimizers, state, fresh)
    return weights, state, fresh


def set_state(
    model: nn.Module,
    optimizers: Optimizers,
    weights: dict[str, Any],
    state: dict[str, Any],
    fresh: Collection[str],
) -> None:
    """Set weights and states. fresh: the parameters that had no state when it was saved."""
    with _without_gradients(optimizers):
        set_state_dict(model, _listed(optimizers), model_state_dict=weights, optim_state_dict=state)
    _forget(optimizers, state, fresh)


def _listed(optimizers: Optimizers) -> list[Optimizer]:
    if isinstance(optimizers, Optimizer):
        return [optimizers]
    return [*optimizers] if optimizers is not None else []


def _named(
    optimizers: Optimizers, state: Mapping[str, Any]
) -> Iterator[tuple[Optimizer, Tensor, str]]:
    """Yield (optimizer, parameter, name)."""
    # torch names parameters by their order in the groups.
    groups = [(each, group) for each in _listed(optimizers) for group in each.param_groups]
    for (each, group), named in zip(groups, state.get("param_groups", ()), strict=True):
        for parameter, name in zip(group["params"], named["params"], strict=True):
            yield each, parameter, name


def _forget(optimizers: Optimizers, state: Mapping[str, Any], names: Collection[str]) -> None:
    """Take these parameters' states out of the optimizers."""
    chosen = {*names}
    for each, parameter, name in [*_named(optimizers, state)]:
        if name in chosen:
            each.state.pop(parameter, None)


@contextmanager
def _without_gradients(optimizers: Optimizers) -> Generator[None, None, None]:
    """Set gradients aside: torch makes no state for an optimizer whose parameters have some."""
    groups = [group for each in _listed(optimizers) for group in each.param_groups]
    gradients = [(p, p.grad) for group in groups for p in group["params"]]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
