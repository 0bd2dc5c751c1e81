"""full_state_dict: a sharded model's whole state on the CPU, as one device's model has it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..comm.local_ops import user_order
from ..comm.process_groups import ProcessGroups, find_groups
from ..comm.rank_check import agree
from ..compat.private_apis import _pytree as pytree
from ..dtensor.op_handlers import is_sharded
from ..dtensor.ours import is_ours
from ..dtensor.storage import spec_of, stored_shape
from ..errors import ShardingError
from ..layout.mesh import Coordinates, Mesh
from ..shard_spec import ShardSpec
from .module_proxy import ModuleProxy
from .shared_plan import broadcast_text

WRITERS = ("save_pretrained",)  # methods by which other libraries' models write themselves

Table = dict[str, Any]  # tensors or None: a module's parameters or buffers, by name


def full_state_dict(
    model: nn.Module, optimizer: Optimizer | None = None, rank0_only: bool = True
) -> dict[str, Any]:
    """Return a mesh model's state as the one-device model has it, on the CPU.

    Call it identically on every rank. Names are the unwrapped model's, and tensors are plain
    and contiguous, without padding: the one-device model loads them with strict=True. Tied
    weights share their memory. The values are copies: training may go on while they are written.
    One tensor is gathered at a time, through CPU memory, so that a device needs no more
    memory than its shards.

    Args:
        model: The result of `parallelize`, the model that it wrapped, or a module that contains it.
        optimizer: Its parameters' optimizer, if its state is wanted too.
        rank0_only: Whether the mesh's rank 0 alone gets the state; the others get {}.

    Returns:
        The model's state_dict. With an optimizer {"model": the model's state_dict, "optimizer": the
        optimizer's state_dict}. An optimizer with the one-device model's parameters in the same
        order can load the latter by `load_state_dict`.

    Raises:
        ShardingError: The ranks call it differently, the model is not on a mesh of processes, or a
            tensor is on meta.

    Example:
        >>> import torch.distributed as dist
        >>> from torchgspmd import full_state_dict, parallelize
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = parallelize(torch.nn.Linear(4, 8), Mesh(data=1))
        >>> state = full_state_dict(model)
        >>> torch.nn.Linear(4, 8).load_state_dict(state, strict=True)
        <All keys matched successfully>
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None):
        wrong = model if not isinstance(model, nn.Module) else optimizer
        raise ShardingError.here(
            f"full_state_dict takes a model and an optimizer, and got {type(wrong).__name__}",
            fix="call full_state_dict(model, optimizer)",
        )
    tables = [*tables_of(model)]
    stored = {id(t): (name, t) for _, tensors in tables for name, t in tensors.items()}
    states: Any = {} if optimizer is None else optimizer.state_dict()
    leaves, structure = pytree.tree_flatten(states)
    tensors = [*stored.values()]
    tensors += [(f"optimizer.{i}", t) for i, t in enumerate(leaves) if isinstance(t, Tensor)]
    gather = Gather(groups_of_state(tensors, "full_state_dict"), rank0_only)
    wholes = {id(t): gather.whole(t) for _, t in stored.values()}
    leaves = [gather.whole(t) if isinstance(t, Tensor) else t for t in leaves]
    # Behind the last gather: until here the other ranks need this one.
    if not gather.keeps:
        return {}
    with in_place_of(tables, wholes):
        state = model.state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() != value.nbytes:
            # A view would be saved with the whole storage behind it.
            state[name] = value.clone(memory_format=torch.contiguous_format)
    if optimizer is None:
        return state
    return {"model": state, "optimizer": pytree.tree_unflatten(leaves, structure)}


def tables_of(model: nn.Module) -> Iterator[tuple[Table, dict[str, Tensor]]]:
    """Yield each module's parameter and buffer tables, with their part in the state_dict.

    The second has the state_dict's names.
    """
    for prefix, module in model.named_modules():
        owner = module._model if isinstance(module, ModuleProxy) else module
        for table in (owner._parameters, owner._buffers):
            left_out = owner._non_persistent_buffers_set if table is owner._buffers else ()
            yield (
                table,
                {
                    f"{prefix}.{name}" if prefix else name: tensor
                    for name, tensor in table.items()
                    if tensor is not None and name not in left_out
                },
            )


