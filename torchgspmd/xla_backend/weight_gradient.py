"""Layouts of the operands of a convolution's weight gradient, in which XLA computes it right.

XLA's partitioner sums the parts of the weight gradient over all devices if a spatial dimension is
sharded, also over those that have the same parts: on a mesh `time=4,model=2` the gradient of a
convolution sharded along time alone is twice what it should be. So the axes that no spatial
dimension has shard the batch, and no two devices have the same parts.

before   %w = convolution_backward(%grad, %x, ...)    grad, x: _ _ time _
after    %g = annotate(%grad, 'time=4,model=2', 'model _ time _'), x alike
"""

from __future__ import annotations

from torch import fx

from ..compat.operators import aten
from ..mesh import Mesh
from ..shard_spec import Axes, ShardSpec

WEIGHT_GRADIENT = aten.convolution_backward.default


def operand_spec(node: fx.Node, mesh: Mesh) -> ShardSpec | None:
    """Return the layout of both operands of a weight gradient.

    None if no spatial dimension is sharded, and for other operations.
    """
    if node.target is not WEIGHT_GRADIENT:
        return None
    grad, x = (each.meta["spec"].plain().closed() for each in node.args[:2])
    fine = mesh.divided(grad.sharding_axes + x.sharding_axes)
    grad, x = (spec.map_axes(fine.refine).dims for spec in (grad, x))
    taken: set[str] = set()
    spatial = [_untaken(a or b, taken) for a, b in zip(grad[2:], x[2:])]
    if fine.count(taken) == 1:
        return None
    in_groups = grad[1] == x[1] and node.args[9] % fine.count(x[1]) == 0
    channels = _untaken(x[1] if in_groups else (), taken)
    rest = tuple(name for name, size in fine.axes if size > 1)
    batch = _untaken(x[0] + grad[0] + rest, taken)
    return ShardSpec((batch, channels, *spatial)).map_axes(fine.merge)


def _untaken(axes: Axes, taken: set[str]) -> Axes:
    """Return the axes that no other dimension has taken, and take them."""
    free = tuple(dict.fromkeys(a for a in axes if a not in taken))
    taken.update(free)
    return free
