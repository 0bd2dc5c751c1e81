"""parallelize and shard_batch: a module and its batches on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..capture import (
    check_module,
)
from ..comm.process_groups import groups_of
from ..compat.versions import check_parallelize
from ..dtensor.storage import (
    storable,
    wrap_local,
)
from ..errors import ShardingError, user_line
from ..mesh import Mesh
from ..shard_spec import ShardSpec, SpecLike
from ..xla_backend.batch import place_batch
from ..xla_backend.runtime import is_started
from .module_proxy import ModuleProxy
from .module_proxy import shard_updates as mark_updates
from .sharded_module import ShardedModule
from .xla_module import XlaModule

BACKENDS = ("torch", "inductor", "xla")


def parallelize(
    model: nn.Module,
    mesh: Mesh,
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
) -> nn.Module:
    """The model on a mesh: an nn.Module with the same forward, to be called by every process alike.

    Parameters and buffers become DTensors laid out as marked (replicated without a mark) with rank
    0's values; give the returned module's parameters to the optimizer. Plain tensor arguments are
    the global batch, the same on every rank; DTensors are taken as laid out. Results come back
    whole, but for those whose layout out_specs gives: DTensors, of the nearest layout that such
    express (several axes on one dimension only in mesh order, and if they divide it). backend
    "torch" runs the program operation by operation, "inductor" compiles it. Raises ShardingError if
    there is no process group with one process a device, or if ranks differ in their programs or in
    the shapes of arguments. strict=True: what would be listed as replicated_ops is an error.
    rng="global": random numbers are those of one device, drawn by the place of an element; all
    ranks need the same torch.manual_seed. "native": from PyTorch's generator. shard_updates="data":
    every parameter, its gradient and the optimizer's state of it are stored in parts over that axis
    besides its mark (ZeRO; arXiv 2004.13336). regather: whether weights are gathered again for the
    backward: "always", "never" (they are kept), or "auto": if a GPU's memory would not do
    otherwise. skip_passes: those of "bucket", "collective_matmul", "overlap" and "prefetch" that
    are to be left out (README, Overlap); all ranks alike.

    backend "xla" needs no process group: parameters become tensors on XLA, whose own partitioner
    makes the program. pin: what it is told besides the layouts of inputs and results: the marks
    ("user"), every layout that our own partitioner chose ("all"), or nothing ("none"). strict, rng
    and regather are not for it: XLA draws random numbers itself.
    """
    if backend not in BACKENDS:
        raise ShardingError(
            f"there is no backend '{backend}'; there are {', '.join(map(repr, BACKENDS))}",
            where=user_line(),
        )
    check_parallelize()
    ours = {
        "strict": strict,
        "rng": rng != "global",
        "regather": regather != "auto",
        "skip_passes": bool(skip_passes),
    }
    others = ours if backend == "xla" else {"pin": pin != "user"}
    for name in (name for name, is_set in others.items() if is_set):
        raise ShardingError(f"backend '{backend}' has no option {name}", where=user_line())
    if any(isinstance(m, ModuleProxy) for m in model.modules()):
        raise ShardingError(
            "a module is on a mesh already",
            where=user_line(),
            fix="wrap the outermost module, once",
        )
    check_module(model)
    if shard_updates is not None:
        mark_updates(model, mesh, shard_updates)
    if backend == "xla":
        return XlaModule(model, mesh, in_specs, out_specs, pin)
    return ShardedModule(
        model,
        mesh,
        backend,
        in_specs,
        out_specs,
        strict=strict,
        rng=rng,
        regather=regather,
        skip_passes=skip_passes,
    )


def shard_batch(local: Tensor, mesh: Mesh, spec: SpecLike) -> Tensor:
    """This rank's part of a batch, all parts together as one global DTensor; nothing is sent.

    local: the rows that a DistributedSampler gives this rank: of the same shape on every rank. The
    global size of a sharded dimension is the local one times the number of shards. In a process
    that runs on XLA: the batch of this host, whose rows go to its devices; all hosts' together as
    one XLA tensor.
    """
    if is_started():
        return place_batch(local, mesh, spec)
    groups = groups_of(mesh, local.device.type)
    parsed = ShardSpec.parse(spec).check(mesh, local.shape, "the batch")
    shape = tuple(n * mesh.count(axes) for n, axes in zip(local.shape, parsed.dims))
    if storable(parsed, shape, mesh) != parsed.closed():
        raise ShardingError(
            f"'{parsed}' shards one dimension by axes out of mesh order",
            where=user_line(),
            fix="name them in mesh order",
        )
    return wrap_local(local, parsed, shape, mesh, groups.device_mesh)
