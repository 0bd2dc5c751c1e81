"""The rows that one process loads from each global batch, by its place along the batch axes."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from ..comm.process_groups import part_of, start_process_group
from ..errors import ShardingError
from ..layout.layout_rules import mesh_of
from ..layout.mesh import Mesh
from ..layout.prefix_specs import BATCH_AXES

LAST = ("drop", "repeat")


class BatchSampler(Sampler[list[int]]):
    """Indices for a DataLoader: each process loads its rows in every global batch, and no others.

    Processes that differ only along axes that do not divide the batch, such as "model", load the
    same rows. The global batches are the same on every mesh. `shard_batch` joins the rows loaded by
    all processes to one global tensor.

    Args:
        data: The data set, or its length.
        batch_size: Rows in a global batch.
        mesh: The module's mesh, also as torch's DeviceMesh.
        axes: Axes that divide the batch, such as "data" or ("host", "data"). "auto": those that
            in_specs="auto" takes.
        shuffle: Whether the order is random, another one in each epoch.
        seed: The order's seed; the same on every rank.
        last: "drop" leaves out the rows that fill no batch. "repeat" fills it with the epoch's
            first rows, which then count twice.

    Raises:
        ShardingError: The axes do not divide the batch, or the data fill no batch.

    Example:
        >>> sampler = gspmd.BatchSampler(10, 4, Mesh(data=1), shuffle=False)
        >>> list(sampler)
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        >>> sampler.resume(step=1)  # a run that has had one step goes on
        >>> list(sampler)
        [[4, 5, 6, 7]]
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        mesh: Mesh | DeviceMesh,
        *,
        axes: str | tuple[str, ...] = "auto",
        shuffle: bool = True,
        seed: int = 0,
        last: str = "drop",
    ) -> None:
        part, mesh = part_of(mesh), mesh_of(mesh)
        self.length = data if isinstance(data, int) else len(data)
        self.batch_size, self.shuffle, self.seed, self.last = batch_size, shuffle, seed, last
        if axes == "auto":
            names = tuple(name for name in mesh.names if name in BATCH_AXES)
        else:
            names = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            mesh.check_axis(name)
        shards = mesh.count(names)
        # A part counts its own processes from 0.
        rank = _rank(mesh) if part is None else part.mesh.flatten().tolist().index(dist.get_rank())
        place = mesh.index(names, mesh.coordinates(rank))
        if last not in LAST:
            raise ShardingError.here(f"last is '{last}'", fix=f"use one of {', '.join(LAST)}")
        if batch_size % shards:
            raise ShardingError.here(
                f"a batch of {batch_size} rows is not divided by {shards} devices of "
                f"{' and '.join(names)}",
                fix=f"use a batch of {shards * -(-batch_size // shards)} rows",
            )
        if self.length < batch_size and last == "drop" or not self.length:
            raise ShardingError.here(
                f"{self.length} rows fill no batch of {batch_size}",
                fix='use a smaller batch, or last="repeat"',
            )
        rows = batch_size // shards
        self._rows = slice(place * rows, (place + 1) * rows)
        self.epoch = self.first = 0

    def __len__(self) -> int:
        batches, rest = divmod(self.length, self.batch_size)
        return batches + (rest > 0 and self.last == "repeat")

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this process's rows, batch by batch; then the next epoch begins."""
        order = self._order(self.epoch)
        while self.first < len(self):
            at = self.first * self.batch_size
            # Before the yield: state_dict then says which batch comes next.
            self.first += 1
            yield order[at : at + self.batch_size][self._rows]
        self.epoch, self.first = self.epoch + 1, 0

    def resume(self, step: int) -> None:
        """Go on as after so many batches, counted over all epochs.

        Args:
            step: The number of steps that the run has had. Count those that were trained, since a
                DataLoader's workers are ahead of them.

        Example:
            >>> sampler = gspmd.BatchSampler(8, 4, Mesh(data=1))
            >>> sampler.resume(5)
            >>> sampler.epoch, sampler.first
            (2, 1)
        """
        self.epoch, self.first = divmod(step, len(self))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, for StatefulDataLoader and `save`.

        Returns:
            The epoch and the batch in it that comes next.

        Example:
            >>> gspmd.BatchSampler(8, 4, Mesh(data=1)).state_dict()
            {'epoch': 0, 'first': 0}
        """
        return {"epoch": self.epoch, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a place that state_dict returned, on any mesh.

        Args:
            state: The place.

        Example:
            >>> gspmd.BatchSampler(8, 4, Mesh(data=1)).load_state_dict({"epoch": 1, "first": 0})
        """
        self.epoch, self.first = int(state["epoch"]), int(state["first"])

    def _order(self, epoch: int) -> list[int]:
        """Return an epoch's rows, in the order of the global batches."""
        if self.shuffle:
            # A generator of its own leaves the global one alone, and is equal on all ranks.
            draw = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(self.length, generator=draw).tolist()
        else:
            order = list(range(self.length))
        missing = len(self) * self.batch_size - self.length
        while missing > 0:  # a data set may be smaller than what is missing
            order += order[:missing]
            missing = len(self) * self.batch_size - len(order)
        return order


def _rank(mesh: Mesh) -> int:
    """Return this process's place in the mesh; 0 where there is one device and no group."""
    if mesh.size > 1:
        start_process_group(mesh)
    return dist.get_rank() if dist.is_initialized() else 0
