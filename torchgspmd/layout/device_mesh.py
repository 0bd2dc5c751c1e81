"""A mesh as users may give it: a Mesh, or torch's DeviceMesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ..errors import ShardingError
from .layout_rules import MeshLayout
from .mesh import Mesh


def mesh_of(mesh: Mesh | DeviceMesh | MeshLayout) -> Mesh:
    """Return a Mesh as it is, else the Mesh for a DeviceMesh or a Layout on a mesh.

    Raises ShardingError for anything else.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, MeshLayout):
        return mesh.mesh
    if isinstance(mesh, DeviceMesh):
        return Mesh.from_device_mesh(mesh)
    raise ShardingError.here(
        f"a mesh is a torchgspmd.Mesh or torch's DeviceMesh, not {type(mesh).__name__}",
        fix="pass a mesh such as Mesh(data=2, model=4)",
    )
