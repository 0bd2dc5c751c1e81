"""Operations that torch's DTensor cannot shard, and random numbers: computed on whole tensors.

    torch._foreach_copy_(ps, qs)            no sharding strategy
    g.norm().add_(eps)                      in place on a pending tensor
    torch.linalg.qr(p), p[g > 0]            sharding propagation failed
    p.add_(torch.randn_like(p), alpha=0.01)
    F.dropout(y, 0.1)                       y: a sharded result

The fallback is correct, not fast. Tensors written in place are sharded again; results are
replicated. Optimizers and loops written for one device need it. parallelize's programs do not.

torch's DTensor draws the same numbers in every shard on CPUs. On GPUs its numbers depend on the
mesh. Here each rank draws the whole tensor's numbers, of which it takes its shard. Ranks compare
their generators' states first.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ..comm.process_groups import find_groups
from ..comm.rank_check import agree
from ..compat.operators import aten
from ..compat.patches import wrapping
from ..compat.private_apis import OpOverload
from ..compat.private_apis import _pytree as pytree
from ..errors import user_line
from .ours import acts_on_ours, as_before, explain_wait, groups_of_ours, our_dtensors

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


@wrapping
def gather_method(before: Callable, self: DTensor, **options: object) -> Tensor:
    """Wrap DTensor.full_tensor: all ranks have to call it, if the tensor is ours and sharded."""
    if not is_distributed(self):
        return before(self, **options)
    watcher = groups_of_ours(self).watcher
    watcher.run(check_read_by_all, self)
    return watcher.run(before, self, **options)


def distribute_like(tensor: DTensor, values: Tensor) -> DTensor:
    """Return whole values as a DTensor with another's layout; nothing is sent."""
    return distribute_tensor(
        values.detach().to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )


@wrapping
def with_fallback(
    before: Callable, op: OpOverload, args: tuple, kwargs: dict, *others: object
) -> Any:
    """Wrap a dispatch function: our DTensors that it cannot shard are computed on as a whole."""
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


_ALLOWING = SimpleNamespace(_allow_implicit_replication=True)


@wrapping
def with_replication(before: Any, op: OpOverload, tensor: Tensor, mesh: DeviceMesh) -> Any:
    """Wrap the function that gives a plain tensor its layout: beside ours it is replicated."""
    owner = before.__self__ if find_groups(mesh) is None else _ALLOWING
    return before.__func__(owner, op, tensor, mesh)


def run_replicated(op: OpOverload, args: tuple, kwargs: dict, one: DTensor) -> Any:
    """Compute an operation on whole tensors. one: any DTensor among its arguments."""
    wholes: dict[int, tuple[DTensor, Tensor]] = {}

    def unwrap(value: object) -> Any:
        if isinstance(value, DTensor):
            # An argument that occurs twice stays one tensor, as in-place operations need.
            return wholes.setdefault(id(value), (value, full_tensor(value)))[1]
        return value

    results = op(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs))
    named = dict(zip((argument.name for argument in op._schema.arguments), args)) | kwargs
    changed = [
        named.get(a.name)
        for a in op._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    for value in pytree.tree_leaves(changed):
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


_FILLED = tuple(
    getattr(packet, overload)
    for packet in (
        aten.normal_,
        aten.uniform_,
        aten.exponential_,
        aten.cauchy_,
        aten.log_normal_,
        aten.geometric_,
        aten.random_,
        aten.bernoulli_,
    )
    for overload in packet.overloads()
    if overload not in ("out", "Tensor")
)  # in place, independent of the old values
_LIKE = tuple(
    getattr(packet, overload)
    for packet in (aten.rand_like, aten.randn_like, aten.randint_like)
    for overload in packet.overloads()
    if "out" not in overload
)
_OTHERS = (
    aten.native_dropout.default,
    aten.bernoulli.default,
    aten.bernoulli_.Tensor,
    aten.multinomial.default,
    aten.poisson.default,
    aten.binomial.default,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.rrelu_with_noise.default,
)
DRAWING = (*_FILLED, *_LIKE, *_OTHERS)


def draw(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Draw a whole tensor's numbers and return or store this rank's shard."""
    one = our_dtensors(args, kwargs)[0]
    # No numbers, so no generator to compare.
    if one.device.type == "meta":
        return as_before(op, args, kwargs)
    groups = groups_of_ours(one)
    # The line too: ranks may be about to draw different tensors in equal states.
    line = [("the line that draws", user_line() or "")]
    state = _state_hash(kwargs.get("generator"), one.device)
    agree(groups, "the random numbers of a DTensor", line, state)
    # Their numbers depend on the values of their operands.
    if op in _OTHERS:
        return run_replicated(op, args, kwargs, one)
    # Strides too: torch fills in memory order, and one device has these strides.
    whole = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
    values = op(whole, *args[1:], **kwargs)
    if op in _LIKE:
        return distribute_like(one, values)
    store_full(one, values)
    return one


def _state_hash(generator: torch.Generator | None, device: torch.device) -> int:
    """Hash a generator's state; None: the device's default generator."""
    if generator is not None:
        state: Tensor = generator.get_state()
    else:
        state = (
            torch.get_rng_state()
            if device.type == "cpu"
            else torch.get_device_module(device).get_rng_state(device)
        )
    return zlib.crc32(state.cpu().numpy().tobytes())
