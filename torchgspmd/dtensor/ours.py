"""Which DTensors are ours, handlers for their operations, and errors of waits that say for whom.

A DTensor is ours if its mesh equals a parallelized module's mesh. All others are the user's: their
operations are torch's, also while our patches are applied. DTensor starts collectives, asked for or
not:

    y.redistribute(placements=[Replicate()])    on one rank only
    y.softmax(0)                                of rows that are sharded: y is gathered
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..comm.process_groups import ProcessGroups, explain, find_groups, say_farewell, watched_ranks
from ..comm.rank_check import RankCheck, agree, agreement
from ..compat.patches import Installation, wrapping
from ..compat.private_apis import OpOverload, get_proxy_mode
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError

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


@wrapping
def redistribute_method(
    before: Callable, self: DTensor, *args: object, **options: object
) -> DTensor:
    """Wrap DTensor.redistribute: the wait for a rank that does not call it is explained."""
    same = [self.shape, self.placements] if _communicates(self._spec) else []
    return _explained("redistribute", self.device_mesh, same, before, self, *args, **options)


@wrapping
def with_explained_waits(
    before: Callable, op_info: Any, wanted: Any, *args: object, **options: object
) -> None:
    """Wrap the function that redistributes an operation's operands, as `redistribute`."""
    # Operands that are no DTensors have no spec.
    specs = [spec for spec in op_info.flat_args_schema if hasattr(spec, "placements")]
    mesh = next((spec.mesh for spec in specs), None)
    same = [spec.placements for spec in specs if _communicates(spec)]
    return _explained(
        f"{wanted.op} of DTensors", mesh, same, before, op_info, wanted, *args, **options
    )


@wrapping
def with_explained_wait(before: Callable, self: object) -> Any:
    """Wrap the method that waits for redistribute(async_op=True)'s tensor."""
    try:
        return before(self)
    except RuntimeError as error:
        explain(error)
        raise


@wrapping
def with_meeting(before: Callable, *args: object, **options: object) -> Any:
    """Wrap a function of torch.distributed that torch's checkpoints call: all ranks meet first."""
    group = inspect.signature(before).bind(*args, **options).arguments.get("group")
    everyone = watched_ranks()
    is_traced = get_proxy_mode() is not None  # by one rank alone; then the call is an error
    if everyone is None or is_traced or group not in (None, dist.group.WORLD):
        return before(*args, **options)
    if threading.current_thread() is not threading.main_thread():
        if is_called_by("torch.distributed.checkpoint"):
            raise _asynchronous()
        return before(*args, **options)
    agree(everyone, f"torch.distributed.{before.__name__}")
    return everyone.watcher.run(before, *args, **options)


@wrapping
def with_own_group(before: Callable, *args: Any, **options: Any) -> Any:
    """Wrap torch.distributed.checkpoint.async_save: it may not use the training's group."""
    group, everyone = options.get("process_group"), watched_ranks()
    is_alone = everyone is None or options.get("no_dist", False)
    if not is_alone and group in (None, dist.group.WORLD):
        raise _asynchronous()
    return before(*args, **options)


def _asynchronous() -> ShardingError:
    return ShardingError.here(
        "torch.distributed.checkpoint.async_save uses the process group of the training",
        why="its thread and the training would send messages in one group, and take those of each "
        "other",
        fix="call gspmd.save(folder, model, optimizer, asynchronous=True), or pass a "
        'process_group=torch.distributed.new_group(backend="gloo") of its own',
    )


def is_called_by(package: str) -> bool:
    """Return whether a package's function is among the callers."""
    # Nothing else says who calls: neither pickle nor safetensors does.
    frame = sys._getframe(1)
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False


@wrapping
def with_farewell(before: Callable, group: object = None) -> None:
    """Wrap destroy_process_group: the others hear that this process ends as it should.

    It may end at once afterwards (os._exit), and would be taken for one that has died.
    """
    # None is the default group; other groups end while this process lives on.
    if group is not None:
        return before(group)
    say_farewell()
    WAITS.end()
    return before(None)


def meet(groups: ProcessGroups, call: str, *same: object) -> None:
    """Meet all ranks before an operation on DTensors communicates, as `agree`.

    same: what its messages depend on. GPUs run behind their hosts, which would wait here.
    """
    if groups.device_type == "cuda":
        groups.watcher.note(call)
    else:
        meeting(groups, call, *same).begin().check()


def meeting(groups: ProcessGroups, call: str, *same: object) -> RankCheck:
    """Return the comparison that `meet` makes on the CPU; it may carry a sum."""
    return agreement(groups, call, [("the DTensors", str(same))])


def _communicates(spec: Any) -> bool:
    """Return whether a tensor has to be gathered or reduced for another layout."""
    return not all(placement.is_replicate() for placement in spec.placements)


def _explained(
    call: str,
    mesh: Any,
    same: Sequence[object],
    function: Callable,
    *args: object,
    **options: object,
) -> Any:
    """Call a function; on one of parallelize's meshes, a wait that ends says for whom.

    same: what its messages depend on, if it sends any.
    """
    groups = find_groups(mesh) if mesh is not None else None
    if groups is None:
        return function(*args, **options)
    if same:
        meet(groups, call, *same)
    return groups.watcher.run(function, *args, **options)
