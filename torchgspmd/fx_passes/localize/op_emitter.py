"""An operation's local nodes: the builder passed to a local form's `emit`.

Where a run knows sizes, an operation is emitted twice, with both numbers in their places. Only
sizes differ, and a device's program reads their numbers; any other difference is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ...comm.local_ops import mask_padding
from ...compat.operators import aten
from ...compat.private_apis import _pytree as pytree
from ...layout.halo_window import Window
from ...layout.open_sizes import OpenSize
from ...rules import FactorRule, rule_of
from ...rules.local_builder import LocalTensor
from ...rules.registry import declares_order
from ...shard_spec import Axes
from ..ir import call_of, operands_of, other_shapes, planned_shape, tensors_of
from .infer_shapes import restored
from .sizes_in_a_run import LocalSizes, local_shape, needs_number
from .step_emitter import StepLocalizer


class Localizer(StepLocalizer, Protocol):
    """Builder for the whole program: localize._Localizer."""

    new: dict[fx.Node, Any]
    shapes: dict[fx.Node, tuple[int, ...]]


def emit(localizer: Localizer, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    """Add the local nodes for an operation whose rule has an `emit`; return its results."""
    rule: FactorRule = node.meta["rule"]
    assert rule.local.emit is not None, "another local form"
    if not node.meta.get("dynamic"):
        return rule.local.emit(Emitter(localizer, node), args, kwargs)
    sizes = LocalSizes(node, localizer.new, localizer.sizes, localizer.mesh)
    end, results = _last(localizer.graph), list[Any]()
    call = call_of(node).other
    other = rule if call is None else rule_of(call)
    try:
        # Both emissions into one graph: the second sees the same operands, and is erased after
        # merging.
        results.append(rule.local.emit(Emitter(localizer, node), args, kwargs))
        middle = _last(localizer.graph)
        if other.local.emit is not None:
            other.local.emit(OtherEmitter(localizer, node, other), args, kwargs)
    except (TypeError, ValueError) as error:  # it compares or divides a size of the run
        raise needs_number(node.name, node.meta.get("source")) from error
    _merge([*_nodes(end, middle)], [*_nodes(middle, None)], sizes)
    return results[0]


def _last(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def _nodes(after: fx.Node, last: fx.Node | None) -> Iterator[fx.Node]:
    """Yield the nodes after one, up to a last one."""
    while after is not last and after.next.op != "root":
        after = after.next
        yield after


def _merge(one: Sequence[fx.Node], two: Sequence[fx.Node], sizes: LocalSizes) -> None:
    """Replace the numbers in which two emissions differ by nodes, and erase the second."""
    same = dict(zip(two, one))
    if [n.target for n in one] != [n.target for n in two]:
        raise needs_number(sizes.node.name, sizes.node.meta.get("source"))

    for node, other in zip(one, two):

        def merged(a: Any, b: Any, node: fx.Node = node) -> Any:
            if a is same.get(b, b) or type(a) is type(b) and a == b:
                return a
            if isinstance(a, int) and isinstance(b, int):
                with node.graph.inserting_before(node):
                    if (size := sizes.node_of(a, node.graph, True)) is not None:
                        return size
            raise needs_number(sizes.node.name, sizes.node.meta.get("source"))

        leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
        others = pytree.tree_leaves((other.args, other.kwargs))
        if len(leaves) != len(others):
            raise needs_number(sizes.node.name, sizes.node.meta.get("source"))
        node.args, node.kwargs = pytree.tree_unflatten([*map(merged, leaves, others)], tree)
    # Backwards: a node can be erased only when it has no users left.
    for node in reversed(two):
        node.graph.erase_node(node)


class Emitter:
    """Builder for one operation's local nodes, the first argument to a local form's `emit`."""

    def __init__(self, localizer: Localizer, node: fx.Node) -> None:
        self.localizer, self.node = localizer, node
        self.target = node.target
        self.operands = tuple(n.meta["val"] for n in operands_of(node))
        self.rule: FactorRule = node.meta["rule"]
        self.sizes = self.rule.sizes
        self.assignment: Mapping[str, Axes] = node.meta["assignment"]
        whole = node.meta["val"]
        self.places = (
            [i for i, each in enumerate(whole) if isinstance(each, Tensor)]
            if isinstance(whole, (tuple, list))
            else None
        )
        self.results: Sequence[LocalTensor] = [
            LocalTensor(
                local_shape(t, other, spec, localizer.mesh),
                node.meta.get("computed", t.dtype),
                t.device,
            )
            for t, other, spec in zip(
                tensors_of(node), other_shapes(node), node.meta["result_specs"]
            )
        ]

    def size(self, factor: str) -> Any:
        """Return how long a device's shard along a factor is."""
        size, axes = self.sizes.get(factor, 1), self.assignment.get(factor, ())
        if isinstance(size, OpenSize):
            return self.rows(size, axes)
        return -(-size // self.localizer.mesh.count(axes))

    def known_size(self, factor: str) -> int | None:
        """Return a factor's global size; None if only a run knows it."""
        size = self.sizes.get(factor, 1)  # the same for both emissions
        return None if isinstance(size, OpenSize) else size

    def rows(self, size: OpenSize, axes: Axes) -> Any:
        """Return a shard's rows, for a size known in a run; its stand-in if values decide it."""
        if axes:
            return fx.Proxy(self.localizer.rows(size, axes, self.node))
        node = self.localizer.sizes.whole(int(size), size.other)
        return self.stand_in(size) if node is None else fx.Proxy(node)

    def stand_in(self, size: OpenSize) -> int:
        """Return the number in place of a size that depends on values."""
        return int(size)

    def index(self, factor: str) -> fx.Proxy | int:
        """Return the index of the device's shard along a factor."""
        axes = self.assignment.get(factor, ())
        return fx.Proxy(self.localizer.index(axes)) if axes else 0

    def start(self, factor: str) -> fx.Proxy | int:
        """Return the global position where the device's shard along a factor begins."""
        return self.index(factor) * self.size(factor)

    def first_row(self, operand: int, dim: int) -> fx.Proxy | int:
        """Return the first row that the device holds in an operand's dimension, halo included."""
        factor = self.rule.operands[operand][dim][:1]
        if not factor or not self.sharded(*factor):
            return 0
        return self.window(operand, dim).first(self.index(*factor))

    def global_shape(self, operand: int) -> tuple[Any, ...]:
        """Return an operand's global shape, with values in the program for sizes known in a run."""
        sizes = self.localizer.sizes
        return tuple(
            int(n)
            if not isinstance(n, OpenSize) or (node := sizes.whole(int(n), n.other)) is None
            else fx.Proxy(node)
            for n in planned_shape(operands_of(self.node)[operand])
        )

    def position(self, dim: int) -> fx.Node:
        """Return each local row's global index along `dim`, shaped to broadcast."""
        spec, result = self.node.meta["result_specs"][0], self.results[0]
        size, rows = planned_shape(self.node)[dim], result.shape[dim]
        if spec.dims[dim] and isinstance(size, OpenSize):
            rows = fx.Proxy(self.localizer.rows(size, spec.dims[dim], self.node))
        index = fx.Proxy(self.localizer.index(spec.dims[dim])) if spec.dims[dim] else 0
        window = spec.window(dim)
        indices = self.call(aten.arange.default, rows, device=result.device)
        first = window.first(index) if window else index * rows
        indices = self.call(aten.add.Scalar, indices, first)
        return self.call(aten.view.default, indices, [-1] + [1] * (len(result.shape) - 1 - dim))

    def sharded(self, factor: str) -> bool:
        """Return True if any axis shards a factor."""
        return bool(self.assignment.get(factor))

    def window(self, operand: int, dim: int) -> Window:
        """Return the rows in an operand's dimension that a device's share of its factor reads."""
        factor = self.rule.operands[operand][dim][0]
        size = operands_of(self.node)[operand].meta["val"].shape[dim]
        return self.rule.halo[operand, dim].bind(
            self.rule.sizes[factor],
            size,
            self.localizer.mesh.count(self.assignment.get(factor, ())),
        )

    def narrow(self, value: object, dim: int, start: object, length: int) -> Any:
        """Return a contiguous slice: `length` rows along `dim`."""
        # Contiguous: native_layer_norm_backward gives wrong gradients on other strides.
        return self.call(
            aten.contiguous.default, self.call(aten.narrow.default, value, dim, start, length)
        )

    def masked(self, value: object, dim: int, factor: str, fill: float) -> Any:
        """Return the value with `fill` in the padding along `dim`, which has the factor."""
        axes, size = self.assignment.get(factor, ()), self.sizes.get(factor, 1)
        if axes and isinstance(size, OpenSize):
            size = self.localizer.rows(size, (), self.node)
        elif size % self.localizer.mesh.count(axes) == 0:
            return value
        return self.call(mask_padding, value, dim, self.index(factor), size, fill)

    def scalar(self, value: object, dtype: torch.dtype | None = None) -> fx.Node:
        """Return a one-number tensor, by default in the result's dtype."""
        result = self.results[0]
        return self.call(
            aten.scalar_tensor.default, value, dtype=dtype or result.dtype, device=result.device
        )

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return a node's or proxy's local shape."""
        return self.shape_of(value.node if isinstance(value, fx.Proxy) else value) or ()

    def shape_of(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return a node's local shape; None for a number."""
        return self.localizer.shapes.get(node)

    def limit(self, index: fx.Node, rows: int) -> None:
        index.meta["limit"] = rows

    def note(self, node: fx.Node, shape: tuple[int, ...]) -> None:
        self.localizer.shapes[node] = shape

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call to the local graph; its shape is its first tensor argument's."""
        args, kwargs = fx.node.map_aggregate(
            (args, kwargs), lambda a: a.node if isinstance(a, fx.Proxy) else a
        )
        if declares_order(op):
            orders = self.node.meta.get("order", {}) if op is self.node.target else {}
            args, kwargs = restored(op, args, kwargs, orders, self.call)
        result = self.localizer.graph.call_function(op, args, kwargs)
        result.meta = self.localizer.local_meta(self.node)
        shapes = (self.shape_of(a) for a in args if isinstance(a, fx.Node))
        self.note(result, next((s for s in shapes if s is not None), self.results[0].shape))
        return result


class OtherEmitter(Emitter):
    """The same with the second numbers in place of sizes known in a run."""

    def __init__(self, localizer: Localizer, node: fx.Node, rule: FactorRule) -> None:
        super().__init__(localizer, node)
        self.rule, self.own = rule, dict[fx.Node, tuple[int, ...]]()
        self.results = [
            LocalTensor(spec.local_shape(shape, localizer.mesh), t.dtype, t.device)
            for t, shape, spec in zip(self.results, other_shapes(node), node.meta["result_specs"])
        ]

    def stand_in(self, size: OpenSize) -> int:
        return size.other

    def shape_of(self, node: fx.Node) -> tuple[int, ...] | None:
        if node in self.own or node not in self.localizer.shapes:
            return self.own.get(node)
        return tuple(node.meta.get("unknown") or self.localizer.shapes[node])

    def note(self, node: fx.Node, shape: tuple[int, ...]) -> None:
        self.own[node] = shape
