"""What a device does with a window whose rows are spread over the positions of the result:
transposed convolutions, and the gradients of pooling. It computes all positions that the window
touches, then takes its own out of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compat.operators import aten
from ..local_builder import LocalBuilder


@dataclass(frozen=True)
class Cut:
    """What a device takes of the positions that its window touches: those from `start` on, without
    `spare` at both ends, but with `front` and `back` more that the window does not touch (where the
    stride is larger than the kernel): zeros.
    """

    start: Any
    length: int
    spare: int
    front: int
    back: int

    def of(self, local: LocalBuilder, y: Any, dim: int) -> Any:
        if self.front or self.back:
            y = local.call(
                aten.constant_pad_nd.default,
                y,
                [0, 0] * (len(local.results[0].shape) - 1 - dim) + [self.front, self.back],
            )
        return local.narrow(y, dim, self.start, self.length)


def cut(
    local: LocalBuilder,
    operand: int,
    dim: int,
    stride: int,
    padding: int,
    span: int,
    crop: bool = True,
) -> Cut:
    """For the window of an operand's dimension. span: distance of the first and the last element of
    the kernel; crop: whether `spare` can be left away.
    """
    factor = local.rule.operands[operand][dim][0]
    window, length = local.window(operand, dim), local.size(factor)

    def start(device: Any) -> Any:
        return device * length + padding - window.first(device) * stride

    starts = {start(device) for device in range(stride)}  # they repeat from there on
    end = (window.length - 1) * stride + span + 1
    front, back = max(0, -min(starts)), max(0, max(starts) + length - end)
    spare = min(min(starts), end - max(starts) - length) if crop and not front and not back else 0
    here = start(local.index(factor)) if len(starts) > 1 else starts.pop()
    return Cut(here + (front - spare), length, spare, front, back)
