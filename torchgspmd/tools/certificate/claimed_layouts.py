"""Layouts as a certificate sees them: which elements each device holds, and errors in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy
import torch
from torch import Tensor, fx

from ...errors import ShardingError
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec

COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}
Rows = tuple[list[int], list[int]]  # of the global tensor, and their places in the shard


def rows_of(
    shape: Sequence[int], spec: ShardSpec, mesh: Mesh, local: Sequence[int], rank: int
) -> Iterator[Rows]:
    """Yield the rows that a device holds along each dimension. local: its shard's shape."""
    at = mesh.coordinates(rank)
    for d, (size, axes, rows) in enumerate(zip(shape, spec.dims, local)):
        if (window := spec.window(d)) is not None:
            index = int(mesh.index(axes, at)) if axes else 0
            # Rows outside [begin, end) are the window's fill, not the tensor's.
            held = [window.first(index) + k for k in range(rows)]
            inside = [k for k, row in enumerate(held) if window.begin <= row < window.end]
            wrap = window.wrap or size
            yield [held[k] % wrap for k in inside], inside
        else:
            first = int(mesh.index(axes, at)) * rows if axes else 0
            count = max(min(rows, size - first), 0)
            held = range(first, first + count)
            if spec.parts and (parts := spec.parts[d]) > 1:  # rows first to first + n of each part
                n = rows // parts
                held = [
                    p * size // parts + first // parts + k for p in range(parts) for k in range(n)
                ]
            yield list(held), list(range(count))


