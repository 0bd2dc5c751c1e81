"""Operations on one device, without communication: slice a shard or window, order or mask rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout.halo_window import Window
from ..layout.mesh import Mesh
from ..layout.spec import ShardSpec


def take_part(x: Tensor, dim: int, index: int, count: int, group: int = 1) -> Tensor:
    """Return shard number `index` among `count` equal ones; zeros pad the last ones.

    group: rows that stay together.
    """
    # Shards are equal so that collectives can be even; the rounding is up, in whole groups.
    rows = -(-x.shape[dim] // (count * group)) * group
    x = pad_rows(x, dim, rows * count)
    return x.narrow(dim, index * rows, rows).contiguous()


vars(take_part)["packs"] = True  # see rules/registry.py


def to_host(x: Tensor) -> Tensor:
    """Return x in the memory of the host: pinned, without waiting, if x is on a card."""
    if not x.is_cuda:
        return x.clone(memory_format=torch.contiguous_format)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def from_host(x: Tensor, device: str) -> Tensor:
    """Return a value that `to_host` has stored, on a device of a type."""
    return x.to(device, non_blocking=True) if device == "cuda" else x.clone()


for _copies in (to_host, from_host):
    vars(_copies)["owns"] = True  # see fx_nodes.allocates


def pad_rows(x: Tensor, dim: int, rows: int, fill: float = 0.0) -> Tensor:
    """Return x with rows added at a dimension's end, `rows` in all."""
    if x.shape[dim] == rows:
        return x
    if not x.numel():  # torch 2.9 pads no empty tensor
        return x.new_full([*x.shape[:dim], rows, *x.shape[dim + 1 :]], fill)
    pads = [0, 0] * (x.dim() - 1 - dim) + [0, rows - x.shape[dim]]
    if x.dtype == torch.float8_e8m0fnu:  # has no zero
        return F.pad(x.view(torch.uint8), pads).view(x.dtype)
    return F.pad(x, pads, value=fill)


