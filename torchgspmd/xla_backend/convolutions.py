"""Layouts for convolution operands, in which XLA's partitioner computes them right.

A weight's gradient is summed over all devices if a spatial dimension is sharded, also over those
that have the same parts. On a mesh `time=4,model=2` a convolution sharded along time alone has a
gradient twice too large. So the axes that no spatial dimension has shard the batch, and no two
devices have the same parts.

A convolution whose output channels, windows and batch (or other windows) are sharded at once gets
rows from wrong devices in its windows. So its weight is whole, and XLA takes the part that a device
needs.

before   %w = convolution_backward(%grad, %x, ...)    grad, x: _ _ time _
after    %g = annotate(%grad, 'time=4,model=2', 'model _ time _'), x alike
"""

from __future__ import annotations

from torch import fx

from ..compat.operators import aten
from ..layout.mesh import Mesh
from ..shard_spec import Axes, ShardSpec


def operand_specs(node: fx.Node, mesh: Mesh) -> dict[fx.Node, ShardSpec]:
    """Return the layouts to annotate on an operation's operands, for this operation alone."""
    if node.target is aten.convolution_backward.default:
        grad, x = node.args[:2]
        spec = _of_weight_gradient(_spec(grad), _spec(x), node.args[9], mesh)
        return {} if spec is None else {grad: spec, x: spec}
    if node.target is aten.convolution.default and _is_sharded_thrice(node, mesh):
        return {node.args[1]: ShardSpec.replicated(_spec(node.args[1]).rank)}
    return {}


def _of_weight_gradient(grad: ShardSpec, x: ShardSpec, groups: int, mesh: Mesh) -> ShardSpec | None:
    """Return one layout for both operands; None if no spatial dimension is sharded."""
    # Sub-axes as axes of their own, so that "taken" is exact.
    fine = mesh.divided(grad.sharding_axes + x.sharding_axes)
    grads, xs = (spec.map_axes(fine.refine).dims for spec in (grad, x))
    taken: set[str] = set()
    spatial = [_untaken(a or b, taken) for a, b in zip(grads[2:], xs[2:])]
    if fine.count(taken) == 1:
        return None
    in_groups = grads[1] == xs[1] and groups % fine.count(xs[1]) == 0
    channels = _untaken(xs[1] if in_groups else (), taken)
    rest = tuple(name for name, size in fine.axes if size > 1)
    batch = _untaken(xs[0] + grads[0] + rest, taken)
    return ShardSpec((batch, channels, *spatial)).map_axes(fine.merge)


def _untaken(axes: Axes, taken: set[str]) -> Axes:
    """Return the axes that no other dimension has taken, and take them."""
    free = tuple(dict.fromkeys(a for a in axes if a not in taken))
    taken.update(free)
    return free


def _is_sharded_thrice(node: fx.Node, mesh: Mesh) -> bool:
    """Return whether output channels, windows and a further dimension may all be sharded."""
    x, w, y = (_spec(each) for each in (*node.args[:2], node))
    window = node.args[1].meta["val"].shape[2:]
    rows = [size > 1 for n, size in enumerate(window) if _shards(mesh, x, y, n + 2) > 1]
    outer = max(mesh.count(w.dims[1 if node.args[6] else 0]), mesh.count(y.dims[1]))
    # A window of one row needs no neighbours, so it does not count.
    return outer > 1 and any(rows) and len(rows) + (_shards(mesh, x, y, 0) > 1) > 1


def _shards(mesh: Mesh, x: ShardSpec, y: ShardSpec, dim: int) -> int:
    return max(mesh.count(spec.dims[dim]) for spec in (x, y))


def _spec(node: fx.Node) -> ShardSpec:
    return node.meta["spec"].plain().closed()
