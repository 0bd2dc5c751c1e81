"""Parameters and buffers that forward rebinds to another tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...errors import ShardingError, user_line


def rebound_parameters(
    module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Return the parameters that forward rebinds, by input index.

        self.weight = nn.Parameter(0.9 * self.weight + ...)

    Raises ShardingError if forward adds or removes a parameter.
    """
    now = dict(module.named_parameters())
    for name in now.keys() ^ names:
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._parameters.pop(last, None)  # no fake tensor stays
        raise ShardingError(
            f"forward {'makes' if name in now else 'takes away'} parameter '{name}'",
            where=user_line(),
            why="a program has those that the module has before",
            fix="make it in __init__, and keep it",
        )
    rebound: dict[int, Tensor] = {
        i: now[name]
        for i, (name, tensor) in enumerate(zip(names, inputs))
        if now[name] is not tensor
    }
    for i, tensor in rebound.items():
        check_alike(f"parameter '{names[i]}'", inputs[i], tensor)
    return rebound


def rebound_buffers(
    module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Return the buffers that forward rebinds to a tensor with the same shape and type.

        self.mean = 0.9 * self.mean + ...

    The keys are input indices. A tensor with another shape or type counts as a new attribute.
    """
    now = dict(module.named_buffers())
    return {
        i: now[name]
        for i, (name, tensor) in enumerate(zip(names, inputs))
        if name in now
        and now[name] is not tensor
        and now[name].shape == tensor.shape
        and now[name].dtype == tensor.dtype
    }


def check_alike(what: str, old: Tensor, new: Tensor) -> None:
    """Raise ShardingError if a tensor cannot take another tensor's data."""
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ShardingError(
            f"{what}, {old.dtype} of shape {list(old.shape)}, is given data of {new.dtype} "
            f"and shape {list(new.shape)}",
            where=user_line(),
            why="a tensor of a program keeps its type and shape",
            fix="register a buffer, and assign a new tensor to it",
        )
