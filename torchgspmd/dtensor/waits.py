"""Waits in collectives that torch's DTensor starts, asked for or not: errors say for whom.

y.redistribute(placements=[Replicate()])    on one rank only
y.softmax(0)                                of rows that are sharded: y is gathered
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from ..comm.process_groups import find_groups
from ..comm.watcher import explain, say_farewell


def redistribute_method(before: Callable) -> Callable:
    """Wrap DTensor.redistribute: the wait for a rank that does not call it is explained."""

    @functools.wraps(before)
    def method(self: DTensor, *args: object, **options: object) -> DTensor:
        return _explained(self.device_mesh, before, self, *args, **options)

    return method


def with_explained_waits(before: Callable) -> Callable:
    """Wrap the function that redistributes an operation's operands, as `redistribute`."""

    @functools.wraps(before)
    def redistribute(op_info: Any, *args: object, **options: object) -> None:
        meshes = (getattr(spec, "mesh", None) for spec in op_info.flat_args_schema)
        # Operands that are no DTensors have no spec.
        mesh = next((mesh for mesh in meshes if mesh is not None), None)
        return _explained(mesh, before, op_info, *args, **options)

    return redistribute


def with_explained_wait(before: Callable) -> Callable:
    """Wrap the method that waits for redistribute(async_op=True)'s tensor."""

    @functools.wraps(before)
    def trigger_wait(self: object) -> Any:
        try:
            return before(self)
        except RuntimeError as error:
            explain(error)
            raise

    return trigger_wait


def with_farewell(before: Callable) -> Callable:
    """Wrap destroy_process_group: the others hear that this process ends as it should.

    It may end at once afterwards (os._exit), and would be taken for one that has died.
    """

    @functools.wraps(before)
    def destroy(group: object = None) -> None:
        # None is the default group; other groups end while this process lives on.
        if group is None:
            say_farewell()
        return before(group)

    return destroy


def _explained(mesh: Any, function: Callable, *args: object, **options: object) -> Any:
    """Call a function; on one of parallelize's meshes, a wait that ends says for whom."""
    groups = find_groups(mesh) if mesh is not None else None
    if groups is None:
        return function(*args, **options)
    return groups.watcher.run(function, *args, **options)
