"""Max pooling by one dimension after the other, and its gradient by shifts.

    max_pool2d(x, [3, 3])       max_pool2d(max_pool2d(x, [1, 3]), [3, 1])

This decomposition applies where windows reach over shards. Columns are pooled first, so that the
halo's rows are as short as the result's. Ties do not matter: a window's first maximum is in the
first row that has it, and there in the first column.

Window p has its maximum in row s p + a, for some kernel offset a. Row s q + r receives
gradients from the windows q - m, for all a = s m + r. The device that has the window selects the
gradient and then moves it by m rows. No index is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compat.operators import aten


@dataclass(frozen=True)
class PoolStage:
    """Pooling along one dimension, which is negative: -1 is the last one."""

    dim: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def changes(self) -> bool:
        return (self.kernel, self.stride, self.padding) != (1, 1, 0)

    def pool(self, x: Tensor, spatial: int, ceil_mode: bool) -> tuple[Tensor, Tensor]:
        """Return the maxima, and their flat positions in the last `spatial` dimensions of x."""

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
        """Return the gradient for x, with this shape. grad, index: for `pool`'s results.

        It is computed for a multiple of `shards` rows, so that each device interleaves its phases.
        """
        dim, rows, windows = grad.dim() + self.dim, shape[self.dim], grad.shape[self.dim]
        # From the flat position to the row along this dimension.
        row = (index // math.prod(shape[dim + 1 :])) % rows
        first = (torch.arange(windows, device=grad.device) * self.stride - self.padding).reshape(
            [-1] + [1] * (-1 - self.dim)
        )
        size = -(-max(windows, -(-rows // self.stride)) // shards) * shards
        phases: list[dict[int, Tensor]] = [{} for _ in range(self.stride)]
        for tap in range(0, self.kernel * self.dilation, self.dilation):
            # Offset a = s m + r: the phase r, and the move by m rows.
            # Floored, so that a tap in the padding moves backwards.
            move, phase = divmod(tap - self.padding, self.stride)
            phases[phase][move] = _pad(
                torch.where(row - first == tap, grad, 0), dim, 0, size - windows
            )
        zeros = grad.new_zeros([*grad.shape[:dim], size, *grad.shape[dim + 1 :]])
        rows_of_phases = [_sum_of_shifted(terms, dim) if terms else zeros for terms in phases]
        return (
            rows_of_phases[0]
            if self.stride == 1
            else torch.stack(rows_of_phases, dim + 1).flatten(dim, dim + 1)
        ).narrow(dim, 0, rows)


def _pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return (
        aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [before, after])
        if before or after
        else x
    )


def _sum_of_shifted(terms: Mapping[int, Tensor], dim: int) -> Tensor:
    """Sum all terms, each shifted by its number of rows.

    Terms with one direction are shifted together as far as possible.
    """
    sums = [terms[0]] if 0 in terms else []
    # From the farthest term on, so that each shift takes all sums so far along.
    for moves in (
        sorted((m for m in terms if m > 0), reverse=True),
        sorted(m for m in terms if m < 0),
    ):
        total = None
        for move, following in zip(moves, [*moves[1:], 0]):
            total = terms[move] if total is None else total + terms[move]
            total = _pad(total, dim, move - following, following - move)
        sums += [total] if total is not None else []
    return sum(sums[1:], sums[0])


def stages(
    spatial: int,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> list[PoolStage]:
    """Return a pooling's stages, from the last dimension on; at least one."""
    options = [
        list(v) * (spatial if len(v) == 1 else 1)
        for v in (kernel, stride or kernel, padding, dilation)
    ]
    all_stages = [PoolStage(dim, *(v[dim] for v in options)) for dim in range(-1, -spatial - 1, -1)]
    return [stage for stage in all_stages if stage.changes] or all_stages[-1:]


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the maxima, and their positions in the last stage's input."""
    index = x  # replaced: there is at least one stage
    for stage in stages(len(kernel), kernel, stride, padding, dilation):
        x, index = stage.pool(x, len(kernel), ceil_mode)
    assert index is not None
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
    """Return the gradient for x. index: from `max_pool`. shards: see PoolStage.pool_backward.

    The indices in stages before the last are computed again.
    """
    forward, saved = stages(len(kernel), kernel, stride, padding, dilation), []
    for stage in forward[:-1]:
        pooled, position = stage.pool(x, len(kernel), ceil_mode)
        saved.append((position, x.shape))
        x = pooled
    # The caller has the last stage's index.
    saved.append((index, x.shape))
    for stage, (position, shape) in zip(reversed(forward), reversed(saved)):
        grad = stage.pool_backward(grad, position, shape, shards)
    return grad