def cut_shard(x: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Return shard number `index` without its padding; the dimension has `size` rows."""
    rows = x.shape[dim]
    return x.narrow(dim, 0, min(max(size - index * rows, 0), rows)).contiguous()


def take_window(x: Tensor, dim: int, index: int, text: str, shard_rows: int = 0) -> Tensor:
    """Return the rows in a device's window on a replicated dimension.

    shard_rows: a shard's rows, if only a run knows them.
    """
    size = x.shape[dim]
    window = Window.parse(text).in_run(shard_rows, size)
    pieces = [
        (place, x.narrow(dim, row, rows)) for _, row, place, rows in window.pieces(index, size, 1)
    ]
    return join_pieces(pieces, window.length, window.fill or 0.0, dim, x)


def join_pieces(
    pieces: list[tuple[int, Tensor]], length: int, fill: float, dim: int, like: Tensor
) -> Tensor:
    """Build a window of `length` rows from (first row, piece) pairs in order, and a fill value."""
    shape, segments, row = list(like.shape), [], 0
    fill = as_dtype(fill, like.dtype)
    for place, piece in [*pieces, (length, None)]:
        if place > row:
            segments.append(like.new_full([*shape[:dim], place - row, *shape[dim + 1 :]], fill))
        if piece is not None:
            segments.append(piece)
            row = place + piece.shape[dim]
    return torch.cat(segments, dim)


def assemble_window(
    x: Tensor,
    moved: Tensor | None,
    own: Sequence[tuple[int, int, int]],
    came: Sequence[tuple[int, int]],
    dim: int,
    length: int,
    fill: float,
) -> Tensor:
    """Return a window: rows of x, rows that have come from others, and `fill` in the gaps.

    own: (place in the window, row of x, number of rows). came: (place, number of rows).
    """
    pieces = [(place, x.narrow(dim, row, rows)) for place, row, rows in own]
    if moved is not None and came:
        count = x.numel() // x.shape[dim]
        parts = moved.split([rows * count for _, rows in came])
        pieces += [
            (place, part.view(*x.shape[:dim], rows, *x.shape[dim + 1 :]))
            for (place, rows), part in zip(came, parts)
        ]
    ordered = sorted(pieces, key=lambda piece: (piece[0], piece[1].shape[dim]))
    return join_pieces(ordered, length, fill, dim, x)


vars(assemble_window)["owns"] = True  # see fx_nodes.allocates


Rows = Tensor | list["Rows"]  # the rows in a stack, or in a stack of stacks


def stack_rows(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.stack([stack_rows(x) for x in rows])


def copy_rows(rows: Rows) -> Rows:
    """Return rows in their own memory."""
    return rows.clone() if isinstance(rows, Tensor) else [copy_rows(x) for x in rows]


def add_rows(total: Rows, rows: Rows) -> None:
    """Add rows to a total, in place."""
    if isinstance(total, Tensor):
        total.add_(rows)  # pyright: ignore
        return
    for x, y in zip(total, rows):
        add_rows(x, y)


def only_first(x: Tensor, index: int) -> Tensor:
    """Return x on the device with index 0, zeros on the others."""
    return x if index == 0 else torch.zeros_like(x)


def mask_padding(x: Tensor, dim: int, index: int, size: int, fill: float) -> Tensor:
    """Return x with `fill` in the rows past row `size`, a dimension's global end.

    x is shard number `index`. Padding is selected away, not multiplied: it may be NaN.
    """
    rows = x.shape[dim]
    inside = torch.arange(rows, device=x.device) + index * rows < size
    return torch.where(inside.view([-1] + [1] * (x.dim() - 1 - dim)), x, as_dtype(fill, x.dtype))


for _rows in (take_part, pad_rows, mask_padding):
    vars(_rows)["along"] = 1  # the argument that says which dimension's rows it changes


def in_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return x with its dimensions in an order in memory, outermost first, and not contiguous.

    A kernel that asks whether x is contiguous is to find the answer that the trace has found.
    """
    dims = [d for d in order if x.shape[d] > 1]
    if any(x.stride(d) < x.stride(e) * x.shape[e] for d, e in zip(dims, dims[1:])):
        back = [list(order).index(d) for d in range(x.dim())]
        x = x.permute(*order).contiguous().permute(back)
    # With fewer dimensions there is one order only.
    if len(dims) < 2 or not x.is_contiguous():
        return x
    # Dimensions of which a device has one row hide the order: a gap behind each row shows it.
    last = max(dims)
    shape = [2 * n if d == last else n for d, n in enumerate(x.shape)]
    return x.new_empty(shape).narrow(last, 0, x.shape[last]).copy_(x)


def as_ordered(x: Tensor, order: Sequence[int] | None) -> Tensor:
    """Return x in an order in memory; None: contiguous."""
    return x.contiguous() if order is None else in_order(x, order)


def as_dtype(fill: float, dtype: torch.dtype) -> float | int | bool:
    """Return a fill value as a number in the dtype; integers get their extreme for infinity."""
    if dtype == torch.bool:  # torch.where on bools and an int number gives int
        return fill > 0
    if dtype.is_floating_point or dtype.is_complex or not math.isinf(fill):
        return fill if dtype.is_floating_point or dtype.is_complex else int(fill)
    return torch.iinfo(dtype).max if fill > 0 else torch.iinfo(dtype).min


def part_order(x: Tensor, spec: ShardSpec, mesh: Mesh) -> Tensor:
    """Return a tensor whose equal blocks of rows are the shards.

    Eight rows as `2*model` on two devices: 0, 1, 4, 5, 2, 3, 6, 7.
    """
    for d, count in _parts(spec):
        shards = mesh.count(spec.dims[d])
        x = x.unflatten(d, (count, shards, -1)).transpose(d, d + 1).flatten(d, d + 2)
    return x


def _parts(spec: ShardSpec) -> Iterator[tuple[int, int]]:
    """Yield the dimensions in several parts; only one part may have uneven shards."""
    return ((d, count) for d, count in enumerate(spec.parts) if count > 1)


def user_order(x: Tensor, spec: ShardSpec, mesh: Mesh) -> Tensor:
    """Return a tensor with its rows in the user's order: the inverse of part_order."""
    for d, count in _parts(spec):
        shards = mesh.count(spec.dims[d])
        x = x.unflatten(d, (shards, count, -1)).transpose(d, d + 1).flatten(d, d + 2)
    return x
