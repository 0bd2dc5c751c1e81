"""parallelize and shard_batch: put a module and its batches on a mesh."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..capture import check_module
from ..capture.state.dependencies import named_tensors
from ..capture.state.mutable_tables import places_of, tables_of
from ..capture.state.recorder import Reach
from ..comm.process_groups import ProcessGroups, groups_of, part_of
from ..comm.rank_check import all_gather_rows
from ..comm.value_check import hash_of_bits
from ..compat.private_apis import (
    PARALLELIZE,
    PLAN,
    _patch_step_function,
    check_torch,
    is_missing,
)
from ..compiler.options import Options, documented
from ..dtensor.storage import storable, wrap_local
from ..errors import ShardingError
from ..layout.layout_rules import MeshLayout, bound, mesh_of
from ..layout.mark import layout_of
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec, SpecLike
from ..xla_backend.runtime import is_started, place_batch
from .module_proxy import ModuleProxy, mark_as_planned
from .module_proxy import shard_updates as mark_updates
from .sharded_module import ShardedModule
from .xla_module import XlaModule

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..compiler.option_types import ParallelizeOptions
    from ..compiler.plan import Plan


@documented("parallelize")
def parallelize(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | MeshLayout,
    *,
    in_specs: object = None,
    out_specs: object = None,
    plan: Plan | None = None,
    **options: Unpack[ParallelizeOptions],
) -> nn.Module:
    """Return a module with the same forward that computes on a mesh.

    Call it identically on every rank. Under torchrun it starts the process group if there is none,
    as torch's init_device_mesh does. Parameters and buffers become DTensors with rank 0's values,
    laid out as marked or replicated. The returned module answers as the model does: its class,
    attributes, methods and state_dict. Optimizers made before get the returned module's parameters,
    with their states.

    Plain tensor arguments are the global batch, the same on every rank. DTensor arguments keep
    their layout. Results are those of one device, whole and plain, unless out_specs says otherwise:
    then they are DTensors. `plan` of the module has the same default.

    Args:
        model: The module for one device, with mark_sharding's marks on its parameters.
        mesh: The mesh, with one process per device, also as torch's DeviceMesh, or a Layout on one:
            specs have logical names then. A part of a DeviceMesh (`devices["model"]`) puts the
            model on that part's processes; each part has its own model.
        in_specs: The arguments' layouts: a tuple, or a mapping by name. A call may leave out
            arguments with a default. "auto": the batch axes ("data", "dp", ...) divide each
            tensor's leading dimension.
        out_specs: The results' layouts. A DTensor has the nearest layout that it can express:
            several axes shard one dimension only in mesh order and if they divide it.
            "same" leaves results as they are computed.
        plan: A plan of the same model, also one from a file. Parameters and buffers without a mark
            are stored as it lays them out; None: replicated.
        {options}

    Returns:
        A ShardedModule, or an XlaModule for backend "xla".

    Raises:
        ShardingError: There are not as many processes as devices, or programs or argument shapes
            differ between ranks.

    Example:
        >>> import torch.distributed as dist  # here one process; under torchrun one a device
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh, model = Mesh(data=1, model=1), torch.nn.Linear(4, 2)
        >>> weight = mark_sharding(model.weight, mesh, "model _")
        >>> module = parallelize(model, mesh, in_specs="data _")
        >>> module(torch.ones(8, 4)).sum().backward()
        >>> module.weight.grad.full_tensor()
        tensor([[8., 8., 8., 8.],
                [8., 8., 8., 8.]])
        >>> dist.destroy_process_group()
    """
    chosen = Options.read("parallelize", options)
    layout = layout_of(model, mesh)
    if isinstance(mesh, MeshLayout):
        in_specs, out_specs = mesh.spec(in_specs), mesh.spec(out_specs)
    part, mesh = part_of(mesh), mesh_of(mesh)
    check_torch(PLAN, PARALLELIZE)
    chosen.check_backend()
    if any(isinstance(m, ModuleProxy) for m in model.modules()):
        raise ShardingError.here(
            "a module is on a mesh already", fix="wrap the outermost module, once"
        )
    check_module(model)
    # The wrapped module has other tensors: optimizers are matched by name.
    before = dict(named_tensors(model))
    with bound(layout):
        if plan is not None:
            mark_as_planned(model, mesh, plan)
        if chosen.shard_updates:
            mark_updates(model, mesh, chosen.shard_updates)
        if chosen.backend == "xla":
            module = XlaModule(model, mesh, in_specs, out_specs, chosen)
        else:
            module = ShardedModule(model, mesh, in_specs, out_specs, chosen, part=part)
    module.__dict__["_layout"] = layout
    carry_optimizers(before, module)
    # Lists and dicts may hold parameters too. Last: those of optimizers have theirs by now.
    stored, reach = _stored(before, module), Reach(model)
    for source, tensor in places_of({*map(id, stored)}, tables_of(reach), reach.modules):
        source.write(stored[tensor])
    return module


def shard_batch(local: Tensor, mesh: Mesh | DeviceMesh, spec: SpecLike) -> Tensor:
    """Return the global batch, a DTensor whose shard on this rank is `local`.

    The first call compares a checksum and warns if all ranks give the same rows. Later calls send
    nothing.

    In a process that runs on XLA, `local` is this host's batch. Its rows go to the host's
    devices, and the result is one XLA tensor.

    Args:
        local: The rows that a DistributedSampler gives this rank, with the same shape on every
            rank.
        mesh: The module's mesh, also as torch's DeviceMesh.
        spec: The layout. A sharded dimension's global size is the local size times the shards.

    Returns:
        The global batch, a DTensor; an XLA tensor in a process that runs on XLA.

    Raises:
        ShardingError: The spec shards one dimension by axes out of mesh order.

    Example:
        >>> import torch.distributed as dist  # here one process; under torchrun one a device
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shard_batch(torch.ones(8, 16), Mesh(data=1), "data _").shape
        torch.Size([8, 16])
        >>> dist.destroy_process_group()
    """
    part, mesh = part_of(mesh), mesh_of(mesh)
    if is_started():
        return place_batch(local, mesh, spec)
    groups = groups_of(mesh, local.device.type, part)
    parsed = ShardSpec.parse(spec).check(mesh, local.shape, "the batch")
    # Every rank has as many rows, so the global size needs no message.
    shape = tuple(n * mesh.count(axes) for n, axes in zip(local.shape, parsed.dims))
    if storable(parsed, shape, mesh) != parsed.closed():
        raise ShardingError.here(
            f"'{parsed}' shards one dimension by axes out of mesh order",
            fix="name them in mesh order",
        )
    _warn_of_whole_batch(local, shape, groups)
    return wrap_local(local, parsed, shape, mesh, groups.device_mesh)


def _warn_of_whole_batch(local: Tensor, shape: tuple[int, ...], groups: ProcessGroups) -> None:
    """Warn, at the first call, if all ranks give the same rows, as of a global batch."""
    if groups.has_compared_batch or groups.is_fake or shape == tuple(local.shape):
        return
    groups.has_compared_batch = True
    checksums = all_gather_rows(groups, int(hash_of_bits(local)), "shard_batch")
    # Rows of one number, as in a benchmark, say nothing.
    if len({*checksums}) == 1 and bool((local != local.flatten()[:1]).any()) and groups.rank == 0:
        warnings.warn(
            f"shard_batch is given the same {list(local.shape)} rows on all ranks, and the batch "
            f"{list(shape)} has them several times; give each rank its own rows, as a "
            "DistributedSampler does, or pass the global batch itself to the model",
            stacklevel=3,
        )


def carry_optimizers(before: Mapping[str, Tensor], model: nn.Module) -> None:
    """Put a wrapped model's parameters in place of the former ones, with their states.

    before: the parameters and buffers by name, as they were when the model was not wrapped.
    """
    stored = _stored(before, model)
    for optimizer in _optimizers() if stored else ():
        for group in optimizer.param_groups:
            # In place: LBFGS has this list under a second name.
            group["params"][:] = [stored.get(p, p) for p in group["params"]]
        # A list: the loop changes the dict's keys.
        for old in [p for p in optimizer.state if p in stored]:
            state = optimizer.state.pop(old)
            optimizer.state[stored[old]] = {
                name: _like(value, old, stored) for name, value in state.items()
            }


def _stored(before: Mapping[str, Tensor], model: nn.Module) -> dict[Tensor, Tensor]:
    """Return the wrapped model's tensors by those in whose place they are."""
    now = dict(named_tensors(model))
    return {old: now[name] for name, old in before.items() if now[name] is not old}


def _optimizers() -> list[Optimizer]:
    """Return all optimizers in this process: a class's instances refer to it.

    A proxy's __class__ is not asked. With few classes, two million objects take 40 ms.
    """
    classes = [each for each in _classes(Optimizer) if _has_instances(each)]
    found = gc.get_referrers(*classes) if classes else []
    return [each for each in found if issubclass(type(each), Optimizer)]


def _classes(cls: type) -> Iterator[type]:
    yield cls
    for each in cls.__subclasses__():
        yield from _classes(each)


def _has_instances(cls: Any) -> bool:
    """Return whether this class may have instances: the first one wraps the method step."""
    return is_missing(_patch_step_function) or getattr(cls.step, "hooked", False)


def _like(value: object, old: Tensor, stored: Mapping[Tensor, Tensor]) -> object:
    """Return a parameter's state where the parameter is now; a buffer is there already."""
    if isinstance(value, Tensor) and value in stored:
        return stored[value]
    # A step count, or a factor that has another shape, is the same for all shards.
    if not isinstance(value, Tensor) or value.shape != old.shape:
        return value
    new = stored[old]
    if isinstance(new, DTensor):
        return distribute_tensor(value, new.device_mesh, new.placements)
    return value.to(new.device)
