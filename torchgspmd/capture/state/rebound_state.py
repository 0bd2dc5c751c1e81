"""Parameters and buffers that forward replaces by another tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...errors import ShardingError, user_line


def rebound_parameters(
    module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]
) -> dict[int, Tensor]:
    """The parameters that forward put another one in the place of (self.weight = nn.Parameter(0.9 *
    self.weight + ...)), by place among the inputs, the first of which they are. ShardingError where
    there are others than before.
    """
    now = dict(module.named_parameters())
    for name in now.keys() ^ names:
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._parameters.pop(last, None)  # a new one is of the trace
        raise ShardingError(
            f"forward {'makes' if name in now else 'takes away'} parameter '{name}'",
            where=user_line(),
            why="a program has those that the module has before",
            fix="make it in __init__, and keep it",
        )
    rebound = {
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
    """The buffers that forward gave another tensor (self.mean = 0.9 * self.mean + ...) of their
    shape and type, by place among the inputs. Others are new ones in their place.
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
    """ShardingError where a tensor cannot be given the data of the other."""
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ShardingError(
            f"{what}, {old.dtype} of shape {list(old.shape)}, is given data of {new.dtype} "
            f"and shape {list(new.shape)}",
            where=user_line(),
            why="a tensor of a program keeps its type and shape",
            fix="register a buffer, and assign a new tensor to it",
        )
