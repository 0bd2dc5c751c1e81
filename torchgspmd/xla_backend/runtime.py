"""Find torch_xla, start it in SPMD mode once in a process, and watch what it leaves to the host."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import fx

from ..compat.private_apis import OpOverload
from ..errors import ShardingError
from ..layout.mesh import Mesh

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