def groups_of_state(tensors: list[tuple[str, Tensor]], caller: str) -> ProcessGroups:
    """Return the mesh's groups. Raise ShardingError on every rank if one has other tensors."""
    ours = (t for _, t in tensors if isinstance(t, DTensor) and is_ours(t))
    groups = next((find_groups(t.device_mesh) for t in ours), None)
    if groups is None:
        raise ShardingError.here(
            "no tensor of the model is on a mesh of processes",
            fix="call model.state_dict(), which has the whole tensors already",
        )
    described = [
        (name, f"{t.dtype} {list(t.shape)} {t.placements if isinstance(t, DTensor) else 'whole'}")
        for name, t in tensors
    ]
    meta = next((name for name, t in tensors if t.device.type == "meta"), None)
    if meta is not None:
        raise ShardingError.here(
            f"'{meta}' is on meta: it has no values",
            fix=f"call model.to_empty(device='{groups.device_type}'), then initialize it or load "
            "its values",
        )
    for _, t in tensors:
        if isinstance(t, DTensor):
            spec_of(t, groups.mesh)  # raises for one that no gather is known for
    # Compared first: ranks that gather other tensors would wait for ever.
    agree(groups, caller, model=described)
    return groups


class Gather:
    """Gathers one tensor at a time. keeps: whether this rank gets the whole tensors."""

    def __init__(self, groups: ProcessGroups, rank0_only: bool) -> None:
        self.groups, self.mesh, self.rank0_only = groups, groups.mesh, rank0_only
        self.keeps = groups.rank == 0 or not rank0_only

    @torch.no_grad()
    def whole(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor on the CPU, in its own memory; None if this rank does not get it."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        if not isinstance(tensor, DTensor) or not is_sharded(tensor):
            copy = torch.empty(local.shape, dtype=local.dtype, device="cpu") if self.keeps else None
            return copy if copy is None else copy.copy_(local)
        spec, shape = spec_of(tensor, self.mesh), tuple(tensor.shape)
        result = torch.empty(shape, dtype=tensor.dtype) if self.keeps else None
        axes = spec.sharding_axes
        # Rank by rank: at most one shard is in flight, so memory stays bounded.
        for rank in range(self.mesh.size):
            at = self.mesh.coordinates(rank)
            sizes = stored_shape(spec, shape, self.mesh, at)
            if 0 in sizes or any(at[a] for a in self.mesh.names if a not in axes):
                continue  # an empty shard, or a replica
            shard = self.groups.watcher.run(self._shard, rank, local, sizes)
            if result is not None:
                result[part_of_shard(spec, shape, self.mesh, at)].copy_(shard)
        return result if result is None else user_order(result, spec, self.mesh)

    def _shard(self, rank: int, local: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
        """Return a rank's shard where it is wanted. It travels as bytes, for all dtypes."""
        groups = self.groups
        is_mine, source = rank == groups.rank, groups.processes[rank]
        if not is_mine and not self.keeps or is_mine and self.rank0_only and rank == 0:
            return local if is_mine else None
        shard = (
            local.to(groups.checked_on, memory_format=torch.contiguous_format).contiguous()
            if is_mine
            else torch.empty(sizes, dtype=local.dtype, device=groups.checked_on)
        )
        message = shard.view(-1).view(torch.uint8)
        if not self.rank0_only:
            dist.broadcast(message, source, group=groups.checks)
        elif is_mine:
            dist.send(message, groups.processes[0], group=groups.checks)
        else:
            dist.recv(message, source, group=groups.checks)
        return shard


def part_of_shard(
    spec: ShardSpec, shape: tuple[int, ...], mesh: Mesh, at: Coordinates
) -> tuple[slice, ...]:
    """Return where a device's part in a whole tensor begins and ends."""
    sizes, found = stored_shape(spec, shape, mesh, at), []
    for axes, size, count in zip(spec.dims, sizes, shape):
        begin = min(mesh.index(axes, at) * -(-count // mesh.count(axes)), count) if axes else 0
        found.append(slice(begin, begin + size))
    return tuple(found)


@contextmanager
def in_place_of(
    tables: list[tuple[Table, dict[str, Tensor]]], wholes: dict[int, Tensor | None]
) -> Iterator[None]:
    """Have whole tensors in the tables, so that state_dict's hooks see one device's model."""
    before = [dict(table) for table, _ in tables]
    replaced: dict[int, Tensor] = {}
    try:
        for table, _ in tables:
            for name, tensor in table.items():
                whole = wholes.get(id(tensor))
                if whole is not None:
                    new = (
                        nn.Parameter(whole, requires_grad=False)
                        if isinstance(tensor, nn.Parameter)
                        else whole
                    )
                    # Tied tensors stay tied in the file.
                    table[name] = replaced.setdefault(id(tensor), new)
        yield
    finally:
        for (table, _), tensors in zip(tables, before):
            table.update(tensors)


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
