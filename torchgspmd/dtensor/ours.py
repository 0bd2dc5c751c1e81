"""Which DTensors are ours, and handlers for their operations.

A DTensor is ours if its mesh equals a parallelized module's mesh. All others are the user's: their
operations are torch's, also while our patches are applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from ..comm.process_groups import ProcessGroups, find_groups
from ..compat.patches import Installation
from ..compat.private_apis import OpOverload
from ..compat.private_apis import _pytree as pytree

# This process's patches; install.py has their tables. WAITS: those that meet the other ranks.
INSTALLATION, WAITS = Installation(), Installation()
Handler = Callable[[OpOverload, tuple, dict], Any]


def handlers() -> dict[Any, Handler]:
    """Return DTensor's handlers, by operation."""
    return DTensor._op_dispatcher._custom_op_handlers


def is_ours(tensor: object) -> bool:
    """Whether a value is a DTensor on one of parallelize's meshes."""
    return isinstance(tensor, DTensor) and find_groups(tensor._spec.mesh) is not None


def our_dtensors(args: tuple, kwargs: dict) -> list[DTensor]:
    """Return the DTensors on parallelize's meshes among an operation's arguments."""
    return [*filter(is_ours, pytree.tree_leaves((args, kwargs)))]


def groups_of_ours(tensor: DTensor) -> ProcessGroups:
    """Return the process groups for the mesh that our DTensor is on."""
    groups = find_groups(tensor.device_mesh)
    assert groups is not None
    return groups


def acts_on_ours(args: tuple, kwargs: dict) -> bool:
    """Whether the first DTensor among an operation's arguments is ours."""
    # No tree search: this runs at every operation on any DTensor.
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            return is_ours(value)
        if isinstance(value, (list, tuple)):
            for each in value:
                if isinstance(each, DTensor):
                    return is_ours(each)
    return False


def explain_wait(error: RuntimeError, args: tuple, kwargs: dict) -> None:
    """Raise RankError if the error is from a wait that ended in an operation on our DTensors."""
    for tensor in our_dtensors(args, kwargs)[:1]:
        groups_of_ours(tensor).watcher.explain(error)


def as_before(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run an operation as torch's DTensor does, without its handler."""
    table = handlers()
    # Out of the table during the call, or the call would come back here.
    handler = table.pop(op, None)  # None: another thread runs the operation.
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None and INSTALLATION.is_active:
            table[op] = handler


def for_ours(function: Handler) -> Callable[[Handler | None], Handler]:
    """Return a handler's replacement: `function` for our DTensors, as before for others."""

    def replace(torch_handler: Handler | None) -> Handler:
        others = torch_handler or as_before

        def handler(op: OpOverload, args: tuple, kwargs: dict) -> object:
            if not acts_on_ours(args, kwargs):
                return others(op, args, kwargs)
            try:
                return function(op, args, kwargs)
            except RuntimeError as error:
                explain_wait(error, args, kwargs)
                raise

        return handler

    return replace


def method_for_ours(function: Callable) -> Callable[[Callable], Callable]:
    """Return a method's replacement: `function` for our DTensors, as before for others."""

    def replace(before: Callable) -> Callable:
        def method(self: DTensor, *args: object, **kwargs: object) -> Any:
            if not is_ours(self):
                return before(self, *args, **kwargs)
            try:
                return function(self, *args, **kwargs)
            except RuntimeError as error:
                explain_wait(error, (self,), kwargs)
                raise

        return method

    return replace
