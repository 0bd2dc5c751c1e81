"""Start torch_xla in SPMD mode, watch what it leaves to the host, and place tensors on it."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from ..capture.state.dependencies import named_tensors, slot_of
from ..compat.private_apis import OpOverload
from ..errors import ShardingError
from ..layout.mark import copy_mark
from ..layout.mesh import Coordinates, Mesh
from ..shard_spec import ShardSpec, SpecLike
from .sharding import annotate, check, device_order, in_xla, layout_text, op_sharding, text_of

_READS = {"aten::_local_scalar_dense"}  # reads a value, computes nothing
_INSTALL = (
    "run pip install torch==2.9.0 torch_xla==2.9.0; on a TPU VM torch==2.9.0 "
    "'torch_xla[tpu]==2.9.0'"
)


def is_available() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def is_started() -> bool:
    """True if this process runs on XLA in SPMD mode, which it cannot leave again."""
    return "torch_xla" in sys.modules and sys.modules["torch_xla"].runtime.is_spmd()


def start(mesh: Mesh, *, backward: bool = True) -> torch.device:
    """Start XLA in SPMD mode, if it is not started; return the device that stands for all.

    backward: whether autograd is to run on it. Raise a ShardingError if the mesh does not have all
    XLA devices, or if autograd cannot run.
    """
    _start()
    if backward:
        _check_backward()
    import torch_xla
    import torch_xla.runtime as xr

    devices = xr.global_runtime_device_count()
    if mesh.size != devices:
        raise ShardingError.here(
            f"mesh {mesh} has {mesh.size} devices, XLA has {devices}",
            why="torch_xla partitions for all devices at once; a part of them cannot be a mesh",
            fix="add an axis, or set CPU_NUM_DEVICES for virtual devices on the CPU",
        )
    return torch_xla.device()


@cache
def _start() -> None:
    if not is_available():
        raise ShardingError.here("backend 'xla' needs torch_xla", fix=_INSTALL)
    if "torch_xla" not in sys.modules:
        # Philox is partitioned; the default generator draws the whole tensor on every device.
        os.environ.setdefault("XLA_RNG_BIT_GENERATOR", "philox")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import torch_xla
    import torch_xla.runtime as xr

    if not xr.is_spmd() and torch_xla._XLAC._xla_get_spmd_config_is_locked():
        raise ShardingError.here(
            "this process uses XLA already, without SPMD",
            why="tensors that exist on XLA would be copied to every device",
            fix="call parallelize first, "
            "or torch_xla.runtime.use_spmd() before the first XLA tensor",
        )
    xr.use_spmd()
    xr.global_runtime_device_count()  # creates the client


@cache
def _check_backward() -> None:
    """Raise a ShardingError if autograd has no queue for XLA.

    The autograd engine creates all devices' queues at a process's first backward.
    """
    # A trial, since torch does not say for which devices it has queues.
    x = torch.zeros((), device="xla", requires_grad=True)
    try:
        (x * 1).backward()
    except RuntimeError as error:
        raise ShardingError.here(
            "backwards on XLA cannot run in this process any more",
            why="a backward ran on another device before XLA was started",
            fix="call parallelize(..., backend='xla') before the first backward",
        ) from error


def report_host_operations(graph: fx.Graph, run: Callable[[], object]) -> object:
    """Return `run`'s result; warn about each operation in the graph that ran on the host.

    Its result is right, but its operands are gathered and the step is cut in two.
    """
    # torch_xla counts for the whole process, other models included.
    before = _host_counts()
    result = run()
    for name, count in _host_counts().items():
        if count > before.get(name, 0) and name not in _READS:
            lines = dict.fromkeys(
                n.meta.get("source") for n in graph.nodes if _name(n.target).startswith(name)
            )
            where = f" ({', '.join(line for line in lines if line)})" if any(lines) else ""
            warnings.warn(
                f"{name}{where} has no kernel on XLA: the host computes it, on gathered tensors, "
                "and the step is cut in two",
                stacklevel=3,
            )
    return result


def _host_counts() -> dict[str, int]:
    import torch_xla.debug.metrics as met

    return {
        name: met.counter_value(name) for name in met.counter_names() if name.startswith("aten::")
    }


def _name(target: object) -> str:
    return target._schema.name if isinstance(target, OpOverload) else ""


# Place a module's parameters and buffers, arguments and all hosts' batches on XLA.

# (a module's table, of parameters or buffers; the name in that table; the layout)
Slot = tuple[dict, str, ShardSpec]


def place(
    model: nn.Module, specs: dict[str, ShardSpec], mesh: Mesh, device: torch.device
) -> list[Slot]:
    """Replace a module's parameters and buffers by XLA tensors.

    Tied ones stay tied. Those on meta stay there.
    """
    placed: dict[int, Tensor] = {}
    slots: dict[int, Slot] = {}
    for name, tensor in named_tensors(model):
        table, key = slot_of(model, name)
        # By id: tied parameters become one tensor.
        if id(tensor) not in placed:
            stored = (
                tensor.detach()
                if tensor.is_meta
                else place_tensor(tensor.detach(), specs[name], mesh, device)
            )
            placed[id(tensor)] = (
                nn.Parameter(stored, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else stored
            )
            copy_mark(tensor, placed[id(tensor)])
            slots[id(tensor)] = (table, key, specs[name])
        table[key] = placed[id(tensor)]
    return list(slots.values())


def place_tensor(tensor: Tensor, spec: ShardSpec, mesh: Mesh, device: torch.device) -> Tensor:
    """Send every device its shard. A tensor on XLA stays as it is."""
    import torch_xla.distributed.spmd as xs

    if isinstance(tensor, DTensor):
        raise ShardingError.here(
            "a DTensor is given to a program on XLA",
            fix="pass the global batch as a plain tensor, or call shard_batch",
        )
    if tensor.device == device:
        return tensor
    moved = tensor.to(device)
    xs.mark_sharding(moved, *in_xla(mesh, spec))
    return moved


def pin(tensor: Tensor, mesh: Mesh, spec: ShardSpec) -> None:
    """Give a tensor a layout, unless it has it.

    torch_xla may give another layout to a tensor that is assigned or copied to.
    """
    if layout_text(tensor) != text_of(spec, mesh, tuple(device_order())):
        tensor.data = annotate(tensor.detach(), str(mesh), str(spec))


def sync() -> None:
    """Run all lazy operations, as one program."""
    import torch_xla

    torch_xla.sync()


def program_text(tensors: list[Tensor]) -> str:
    """Return lazy tensors' partitioned and optimized program, without running it."""
    import torch_xla

    before = os.environ.get("XLA_DUMP_POST_OPTIMIZATIONS")
    # Else the text is that before XLA's partitioner.
    os.environ["XLA_DUMP_POST_OPTIMIZATIONS"] = "1"
    try:
        return torch_xla._XLAC._get_xla_tensors_hlo(tensors)
    finally:
        if before is None:
            del os.environ["XLA_DUMP_POST_OPTIMIZATIONS"]


