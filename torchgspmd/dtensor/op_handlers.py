"""Table of handlers that replace operations of torch's DTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from ..comm.process_groups import find_groups
from ..compat.operators import AbsentOperator
from ..compat.private_apis import OpOverload
from ..compat.private_apis import _pytree as pytree


def handlers() -> dict:
    """Return the handlers (operation, args, kwargs) -> result, by operation."""
    return DTensor._op_dispatcher._custom_op_handlers


def handle(table: Mapping[Any, Callable]) -> None:
    """Add handlers of operators; operators that this torch lacks are left out."""
    handlers().update(
        {op: function for op, function in table.items() if not isinstance(op, AbsentOperator)}
    )


def as_before(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run an operation as torch's DTensor does, without its handler."""
    table = handlers()
    handler = table.pop(op, None)  # None: another thread runs the operation.
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            table[op] = handler


def is_ours(tensor: Any) -> bool:
    """Whether a value is a DTensor on a mesh of parallelize."""
    return isinstance(tensor, DTensor) and find_groups(tensor.device_mesh) is not None


def our_dtensors(args: tuple, kwargs: dict) -> list[DTensor]:
    """Return the DTensors on meshes of parallelize among the arguments of an operation."""
    return [*filter(is_ours, pytree.tree_leaves((args, kwargs)))]
