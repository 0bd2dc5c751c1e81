"""What computes an operation on DTensors in the place of torch's DTensor itself.

Private API of torch (DTensor's dispatcher); checked on 2.9.0 and 2.13.0.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .groups import known_groups


def handlers() -> dict:
    """Functions of (operation, args, kwargs), by operation."""
    return DTensor._op_dispatcher._custom_op_handlers


def as_before(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """As DTensor itself does it."""
    table = handlers()
    handler = table.pop(op, None)                                           # None: another thread is at it
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            table[op] = handler


def is_ours(tensor: Any) -> bool:
    """Whether it is a DTensor on a mesh of parallelize."""
    return isinstance(tensor, DTensor) and known_groups(tensor.device_mesh) is not None


def ours_of(args: tuple, kwargs: dict) -> list[DTensor]:
    return [*filter(is_ours, pytree.tree_leaves((args, kwargs)))]
