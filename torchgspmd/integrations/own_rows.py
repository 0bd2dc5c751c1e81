"""A library's loaders, made to read only the rank's own rows of every batch.

    loader of 8 rows a batch, data=2, model=2      ranks 0 and 1 read rows 0 to 3, 2 and 3 the rest

The sampler stays the library's, so the global batches are a single device's. `shard_batch` joins
the rows that the ranks have read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from ..layout.layout_rules import mesh_of
from ..layout.prefix_specs import BATCH_AXES
from ..runtime.parallelize import shard_batch
from . import Meshes


class OwnRows:
    """A batch sampler that yields this rank's rows from each batch of another sampler."""

    def __init__(self, batches: Any, mesh: Meshes) -> None:
        own = mesh_of(mesh)
        axes = tuple(name for name in own.names if name in BATCH_AXES)
        self.batches, self.parts = batches, own.count(axes)
        self.place = own.index(axes, own.coordinates(dist.get_rank()))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list]:
        for rows in self.batches:
            count, rest = divmod(len(rows), self.parts)
            if rest:
                raise ShardingError.here(
                    f"a batch of {len(rows)} rows is not divided by {self.parts} devices",
                    why="own_rows=True lets each rank read as many rows as any other",
                    fix="use drop_last=True and a batch size that is divided, or own_rows=False",
                )
            yield rows[self.place * count : (self.place + 1) * count]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["batches"], name)


def read_own_rows(loader: Any, mesh: Meshes) -> Any:
    """Make a DataLoader read only this rank's rows, and return it."""
    if getattr(loader, "batch_sampler", None) is None:
        raise ShardingError.here(
            f"own_rows=True is given for a {type(loader).__name__} without a batch sampler",
            why="rows of an iterable data set have no numbers",
            fix="use a data set with __getitem__ and __len__, or own_rows=False",
        )
    inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps a loader
    if not isinstance(inner.batch_sampler, OwnRows):  # a DataLoader refuses the plain assignment
        vars(inner)["batch_sampler"] = OwnRows(inner.batch_sampler, mesh)
    return loader


def global_batch(batch: Any, mesh: Meshes) -> Any:
    """Join the rows that each rank has read into the global batch, as DTensors."""
    own = mesh_of(mesh)
    # Without a batch axis all ranks read all rows, so "_" joins nothing.
    axes = "+".join(name for name in own.names if name in BATCH_AXES) or "_"

    def joined(rows: Tensor) -> Tensor:
        spec = " ".join([axes, *"_" * (rows.dim() - 1)])
        return shard_batch(rows, own, spec) if rows.dim() else rows

    return pytree.tree_map_only(Tensor, joined, batch)


class GlobalBatches:
    """A DataLoader that yields global batches. is_own: it reads own rows already."""

    def __init__(self, loader: Any, mesh: Meshes, is_own: bool = False) -> None:
        self._loader, self._mesh = loader if is_own else read_own_rows(loader, mesh), mesh

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield global_batch(batch, self._mesh)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)
