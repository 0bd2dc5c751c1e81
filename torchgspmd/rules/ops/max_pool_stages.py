"""Max pooling one dimension after the other, and its gradient by shifts: what it is taken apart to
where neighbours hold a part of the windows.

The maximum over a window is that over its columns, then over its rows, so that a row which a
neighbour needs is as short as one of the result when it is sent. The first maximum of a window, row
by row, is the first column's in the first row that has it: both find the same one among equals, as
the order of the dimensions is kept.

The maximum of window p is in row s p + a, for one of the kernel's offsets a, so the gradient of row
s q + r is the sum over all a = s m + r of what window q - m gives to a. It is picked where the
window is, and then moved by m rows: no index is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compat.operators import aten


@dataclass(frozen=True)
class Stage:
    """Pooling along one dimension, counted from the last one."""

    dim: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def changes(self) -> bool:
        return (self.kernel, self.stride, self.padding) != (1, 1, 0)

    def pool(self, x: Tensor, spatial: int, ceil_mode: bool) -> tuple[Tensor, Tensor]:
        """Values and where they are, flat in the last `spatial` dimensions of x."""

        def options(value: int, others: int) -> list[int]:
            return [value if d == self.dim else others for d in range(-spatial, 0)]

        function = aten.max_pool3d_with_indices if spatial == 3 else aten.max_pool2d_with_indices
        return function(
            x,
            options(self.kernel, 1),
            options(self.stride, 1),
            options(self.padding, 0),
            options(self.dilation, 1),
            ceil_mode,
        )

    def pool_backward(
        self, grad: Tensor, index: Tensor, shape: Sequence[int], shards: int
    ) -> Tensor:
        """The gradient of x of that shape. grad, index: of the results of pool. It is made for as
        many rows as that many shards divide, so that the phases are put together on every device.
        """
        dim, rows, windows = grad.dim() + self.dim, shape[self.dim], grad.shape[self.dim]
        row = (index // math.prod(shape[dim + 1 :])) % rows
        first = (torch.arange(windows, device=grad.device) * self.stride - self.padding).reshape(
            [-1] + [1] * (-1 - self.dim)
        )
        size = -(-max(windows, -(-rows // self.stride)) // shards) * shards
        phases: list[dict[int, Tensor]] = [{} for _ in range(self.stride)]
        for tap in range(0, self.kernel * self.dilation, self.dilation):
            move, phase = divmod(tap - self.padding, self.stride)
            phases[phase][move] = _padded(
                torch.where(row - first == tap, grad, 0), dim, 0, size - windows
            )
        nothing = grad.new_zeros([*grad.shape[:dim], size, *grad.shape[dim + 1 :]])
        found = [_sum_of_moved(terms, dim) if terms else nothing for terms in phases]
        return (
            found[0] if self.stride == 1 else torch.stack(found, dim + 1).flatten(dim, dim + 1)
        ).narrow(dim, 0, rows)


def _padded(x: Tensor, dim: int, before: int, behind: int) -> Tensor:
    return (
        aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [before, behind])
        if before or behind
        else x
    )


def _sum_of_moved(terms: Mapping[int, Tensor], dim: int) -> Tensor:
    """Of all terms, each moved by its number of rows. Those moved in one direction go together, as
    far as they do.
    """
    sums = [terms[0]] if 0 in terms else []
    for moves in (
        sorted((m for m in terms if m > 0), reverse=True),
        sorted(m for m in terms if m < 0),
    ):
        total = None
        for move, following in zip(moves, [*moves[1:], 0]):
            total = terms[move] if total is None else total + terms[move]
            total = _padded(total, dim, move - following, following - move)
        sums += [total] if total is not None else []
    return sum(sums[1:], sums[0])


def stages(
    spatial: int,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> list[Stage]:
    """From the last dimension on; at least one."""
    options = [
        list(v) * (spatial if len(v) == 1 else 1)
        for v in (kernel, stride or kernel, padding, dilation)
    ]
    found = [Stage(dim, *(v[dim] for v in options)) for dim in range(-1, -spatial - 1, -1)]
    return [stage for stage in found if stage.changes] or found[-1:]


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Values, and where they are in what the last stage pools: that is what max_pool_backward
    takes.
    """
    index = None
    for stage in stages(len(kernel), kernel, stride, padding, dilation):
        x, index = stage.pool(x, len(kernel), ceil_mode)
    return x, index


def max_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    index: Tensor,
    *,
    shards: int = 1,
) -> Tensor:
    """The gradient of x. index: as max_pool gives it; those of the stages before the last are found
    again. shards: see Stage.
    """
    todo, done = stages(len(kernel), kernel, stride, padding, dilation), []
    for stage in todo[:-1]:
        pooled, found = stage.pool(x, len(kernel), ceil_mode)
        done.append((found, x.shape))
        x = pooled
    for stage, (found, shape) in zip(reversed(todo), reversed([*done, (index, x.shape)])):
        grad = stage.pool_backward(grad, found, shape, shards)
    return grad
