"""For operations that torch's DTensor cannot shard: compute them on whole tensors.

    torch._foreach_copy_(ps, qs)            no sharding strategy
    g.norm().add_(eps)                      in place on a pending tensor
    torch.linalg.qr(p), p[g > 0]            sharding propagation failed

The fallback is correct, not fast. Tensors written in place are sharded again; results are
replicated. Optimizers and loops written for one device need it. parallelize's programs do not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ..comm.process_groups import find_groups
from ..comm.rank_mismatch import agree
from ..compat.private_apis import OpOverload
from ..compat.private_apis import _pytree as pytree
from .ours import acts_on_ours, explain_wait, groups_of_ours, our_dtensors

_FAILED = "Sharding propagation failed", "found no DeviceMesh from dtensor args"


def is_distributed(tensor: DTensor) -> bool:
    """Whether the devices in one of parallelize's meshes have different shards or terms."""
    return find_groups(tensor.device_mesh) is not None and not all(
        p.is_replicate() for p in tensor.placements
    )


def full_tensor(tensor: DTensor) -> Tensor:
    """Return a DTensor's whole values; all ranks must call it if the tensor is sharded."""
    if not is_distributed(tensor):
        return tensor.to_local()
    values = tensor.full_tensor()  # It has gaps if a minor dimension was gathered.
    return values.contiguous() if tensor.is_contiguous() else values


def check_read_by_all(tensor: DTensor) -> None:
    """Raise ShardingError on every rank, before any rank waits, unless all ranks read it."""
    same = f"reads {list(tensor.shape)}, {tensor.dtype}, {tensor.placements}"
    call = "the read of a DTensor (full_tensor)"
    agree(groups_of_ours(tensor), call, [("the DTensor that is read", same)])


def gather_method(before: Callable) -> Callable:
    """Wrap DTensor.full_tensor: all ranks have to call it, if the tensor is ours and sharded."""

    @functools.wraps(before)
    def method(self: DTensor, **options: object) -> Tensor:
        if not is_distributed(self):
            return before(self, **options)
        watcher = groups_of_ours(self).watcher
        watcher.run(check_read_by_all, self)
        return watcher.run(before, self, **options)

    return method


def distribute_like(tensor: DTensor, values: Tensor) -> DTensor:
    """Return whole values as a DTensor with another's layout; nothing is sent."""
    return distribute_tensor(
        values.detach().to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )


def with_fallback(before: Callable) -> Callable:
    """Wrap a dispatch function: our DTensors that it cannot shard are computed on as a whole."""

    @functools.wraps(before)
    def dispatch(op: OpOverload, args: tuple, kwargs: dict, *others: object) -> Any:
        # Other namespaces communicate, and one rank may run them alone.
        if op.namespace != "aten" or not acts_on_ours(args, kwargs):
            return before(op, args, kwargs, *others)
        log = logging.getLogger("torch._subclasses.fake_tensor")
        was, log.disabled = log.disabled, True  # It would log a traceback of the caught error.
        try:
            return before(op, args, kwargs, *others)
        # Errors about layouts are raised on all ranks alike.
        except (NotImplementedError, RuntimeError, AssertionError) as error:
            if not isinstance(error, NotImplementedError) and not any(
                words in str(error) for words in _FAILED
            ):
                if isinstance(error, RuntimeError):
                    explain_wait(error, args, kwargs)
                raise
        finally:
            log.disabled = was
        return run_replicated(op, args, kwargs, our_dtensors(args, kwargs)[0])

    return dispatch


class UsersFlag:
    """Stand-in for DTensor's implicit-replication flag, which is on for our DTensors.

    It has the value that the user gave the flag, and the user's DTensors follow it. One exception:
    torch's C++ code reads the flag itself. Its cache may have the layout for an operation on two
    replicated DTensors. A plain tensor with the same shape may then replace one of them.
    """

    def __init__(self, before: object) -> None:
        self.value = False

    def __get__(self, dispatcher: object, owner: type | None = None) -> bool:
        return self.value

    def __set__(self, dispatcher: object, value: bool) -> None:
        self.value = value


def with_replication(before: Any) -> Callable:
    """Wrap the function that gives a plain tensor its layout: beside ours it is replicated."""
    allowing = SimpleNamespace(_allow_implicit_replication=True)

    @functools.wraps(before)
    def replicate(op: OpOverload, tensor: Tensor, mesh: DeviceMesh) -> Any:
        owner = before.__self__ if find_groups(mesh) is None else allowing
        return before.__func__(owner, op, tensor, mesh)

    return replicate


def run_replicated(op: OpOverload, args: tuple, kwargs: dict, one: DTensor) -> Any:
    """Compute an operation on whole tensors. one: any DTensor among its arguments."""
    wholes: dict[int, tuple[DTensor, Tensor]] = {}

    def unwrap(value: object) -> Any:
        if isinstance(value, DTensor):
            # An argument that occurs twice stays one tensor, as in-place operations need.
            return wholes.setdefault(id(value), (value, full_tensor(value)))[1]
        return value

    results = op(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs))
    for value in _mutated_arguments(op, args, kwargs):
        if isinstance(value, DTensor):
            store_full(value, wholes[id(value)][1])
    owners = {
        # A result that is an operand (x.add_) is the caller's DTensor again.
        id(values): tensor
        for tensor, values in wholes.values()
        if values.shape == tensor.shape
    }

    def wrap(value: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        replicated = [Replicate()] * one.device_mesh.ndim
        return (
            owners[id(value)]
            if id(value) in owners
            else DTensor.from_local(value, one.device_mesh, replicated, run_check=False)
        )

    return pytree.tree_map(wrap, results)


def _mutated_arguments(op: OpOverload, args: tuple, kwargs: dict) -> list:
    named = dict(zip((argument.name for argument in op._schema.arguments), args)) | kwargs
    changed = [
        named.get(a.name)
        for a in op._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return pytree.tree_leaves(changed)


def store_full(tensor: DTensor, values: Tensor) -> None:
    """Store whole values in a DTensor, sharded again; a pending one becomes replicated."""
    # The operation has written to the local tensor itself.
    if values is tensor._local_tensor:
        return
    if values.shape == tensor.shape and not any(p.is_partial() for p in tensor.placements):
        tensor._local_tensor.copy_(distribute_like(tensor, values)._local_tensor)
        return
    replicated = DTensor.from_local(
        values, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False
    )
    tensor._local_tensor, tensor._spec = replicated._local_tensor, replicated._spec
