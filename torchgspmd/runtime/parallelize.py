"""parallelize and shard_batch: put a module and its batches on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..capture import check_dtypes, check_module
from ..comm.hardware import Hardware
from ..comm.process_groups import groups_of, part_of
from ..compat.versions import check_parallelize
from ..dtensor.module_tensors import named_tensors
from ..dtensor.storage import storable, wrap_local
from ..errors import ShardingError, user_line
from ..layout.annotate import layout_of
from ..layout.device_mesh import mesh_of
from ..layout.layout_rules import MeshLayout, bound
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec, SpecLike
from ..xla_backend.batch import place_batch
from ..xla_backend.runtime import is_started
from .carry_optimizers import carry_optimizers
from .module_proxy import ModuleProxy
from .module_proxy import shard_updates as mark_updates
from .sharded_module import ShardedModule
from .xla_module import XlaModule

BACKENDS = ("torch", "inductor", "xla")
CHECKS = ("always", "first", "never")


def parallelize(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | MeshLayout,
    *,
    backend: str = "torch",
    in_specs: Any = None,
    out_specs: Any = None,
    pin: str = "user",
    strict: bool = False,
    rng: str = "global",
    shard_updates: str | None = None,
    regather: str = "auto",
    skip_passes: Sequence[str] = (),
    costs: Mapping[str, float] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    check: str = "always",
    timeout: float | timedelta | None = None,
    dynamic: bool | Mapping[str, Any] = True,
    hardware: Hardware | str | None = None,
) -> nn.Module:
    """Return a module with the same forward that computes on a mesh; every process calls it alike.

    Parameters and buffers become DTensors with rank 0's values, laid out as marked or replicated.
    The returned module answers as the model does: its class, attributes, methods and state_dict.
    Optimizers of the model's parameters get those of the returned module, with their states.

    Plain tensor arguments are the global batch, the same on every rank. DTensor arguments keep
    their layout. Results are whole tensors unless out_specs gives a layout: then they are DTensors.

    Args:
        model: The module for one device, with marks of mark_sharding on its parameters.
        mesh: The mesh, with one process per device, also as torch's DeviceMesh, or a Layout on one:
            specs have logical names then. A part of a DeviceMesh (`devices["model"]`) puts the
            model on the processes of that part; each part has a model of its own.
        backend: "torch" runs the program operation by operation, "inductor" compiles it. "xla"
            needs no process group: parameters become XLA tensors, and XLA partitions the program.
        in_specs: Layouts of the arguments: a tuple, or a mapping by name. "auto": the axes of the
            batch ("data", "dp", ...) divide the leading dimension of each tensor.
        out_specs: Layouts of the results. A DTensor has the nearest layout that it can express:
            several axes shard one dimension only in mesh order and if they divide it.
            "same" leaves results as they are computed.
        pin: For "xla", the layouts that XLA gets besides those of inputs and results: the marks
            ("user"), every layout that our partitioner chose ("all"), or nothing ("none").
        strict: Whether an operation of replicated_ops is an error. Not for "xla".
        rng: "global": random numbers are those of one device, by the place of an element; all ranks
            need the same torch.manual_seed. "native": from PyTorch's generator. Not for "xla".
        shard_updates: An axis, such as "data". Every parameter, its gradient and its optimizer
            state are stored sharded over that axis besides their mark (ZeRO; arXiv 2004.13336).
        regather: Whether the backward gathers weights again: "always", "never" (they are kept), or
            "auto": only if they would not fit a GPU's memory. "all": it gathers all again, as the
            keys of a long context. Not for "xla".
        skip_passes: Passes to leave out of "bucket", "collective_matmul", "overlap" and "prefetch";
            the same on all ranks. Not for "xla".
        costs: Other values for constants of the cost model, by name, the same on all ranks;
            docs/debugging_a_layout.md has them. Not for "xla".
        param_dtype: The dtype to compute in, such as torch.bfloat16. Floating parameters and
            arguments are cast to it, parameters before they are gathered. Parameters, their
            gradients and optimizer states stay as they are.
        reduce_dtype: The dtype in which gradients of parameters are summed over devices, such as
            torch.float32; by default the one that sends least. Not for "xla".
        check: When the values of plain tensor arguments are compared between the ranks: "always"
            at every call (checksums of all integers and small tensors, samples of large ones),
            "first" at the first call of each program, or "never": then later calls send no
            comparison at all, of programs neither. Not for "xla".
        dynamic: Whether calls that differ in sizes share a program. True: from the second size of
            a dimension on that the first program does not shard. False: never. A mapping names
            dimensions as in plan(), which are symbols from the first call on. Not for "xla".

        timeout: Seconds, or a timedelta, after which a rank that waits for others raises: the limit
            of the process groups of the mesh, of one axis those of the default group. None: as
            init_process_group has set it. Before that, ranks say on stderr for whom they wait.
            Not for "xla".
        hardware: As in plan(). Not for "xla".

    Returns:
        A ShardedModule, or an XlaModule for backend "xla".

    Raises:
        ShardingError: There is no process group with one process per device, or programs or
            shapes of arguments differ between ranks.

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
    if backend not in BACKENDS:
        raise ShardingError(
            f"there is no backend '{backend}'; there are {', '.join(map(repr, BACKENDS))}",
            where=user_line(),
        )
    layout = layout_of(model, mesh)
    if isinstance(mesh, MeshLayout):
        in_specs, out_specs = mesh.spec(in_specs), mesh.spec(out_specs)
    part, mesh = part_of(mesh), mesh_of(mesh)
    check_parallelize()
    partitioner_options = {
        "strict": strict,
        "rng": rng != "global",
        "regather": regather != "auto",
        "skip_passes": bool(skip_passes),
        "costs": bool(costs),
        "reduce_dtype": reduce_dtype is not None,
        "check": check != "always",
        "timeout": timeout is not None,
        "dynamic": isinstance(dynamic, Mapping),
        "hardware": hardware is not None,
    }
    if check not in CHECKS:
        raise ShardingError(
            f"there is no check '{check}'; there are {', '.join(map(repr, CHECKS))}",
            where=user_line(),
        )
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    if timeout is not None and timeout <= timedelta():
        raise ShardingError(
            f"a timeout of {timeout.total_seconds():g} s",
            where=user_line(),
            fix="seconds or a timedelta, more than 0; None for that of init_process_group",
        )
    unsupported = partitioner_options if backend == "xla" else {"pin": pin != "user"}
    for name in (name for name, is_set in unsupported.items() if is_set):
        raise ShardingError(f"backend '{backend}' has no option {name}", where=user_line())
    if any(isinstance(m, ModuleProxy) for m in model.modules()):
        raise ShardingError(
            "a module is on a mesh already",
            where=user_line(),
            fix="wrap the outermost module, once",
        )
    check_module(model)
    check_dtypes(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    before = dict(named_tensors(model))
    with bound(layout):
        if shard_updates is not None:
            mark_updates(model, mesh, shard_updates)
        if backend == "xla":
            module = XlaModule(model, mesh, in_specs, out_specs, pin, param_dtype)
        else:
            module = ShardedModule(
                model,
                mesh,
                backend,
                in_specs,
                out_specs,
                param_dtype=param_dtype,
                check=check,
                dynamic=dynamic,
                part=part,
                timeout=timeout,
                strict=strict,
                rng=rng,
                regather=regather,
                skip_passes=skip_passes,
                costs=costs,
                reduce_dtype=reduce_dtype,
                shard_updates=shard_updates,
                hardware=hardware,
            )
    module.__dict__["_layout"] = layout
    carry_optimizers(before, module)
    return module


def shard_batch(local: Tensor, mesh: Mesh | DeviceMesh, spec: SpecLike) -> Tensor:
    """Return the global batch, a DTensor whose shard on this rank is `local`; nothing is sent.

    In a process that runs on XLA, `local` is the batch of this host. Its rows go to the host's
    devices, and the result is one XLA tensor.

    Args:
        local: The rows that a DistributedSampler gives this rank, of the same shape on every rank.
        mesh: The mesh of the module, also as torch's DeviceMesh.
        spec: The layout. The global size of a sharded dimension is the local size times the shards.

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
    shape = tuple(n * mesh.count(axes) for n, axes in zip(local.shape, parsed.dims))
    if storable(parsed, shape, mesh) != parsed.closed():
        raise ShardingError(
            f"'{parsed}' shards one dimension by axes out of mesh order",
            where=user_line(),
            fix="name them in mesh order",
        )
    return wrap_local(local, parsed, shape, mesh, groups.device_mesh)
