"""Order of a whole tensor's rows if a dimension is stored by parts, as `3*model _` is."""

from __future__ import annotations

from torch import Tensor

from .mesh import Mesh
from .spec import ShardSpec


def part_order(x: Tensor, spec: ShardSpec, mesh: Mesh) -> Tensor:
    """Return a tensor whose equal blocks of rows are the shards.

    Example:
        >>> import torch
        >>> part_order(torch.arange(8), ShardSpec.parse("2*model"), Mesh(model=2)).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    for d, count in enumerate(spec.parts):
        shards = mesh.count(spec.dims[d])
        x = x.unflatten(d, (count, shards, -1)).transpose(d, d + 1).flatten(d, d + 2)
    return x


def user_order(x: Tensor, spec: ShardSpec, mesh: Mesh) -> Tensor:
    """Return a tensor with its rows in the user's order: the inverse of part_order.

    Example:
        >>> import torch
        >>> rows = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
        >>> user_order(rows, ShardSpec.parse("2*model"), Mesh(model=2)).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    for d, count in enumerate(spec.parts):
        shards = mesh.count(spec.dims[d])
        x = x.unflatten(d, (shards, count, -1)).transpose(d, d + 1).flatten(d, d + 2)
    return x
