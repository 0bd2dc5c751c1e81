"""Windows that are spread over the positions of the result.

Transposed convolutions and the gradients of pooling have them. A device computes all positions that
its window touches, then takes its own out of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compat.operators import aten
from ..local_builder import LocalBuilder


@dataclass(frozen=True)
class Cut:
    """The device's own positions, among those that its window touches.

    They begin at `start`. The operation already leaves out `spare` positions at both ends. If the
    stride exceeds the kernel, `front` and `back` zeros are added: positions that no row touches.
    """

    start: Any
    length: int
    spare: int
    front: int
    back: int

    def apply(self, local: LocalBuilder, y: Any, dim: int) -> Any:
        """Return the device's positions of y along a dimension."""
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
    """Return the Cut for the window of an operand's dimension.

    span: distance of the first and last element of the kernel. crop: whether the operation can
    leave out `spare` positions.
    """
    factor = local.rule.operands[operand][dim][0]
    window, length = local.window(operand, dim), local.size(factor)

    def start(device: Any) -> Any:
        return device * length + padding - window.first(device) * stride

    starts = {start(device) for device in range(stride)}  # they repeat after `stride` devices
    end = (window.length - 1) * stride + span + 1
    front, back = max(0, -min(starts)), max(0, max(starts) + length - end)
    spare = min(min(starts), end - max(starts) - length) if crop and not front and not back else 0
    own_start = start(local.index(factor)) if len(starts) > 1 else starts.pop()
    return Cut(own_start + (front - spare), length, spare, front, back)
