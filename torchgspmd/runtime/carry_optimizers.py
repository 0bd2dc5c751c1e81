"""Carry over optimizers made before parallelize: they hold the former parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..compat.private_apis import _patch_step_function, is_missing


def carry_optimizers(before: Mapping[str, Tensor], model: nn.Module) -> None:
    """Put a wrapped model's parameters in place of the former ones, with their states.

    before: the parameters and buffers by name, as they were when the model was not wrapped.
    """
    if not any(_has_instances(each) for each in _classes(Optimizer)):
        return
    now: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    stored: dict[Tensor, Tensor] = {
        old: now[name] for name, old in before.items() if now[name] is not old
    }
    for optimizer in _optimizers() if stored else ():
        for group in optimizer.param_groups:
            # In place: LBFGS has this list under a second name.
            group["params"][:] = [stored.get(p, p) for p in group["params"]]
        # A list: the loop changes the dict's keys.
        for old in [p for p in optimizer.state if p in stored]:
            state = optimizer.state.pop(old)
            optimizer.state[stored[old]] = {
                name: _like(value, old, stored) for name, value in state.items()
            }


def _optimizers() -> Iterator[Optimizer]:
    """Yield all optimizers in this process. A proxy's __class__ is not asked."""
    return (o for o in gc.get_objects() if issubclass(type(o), Optimizer))


def _classes(cls: type) -> Iterator[type]:
    """Yield a class and its subclasses."""
    yield cls
    for each in cls.__subclasses__():
        yield from _classes(each)


def _has_instances(cls: Any) -> bool:
    """Return whether this class may have instances: the first one wraps the method step.

    To look for optimizers among all objects takes 70 ms.
    """
    return is_missing(_patch_step_function) or getattr(cls.step, "hooked", False)


def _like(value: object, old: Tensor, stored: Mapping[Tensor, Tensor]) -> object:
    """Return a parameter's state where the parameter is now; a buffer is there already."""
    if isinstance(value, Tensor) and value in stored:
        return stored[value]
    # A step count, or a factor that has another shape, is the same for all shards.
    if not isinstance(value, Tensor) or value.shape != old.shape:
        return value
    new = stored[old]
    if isinstance(new, DTensor):
        return distribute_tensor(value, new.device_mesh, new.placements)
    return value.to(new.device)
