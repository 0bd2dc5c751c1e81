"""Schedulers', scalers' and loaders' states as data: JSON, with their tensors beside it."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ..errors import ShardingError

Optimizers = Optimizer | Sequence[Optimizer] | None

_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


def is_plain_state(value: Any) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, _PLAIN)
    if len(value) != 1:
        return False
    ((kind, content),) = value.items()
    if not isinstance(content, list):
        return False
    if kind == "tensor":
        # The file may be damaged or foreign: its form is checked before anything is made of it.
        number, dtype, shape = content if len(content) == 3 else (None, None, ())
        sizes = shape if isinstance(shape, list) else [None]
        return isinstance(number, str) and dtype in _DTYPES and all(type(n) is int for n in sizes)
    if kind == "dict":
        pairs = all(isinstance(each, list) and len(each) == 2 for each in content)
        return pairs and all(is_plain_state(part) for each in content for part in each)
    return kind in ("list", "tuple") and all(map(is_plain_state, content))


def as_plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON has it. Its tensors are put into `tensors`, by numbers."""
    if isinstance(value, Tensor):
        number = f"{len(tensors)}"
        tensors[number] = value
        return {"tensor": [number, str(value.dtype).removeprefix("torch."), [*value.shape]]}
    if isinstance(value, Mapping):
        pairs = [[as_plain(k, name, tensors), as_plain(v, name, tensors)] for k, v in value.items()]
        # Pairs, since JSON would turn keys that are numbers into texts.
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [as_plain(each, name, tensors) for each in value]}
    if not isinstance(value, _PLAIN):
        raise ShardingError.here(
            f"the state of '{name}' holds a {type(value).__name__}",
            why="a checkpoint is data: tensors, numbers, texts, lists and dicts",
            fix="leave it out of states, or save it in a file of your own",
        )
    return value


def allocate_state(value: Any, tensors: dict[str, Tensor]) -> None:
    """Make a state's tensors, to be read into."""
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            number, dtype, shape = content
            tensors[number] = torch.empty(shape, dtype=_DTYPES[dtype])
        else:
            for each in content:
                allocate_state({"list": each} if kind == "dict" else each, tensors)


def as_state(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that `as_plain` turned into JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content[0]]
    if kind == "dict":
        return {as_state(k, tensors): as_state(v, tensors) for k, v in content}
    values = [as_state(each, tensors) for each in content]
    return tuple(values) if kind == "tuple" else values


# Where an optimizer has no state, torch's get_state_dict makes one by a step with zero gradients.
# That is not the state before the first step: AdamW has counted one. It is a place to read into.
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
    # torch names parameters by their order in the groups.
    groups = [(each, group) for each in _listed(optimizers) for group in each.param_groups]
    for (each, group), named in zip(groups, state.get("param_groups", ()), strict=True):
        for parameter, name in zip(group["params"], named["params"], strict=True):
            yield each, parameter, name


def _forget(optimizers: Optimizers, state: Mapping[str, Any], names: Collection[str]) -> None:
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
