"""visualize: which device holds which part of a tensor, as text or HTML."""

from __future__ import annotations

import colorsys
import html
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...dtensor.storage import spec_of
from ...errors import ShardingError
from ...layout.layout_rules import mesh_of
from ...layout.mark import recorded_mark
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec, SpecLike

Rows = tuple[int, int]  # the first row in a dimension, and the one behind the last


@dataclass(frozen=True)
class Picture:
    """Which devices hold which block in a tensor. It prints, and notebooks draw it.

    Args:
        mesh: The devices.
        spec: The layout.
        shape: The whole tensor's shape.

    Example:
        >>> print(visualize("data model", Mesh(data=2, model=2), (4, 6)))
        [data model] of [4, 6] on data=2 model=2
                 [:, 0:3]  [:, 3:6]
        [0:2, :]        0         1
        [2:4, :]        2         3
    """

    mesh: Mesh
    spec: ShardSpec
    shape: tuple[int, ...]

    @property
    def holders(self) -> dict[tuple[Rows, ...], list[int]]:
        """Return each block's devices, by its rows in every dimension."""
        blocks: dict[tuple[Rows, ...], list[int]] = defaultdict(list)
        local = self.spec.local_shape(self.shape, self.mesh)
        for rank in range(self.mesh.size):
            coordinates = self.mesh.coordinates(rank)
            starts = [
                min(self.mesh.index(axes, coordinates) * rows, size)
                for axes, rows, size in zip(self.spec.dims, local, self.shape)
            ]
            block = tuple(
                (start, min(start + rows, size))
                for start, rows, size in zip(starts, local, self.shape)
            )
            blocks[block].append(rank)
        return dict(blocks)

    def _lines(self) -> Iterator[list[tuple[str, int | None]]]:
        """Yield the table's lines: (text, the block's number, if it is one)."""
        divided = [d for d, axes in enumerate(self.spec.dims) if axes]
        # The last divided dimension goes across, as a matrix's columns do.
        down, across = divided[:-1], divided[-1:] if len(divided) > 1 else []
        # A single divided dimension goes down: one block a line.
        down = divided if not across else down
        holders = self.holders
        columns = sorted({tuple(block[d] for d in across) for block in holders})
        rows = sorted({tuple(block[d] for d in down) for block in holders})
        if across:
            yield [("", None), *((self._slice(across, column), None) for column in columns)]
        numbers = itertools.count()
        for row in rows:
            line: list[tuple[str, int | None]] = [(self._slice(down, row), None)]
            for column in columns:
                devices = self._devices(holders, dict(zip((*down, *across), (*row, *column))))
                line.append((devices, next(numbers)))
            yield line

    def _devices(self, holders: dict[tuple[Rows, ...], list[int]], rows: dict[int, Rows]) -> str:
        ranks = next(
            ranks for block, ranks in holders.items() if all(block[d] == r for d, r in rows.items())
        )
        if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
            return f"{ranks[0]} to {ranks[-1]}"
        # Thousands of devices may hold a block that is replicated.
        return " ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")

    def _slice(self, dims: Sequence[int], rows: tuple[Rows, ...]) -> str:
        """Return a block as an index: [0:2, :]."""
        places = dict(zip(dims, rows))
        words = [
            f"{places[d][0]}:{places[d][1]}" if d in places else ":" for d in range(len(self.shape))
        ]
        return f"[{', '.join(words)}]"

    @property
    def title(self) -> str:
        """Return the layout, the shape and the mesh."""
        axes = " ".join(f"{name}={size}" for name, size in self.mesh.axes)
        return f"[{self.spec}] of {list(self.shape)} on {axes}"

    def __str__(self) -> str:
        return self._text(color=False)

    def __repr__(self) -> str:
        return self._text(color=sys.stdout.isatty())

    def _text(self, color: bool) -> str:
        lines, shown = list(self._lines()), [self.title]
        widths = [max(len(line[i][0]) for line in lines) for i in range(len(lines[-1]))]
        for line in lines:
            cells = []
            for i, ((text, block), width) in enumerate(zip(line, widths)):
                cell = text.rjust(width) if i else text.ljust(width)
                if color and block is not None:
                    cell = "\x1b[48;2;{};{};{}m\x1b[30m{}\x1b[0m".format(*_rgb(block), cell)
                cells.append(cell)
            shown.append("  ".join(cells).rstrip())
        return "\n".join(shown)

    def _repr_html_(self) -> str:
        cells = [
            "".join(
                "<td style='padding: 4px 12px; text-align: center; background: "
                f"{'none' if block is None else f'rgb{_rgb(block)}'}'>{html.escape(text)}</td>"
                for text, block in line
            )
            for line in self._lines()
        ]
        rows = "".join(f"<tr>{cell}</tr>" for cell in cells)
        return f"<div>{html.escape(self.title)}</div><table>{rows}</table>"


def _rgb(block: int) -> tuple[int, int, int]:
    """Return a light color that differs from the next blocks' colors."""
    # Steps by the golden ratio keep the hues of neighboring blocks apart.
    return tuple(round(255 * c) for c in colorsys.hls_to_rgb(block * 0.618 % 1, 0.8, 0.65))  # type: ignore[return-value]


def visualize(
    tensor: Tensor | SpecLike,
    mesh: Mesh | DeviceMesh | None = None,
    shape: Sequence[int] | None = None,
) -> Picture:
    """Show which devices hold which block in a tensor.

    Args:
        tensor: A DTensor, such as a parameter in a wrapped module; a tensor with a mark; a layout.
        mesh: The devices, if `tensor` is a layout.
        shape: The whole tensor's shape, if `tensor` is a layout.

    Returns:
        A picture, which prints with colors in a terminal, and is a table in a notebook.

    Raises:
        ShardingError: The tensor has no layout, or the layout does not fit the shape.

    Example:
        >>> layer = torch.nn.Linear(6, 4)
        >>> _ = mark_sharding(layer.weight, Mesh(data=2, model=2), "model _")
        >>> print(visualize(layer.weight))
        [model _] of [4, 6] on data=2 model=2
        [0:2, :]  0 2
        [2:4, :]  1 3
    """
    if isinstance(tensor, DTensor):
        devices = Mesh.from_device_mesh(tensor.device_mesh)
        return Picture(devices, spec_of(tensor, devices), tuple(tensor.shape))
    if isinstance(tensor, Tensor):
        mark = recorded_mark(tensor)
        if mark is None:
            raise ShardingError.here(
                f"a tensor of shape {list(tensor.shape)} has no layout",
                fix="mark it, or pass a layout, a mesh and a shape",
            )
        return Picture(mark[0], mark[1].closed(), tuple(tensor.shape))
    if mesh is None or shape is None:
        raise ShardingError.here(
            "a layout alone does not say who holds what",
            fix='call visualize("data _", mesh, (8, 4))',
        )
    devices = mesh_of(mesh)
    spec = ShardSpec.parse(tensor).closed().check(devices, shape)
    return Picture(devices, spec, tuple(shape))
