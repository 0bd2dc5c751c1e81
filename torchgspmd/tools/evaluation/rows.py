"""A batch's rows: fill them up to a size, and take those that this device counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...errors import ShardingError


def pad_rows(batch: Sequence[Tensor], size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Fill up a batch with copies of its last row, or with zeros if it has none.

    Args:
        batch: Tensors with as many rows each: [rows, ...].
        size: How many rows there are to be.

    Returns:
        The tensors, and which rows were there before: a bool tensor [size].

    Raises:
        ShardingError: The tensors have different numbers of rows, or more than `size`.

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import pad_rows
        >>> pad_rows((torch.tensor([1.0, 2.0]), torch.tensor([3, 4])), 3)
        ((tensor([1., 2., 2.]), tensor([3, 4, 4])), tensor([ True,  True, False]))
    """
    rows = count_rows(batch)
    if rows > size:
        raise ShardingError.here(f"a batch has {rows} rows, more than {size}")
    padded = []
    for t in batch:
        last = t[-1:] if rows else t.new_zeros(1, *t.shape[1:])
        padded.append(torch.cat([t, last.expand(size - rows, *t.shape[1:])]))
    return tuple(padded), torch.arange(size) < rows


def count_rows(batch: Sequence[Tensor]) -> int:
    """Count a batch's rows, if its tensors agree."""
    counts = {len(t) if isinstance(t, Tensor) and t.dim() else -1 for t in batch}
    if len(counts) != 1 or -1 in counts:
        kinds = (list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in batch)
        raise ShardingError.here(
            f"a batch has entries of shapes {', '.join(map(str, kinds))}",
            why="dimension 0 of each is the rows of the batch",
            fix="pass what has no rows by call=lambda model, *batch: ...",
        )
    return counts.pop()


class Part:
    """The outputs that one device counts: a block, or all on one device.

    outputs: the model's results. whole: their dims that a device needs whole. The others correspond
    in order to the targets' first dims; the smallest target has `rank` dims.
    """

    def __init__(self, outputs: Tensor, whole: Sequence[int], rank: int) -> None:
        lacking = {d % outputs.dim() for d in whole}
        self.dims = [d for d in range(outputs.dim()) if d not in lacking][:rank]
        self.mesh = outputs.device_mesh if isinstance(outputs, DTensor) else None
        self.placements: list[Placement] = []
        self.outputs = outputs
        if isinstance(outputs, DTensor):
            self.placements = [
                p if isinstance(p, Shard) and p.dim in self.dims else Replicate()
                for p in outputs.placements
            ]
            # Dims that targets lack, such as classes, are gathered.
            self.outputs = outputs.redistribute(placements=self.placements).to_local()
        self.shape = outputs.shape

    @property
    def is_counted(self) -> bool:
        """Return whether this device, among all that have the block, counts it."""
        return self.mesh is None or all(
            isinstance(p, Shard) or self.mesh.get_local_rank(i) == 0
            for i, p in enumerate(self.placements)
        )

    def of(self, target: Tensor) -> Tensor:
        """Return a target's part for these outputs, on their device."""
        return self.cut(target).to(self.outputs.device)

    def cut(self, target: Tensor) -> Tensor:
        """Return a target's part for these outputs."""
        if isinstance(target, DTensor):
            return self._of_dtensor(target)
        for d, out in enumerate(self.dims[: target.dim()]):
            if target.shape[d] != self.shape[out]:
                raise ShardingError.here(
                    f"dimension {d} of a target of shape {list(target.shape)} does not have the "
                    f"{self.shape[out]} rows of dimension {out} of outputs {list(self.shape)}",
                    fix="name in `whole` the dimensions of the outputs that targets lack",
                )
            target = target.narrow(d, *self._span(out))
        return target

    def _of_dtensor(self, target: DTensor) -> Tensor:
        if self.mesh is None:
            return target.full_tensor()
        to_dim = {out: d for d, out in enumerate(self.dims)}
        placements = [
            Shard(to_dim[p.dim]) if isinstance(p, Shard) else Replicate() for p in self.placements
        ]
        return target.redistribute(placements=placements).to_local()

    def _span(self, dim: int) -> tuple[int, int]:
        """Return the block's first row in an output dim, and how many there are."""
        # Several mesh dimensions may divide one dim: each divides the block of those before it.
        begin, count = 0, self.shape[dim]
        for i, placement in enumerate(self.placements):
            if self.mesh is not None and isinstance(placement, Shard) and placement.dim == dim:
                rows = -(-count // self.mesh.size(i))
                skipped = min(rows * self.mesh.get_local_rank(i), count)
                begin, count = begin + skipped, min(rows, count - skipped)
        return begin, count


def real_part(
    outputs: Tensor, targets: Sequence[Tensor], whole: Sequence[int], real: Tensor | None
) -> tuple[Part, list[Tensor]]:
    """Return the outputs and targets that this device counts, without rows that are not real."""
    part = Part(outputs, whole, min((t.dim() for t in targets), default=outputs.dim()))
    tensors = [part.outputs, *map(part.of, targets)]
    if real is not None:
        mask = part.cut(real)
        if not mask.all():
            # Rows are dim 0 of targets, and the output dim that corresponds to it.
            dims = [part.dims[0], *(0 for _ in targets)]
            index = mask.nonzero().flatten()
            tensors = [t.index_select(d, index.to(t.device)) for t, d in zip(tensors, dims)]
    return part, tensors
