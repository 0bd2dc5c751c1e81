"""Adapters to the libraries that people train with; docs/frameworks.md shows each.

A library sees all ranks as one process, so its loops, samplers, schedulers and averages are a
single device's. Each rank gets the whole batch, and rank 0 writes the files. The mesh divides the
batch inside the module.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from torch.distributed.device_mesh import DeviceMesh

from ..errors import ShardingError
from ..layout.layout_rules import MeshLayout, mesh_of
from ..layout.mesh import Mesh
from ..layout.prefix_specs import BATCH_AXES
from ..layout.spec_notation import AUTO

VERSIONS = {  # on which `make test-integrations` passes
    "transformers": "5.24",
    "accelerate": "1.15",
    "lightning": "2.6",
    "trl": "1.16",
    "peft": "0.21",
    "torchtitan": "0.2",
    "torchao": "0.18",
}
Meshes = Mesh | DeviceMesh | MeshLayout


def library(name: str) -> ModuleType:
    """Return an optional library. Raise ShardingError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # A missing dependency inside the library is another fault: show that one unchanged.
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        raise ShardingError.here(
            f"{name.partition('.')[0]} is not installed",
            fix="run pip install 'torchgspmd[integrations]'",
        ) from None


def batch_parts(mesh: Meshes) -> int:
    """Count the parts into which a mesh divides a batch."""
    own = mesh_of(mesh)
    return own.count(name for name in own.names if name in BATCH_AXES)


def default_in_specs(mesh: Meshes) -> str | None:
    """Return the in_specs that divide the batch, if the mesh has an axis for it."""
    return AUTO if {*mesh_of(mesh).names} & {*BATCH_AXES} else None