# Join all hosts' batches to one tensor: a host sends its rows to its devices.


def place_batch(local: Tensor, mesh: Mesh, spec: SpecLike) -> Tensor:
    """Return the global batch on XLA. local: this host's rows."""
    import torch_xla

    start(mesh, backward=False)
    parsed = check(
        ShardSpec.parse(spec).check(mesh, local.shape, "the batch").closed(), mesh, "the batch"
    )
    # The mesh counts devices slice by slice, torch_xla by their ids.
    rank = {id: i for i, id in enumerate(device_order())}
    shape, shards = parts(
        local.detach().cpu(), parsed, mesh, [mesh.coordinates(rank[id]) for id in own_devices()]
    )
    return torch_xla._XLAC._global_tensor_from_cpu_shards(
        shards, op_sharding(str(mesh), str(parsed)), shape
    )


def own_devices() -> list[int]:
    """Return the ids of this host's devices, in torch_xla's order for shards that it sends."""
    import torch_xla

    return [int(name.split(":")[1]) for name in torch_xla._XLAC._xla_get_runtime_devices()]


def parts(
    local: Tensor, spec: ShardSpec, mesh: Mesh, devices: Sequence[Coordinates]
) -> tuple[list[int], list[Tensor]]:
    """Return (global shape, the shards on this host's devices).

    local: the rows in the shards that this host's devices hold, in order. devices: their
    coordinates. A dimension's global size is this host's rows * all shards / this host's shards.
    The last shards are padded with zeros.
    """
    places = [tuple(mesh.index(axes, device) for axes in spec.dims) for device in devices]
    own = [sorted(set(indices)) for indices in zip(*places)]  # this host's shards, by dimension
    shape = []
    for d, (size, axes) in enumerate(zip(local.shape, spec.dims)):
        # A host with all shards may have a short last one: the global size is its own.
        if len(own[d]) < mesh.count(axes) and size % len(own[d]):
            raise ShardingError.here(
                f"dimension {d} of a host's batch has {size} rows, "
                f"which its {len(own[d])} shards do not divide",
                fix="give every device the same number of rows, on every host",
            )
        shape.append(size * mesh.count(axes) // len(own[d]))
    rows = spec.local_shape(shape, mesh)
    return shape, [
        _shard(local, rows, [indices.index(i) for indices, i in zip(own, place)])
        for place in places
    ]


def _shard(local: Tensor, rows: Sequence[int], place: Sequence[int]) -> Tensor:
    """Return the shard at a place in a grid; each has `rows` rows, padded with zeros."""
    part = local
    for d, (count, index) in enumerate(zip(rows, place)):
        begin = min(index * count, local.shape[d])
        part = part.narrow(d, begin, min(count, local.shape[d] - begin))
    shard = torch.zeros(tuple(rows), dtype=local.dtype)
    shard[tuple(slice(n) for n in part.shape)] = part
    return shard
