"""write_whole: rank 0 writes a model into files as one device's model, while the others wait."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ShardingError
from .full_state import Gather, groups_of_state, in_place_of, tables_of
from .shared_plan import broadcast_text

WRITERS = ("save_pretrained",)  # methods by which other libraries' models write themselves


def install_writers(model: nn.Module) -> None:
    """Make the writing methods on a model and its submodules write whole tensors."""
    for module in model.modules():
        for name in WRITERS:
            if name not in module.__dict__ and hasattr(type(module), name):
                module.__dict__[name] = WholeWriter(module, name)


class WholeWriter:
    """Replaces a method that writes a model: every rank calls it, and rank 0 writes."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.__wrapped__ = getattr(module, name)  # the signature

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return write_whole(self.module, lambda: self.__wrapped__(*args, **kwargs))

    def __deepcopy__(self, memo: dict) -> WholeWriter:
        module = copy.deepcopy(self.module, memo)
        writer = copy.copy(self)
        writer.module, writer.__wrapped__ = module, self.__wrapped__.__func__.__get__(module)
        return writer


def write_whole(model: nn.Module, write: Callable[[], object]) -> Any:
    """Call a function on rank 0, where the model has whole tensors on the CPU meanwhile.

    Call it identically on every rank. If the function raises, every rank raises.

    Args:
        model: The result of `parallelize`, the model that it wrapped, or a module that contains it.
        write: The function that writes files. It may call write_whole for the same model again.

    Returns:
        The function's result on the mesh's rank 0, None on the others.
    """
    tables = [*tables_of(model)]
    stored = {id(t): (name, t) for _, tensors in tables for name, t in tensors.items()}
    if not any(isinstance(t, DTensor) for _, t in stored.values()):
        return write()
    gather = Gather(groups_of_state([*stored.values()], "write_whole"), rank0_only=True)
    wholes = {id(t): gather.whole(t) for _, t in stored.values()}
    result, failure = None, None
    if gather.keeps:
        try:
            with in_place_of(tables, wholes):
                result = write()
        except Exception as error:  # of rank 0 alone, for which the others wait
            failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    said = gather.groups.watcher.run(broadcast_text, gather.groups, said)
    if failure is not None:
        raise failure
    if said:
        raise ShardingError.here(
            f"rank 0 has not written the model: {said}", fix="read the error of rank 0"
        )
    return result