def shard_shape(shape: Sequence[int], spec: ShardSpec, mesh: Mesh) -> list[int]:
    """Return a shard's shape: rows divided and rounded up, or a window's rows."""
    result = []
    for d, (size, axes) in enumerate(zip(shape, spec.dims)):
        window = spec.window(d)
        # Rounded up: every device has a shard of one shape, the last ones padded.
        result.append(window.length if window else -(-size // mesh.count(axes)))
    return result


def cut(x: Tensor, spec: ShardSpec, mesh: Mesh, ranks: Iterable[int] | None = None) -> list[Tensor]:
    """Cut a tensor into shards; NaN, or 0 for integers, is where a shard has no rows."""
    local, shards = shard_shape(x.shape, spec, mesh), []
    for rank in range(mesh.size) if ranks is None else ranks:
        shard = poison(local, x)
        chosen, to = zip(*rows_of(x.shape, spec, mesh, local, rank)) if local else ((), ())
        for d, w in enumerate(spec.windows or ()):
            if w is not None and w.fill is not None:
                outside = [k for k in range(local[d]) if k not in set(to[d])]
                if outside:
                    rows = torch.tensor(outside, device=x.device)
                    shard.index_fill_(d, rows, _number(w.fill, x.dtype))
        if local:
            shard[_grid(to)] = x[_grid(chosen)]
        else:
            shard.copy_(x)
        shards.append(shard)
    return shards


def poison(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor filled with NaN, or with 0 if the dtype has none."""
    if like.is_floating_point() or like.is_complex():
        return torch.full([*shape], math.nan, dtype=like.dtype, device=like.device)
    return torch.zeros([*shape], dtype=like.dtype, device=like.device)


def _number(fill: float, dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex or not math.isinf(fill):
        return fill
    if dtype == torch.bool:
        return fill > 0
    return torch.iinfo(dtype).max if fill > 0 else torch.iinfo(dtype).min


def _grid(rows: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """Return indices that select these rows along each dimension: slices, where rows follow."""
    if all(r and r[-1] - r[0] + 1 == len(r) and [*r] == [*range(r[0], r[-1] + 1)] for r in rows):
        return tuple(slice(r[0], r[-1] + 1) for r in rows)
    rank = len(rows)
    return tuple(
        torch.tensor(r, dtype=torch.long).view([-1 if e == d else 1 for e in range(rank)])
        for d, r in enumerate(rows)
    )


def reduced(shards: Sequence[Tensor], spec: ShardSpec, mesh: Mesh) -> list[Tensor]:
    if not spec.pending:
        return list(shards)
    # In the order of the ranks; trials allow for rounding.
    result, combine = list(shards), COMBINE[spec.reduction]
    for group in mesh.groups(spec.pending):
        total = reduce(combine, [shards[rank] for rank in group])
        for rank in group:
            result[rank] = total
    return result


def compared(
    shards: Sequence[Tensor], spec: ShardSpec, mesh: Mesh, truth: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (device, its rows, the same rows in the truth).

    Shards that do not cover the value are compared whole: their shape differs from its own.
    """
    for rank, shard in enumerate(reduced(shards, spec, mesh)):
        if not truth.dim() or not _covers(shard.shape, truth.shape, spec, mesh):
            yield rank, shard, truth
            continue
        chosen, held = zip(*rows_of(truth.shape, spec, mesh, shard.shape, rank))
        if all(chosen):
            yield rank, shard[_grid(held)], truth[_grid(chosen)]


def _covers(local: Sequence[int], shape: Sequence[int], spec: ShardSpec, mesh: Mesh) -> bool:
    """Return whether shards with a shape hold all rows of a value, each as many as it must."""
    windows = spec.windows or (None,) * len(shape)
    return len(local) == len(shape) and all(
        rows == window.length if window else rows * mesh.count(axes) >= size
        for rows, size, axes, window in zip(local, shape, spec.dims, windows)
    )


def close(mine: Tensor, one: Tensor, error: float) -> Tensor:
    """Return where two values are equal, but for an error relative to the largest number."""
    if not (one.is_floating_point() or one.is_complex()) or not one.numel():
        return mine == one
    if one.itemsize == 1:  # compared as numbers that torch can compare
        mine, one = mine.float(), one.float()
    finite = one[torch.isfinite(one)].abs()
    most = error * (max(float(finite.max()), 1.0) if finite.numel() else 1.0)
    return torch.isclose(mine, one.to(mine.dtype), rtol=0, atol=most, equal_nan=True)


def gathered(
    shards: Sequence[Tensor],
    spec: ShardSpec,
    mesh: Mesh,
    shape: Sequence[int],
    ranks: Iterable[int],
) -> Tensor:
    """Return the global tensor whose parts some devices hold."""
    whole = poison(shape, shards[0])
    for rank in ranks:
        # Without dimensions there are no rows: any device has the value.
        if not shape:
            return shards[rank]
        chosen, held = zip(*rows_of(shape, spec, mesh, shards[rank].shape, rank))
        if all(chosen):
            whole[_grid(chosen)] = shards[rank][_grid(held)]
    return whole


# Errors: each is a fault in torchgspmd, and names a value.

# A wrong value is never the user's fault, so every error asks for a report.
_REPORT = "report it, with the file that plan.save(path) writes; do not train with this plan"


def other_value(name: str, node: fx.Node | None, claim: str, found: str) -> ShardingError:
    """Return the error for a value that differs. claim: the plan's. found: the numbers."""
    return ShardingError(
        f"'%{name}' is not the value of one device: {found}",
        where=None if node is None else node.meta.get("source"),
        why=f"the plan says that it {claim}",
        fix=_REPORT,
    )


def not_eager(name: str, mine: Tensor, eager: Tensor) -> ShardingError:
    found = f"the program has the shape {list(mine.shape)}, eager PyTorch {list(eager.shape)}"
    if mine.shape == eager.shape:
        error = (mine.to(eager.dtype) - eager).abs() if eager.dtype != torch.bool else mine ^ eager
        at = numpy.unravel_index(int(error.nan_to_num(torch.inf).argmax()), tuple(eager.shape))
        place = tuple(map(int, at))
        one, other = mine[place].item(), eager[place].item()
        found = f"the program has {one} at {list(place)}, eager PyTorch {other}"
    return ShardingError(
        f"{name} is not what eager PyTorch computes: {found}",
        why="the capture made it so: the plan computes what was captured",
        fix=_REPORT,
    )


def other_dtype(node: fx.Node, dtype: torch.dtype, known: set[torch.dtype]) -> ShardingError:
    names = " or ".join(sorted(map(str, known)))
    return ShardingError(
        f"'%{node}' is {dtype}, its value is {names}",
        where=node.meta.get("source"),
        why=f"the plan says that it is %{value_of(node)}",
        fix=_REPORT,
    )


def fails(node: fx.Node, error: Exception, on: str, computed: str) -> ShardingError:
    """Return the error for a node that fails. on: where. computed: by one device all the same."""
    return ShardingError(
        f"'%{node}' fails on {on}: {str(error).partition(chr(10))[0]}",
        where=node.meta.get("source"),
        why=f"one device computes {computed}",
        fix=_REPORT,
    )


def value_of(node: fx.Node) -> str:
    """Return the value that a node claims to be, by its name in the plan or in the program."""
    return str(node.meta.get("value", node.meta.get("captured", node.name)))


def other_rank(node: fx.Node, rank: int, found: str, why: str) -> ShardingError:
    return ShardingError(
        f"'%{node}' of rank {rank} {found}", where=node.meta.get("source"), why=why, fix=_REPORT
    )
