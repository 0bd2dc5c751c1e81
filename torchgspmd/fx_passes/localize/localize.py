"""From global sizes to the program of one device.

before   %y : f32[8@data, 10] = reshape(%x, [8, 10])             on a mesh with data=2
after    y = reshape(x, [4, 10])
needs    partitioned graph: rule and assignment on every operation, spec on every value
ensures  the text is the same on every rank: a device's mesh coordinates are inputs, the first ones
         of the program

The padding past a dimension's end has unspecified content. It is overwritten where an operation
reduces over it. Nowhere else does it matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...comm.collective import split_axes
from ...comm.local_ops import mask_padding
from ...compat.fx_nodes import copy_node, origin_of
from ...compat.operators import aten
from ...layout.halo_window import Window
from ...layout.mesh import Mesh, sub_axis
from ...rules import FactorRule, Shapes
from ...rules.custom_ops.loops import LOOP_MARKS
from ...rules.local_builder import LocalBuilder, LocalTensor
from ...shard_spec import Axes
from ..ir import is_number, is_operation, operands_of, tensors_of, unknown_sizes
from ..partition.verify_partition import check_open_sizes
from .infer_shapes import infer_shapes
from .sizes_in_a_run import check_sizes, with_sizes


def localize(graph: fx.Graph, mesh: Mesh) -> fx.Graph:
    """Return the graph of one device.

    Its inputs are a coordinate (int) for every mesh axis, then the shards of the inputs.
    """
    check_open_sizes(graph)
    return _Localizer(graph, mesh).run()


class Emitter:
    """Builder of the local nodes of one operation, the first argument of a local form's `emit`."""

    def __init__(self, localizer: _Localizer, node: fx.Node) -> None:
        self.localizer, self.node = localizer, node
        self.rule: FactorRule = node.meta["rule"]
        self.assignment: Mapping[str, Axes] = node.meta["assignment"]
        self.results: Sequence[LocalTensor] = [
            LocalTensor(
                spec.local_shape(t.shape, localizer.mesh),
                node.meta.get("computed", t.dtype),
                t.device,
            )
            for t, spec in zip(tensors_of(node), node.meta["result_specs"])
        ]

    def size(self, factor: str) -> int:
        """Return the length of a device's shard of a factor."""
        return -(
            -self.rule.sizes.get(factor, 1)
            // self.localizer.mesh.count(self.assignment.get(factor, ()))
        )

    def index(self, factor: str) -> fx.Proxy | int:
        """Return the number of the device's shard of a factor."""
        axes = self.assignment.get(factor, ())
        return fx.Proxy(self.localizer.index(axes)) if axes else 0

    def start(self, factor: str) -> fx.Proxy | int:
        """Return the global position of the first row of the device's shard of a factor."""
        return self.index(factor) * self.size(factor)

    def first_row(self, operand: int, dim: int) -> fx.Proxy | int:
        """Return the first row of an operand's dimension that the device holds, halo included."""
        factor = self.rule.operands[operand][dim][:1]
        if not factor or not self.sharded(*factor):
            return 0
        return self.window(operand, dim).first(self.index(*factor))

    def global_shape(self, operand: int) -> tuple[int, ...]:
        """Return the global shape of an operand."""
        return tuple(operands_of(self.node)[operand].meta["val"].shape)

    def position(self, dim: int) -> fx.Node:
        """Return the global index of each local row along `dim`, shaped to broadcast."""
        spec, result = self.node.meta["result_specs"][0], self.results[0]
        rows = result.shape[dim]
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
        """Return the rows of an operand's dimension that a device's share of its factor reads."""
        factor = self.rule.operands[operand][dim][0]
        size = operands_of(self.node)[operand].meta["val"].shape[dim]
        return self.rule.halo[operand, dim].bind(
            self.rule.sizes[factor],
            size,
            self.localizer.mesh.count(self.assignment.get(factor, ())),
        )

    def narrow(self, value: Any, dim: int, start: Any, length: int) -> Any:
        """Return a contiguous slice of `length` rows along `dim`."""
        return self.call(
            aten.contiguous.default, self.call(aten.narrow.default, value, dim, start, length)
        )

    def masked(self, value: Any, dim: int, factor: str, fill: float) -> Any:
        """Return the value with `fill` in the padding of `dim`, which is the factor's."""
        axes, size = self.assignment.get(factor, ()), self.rule.sizes.get(factor, 1)
        if size % self.localizer.mesh.count(axes) == 0:
            return value
        return self.call(mask_padding, value, dim, self.index(factor), size, fill)

    def scalar(self, value: Any, dtype: torch.dtype | None = None) -> fx.Node:
        """Return a tensor of one number, by default of the result's dtype."""
        result = self.results[0]
        return self.call(
            aten.scalar_tensor.default, value, dtype=dtype or result.dtype, device=result.device
        )

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return the local shape of a node or proxy."""
        return self.localizer.shapes[value.node if isinstance(value, fx.Proxy) else value]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call to the local graph; its shape is that of its first tensor argument."""
        args, kwargs = fx.node.map_aggregate(
            (args, kwargs), lambda a: a.node if isinstance(a, fx.Proxy) else a
        )
        result = self.localizer.graph.call_function(op, args, kwargs)
        result.meta = self.localizer.local_meta(self.node)
        first = next(
            (a for a in args if isinstance(a, fx.Node) and a in self.localizer.shapes), None
        )
        self.localizer.shapes[result] = (
            self.results[0].shape if first is None else self.localizer.shapes[first]
        )
        return result


class _Localizer:
    """Builder of the local graph: `new` maps each global node to its local node or results."""

    def __init__(self, graph: fx.Graph, mesh: Mesh) -> None:
        self.source, self.mesh, self.graph = graph, mesh, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.indices: dict[Axes, fx.Node] = {}
        self.masked: dict[tuple, fx.Node] = {}
        self.top: fx.Node | None = None

    def run(self) -> fx.Graph:
        self.coordinates = {
            name: self.graph.placeholder(f"coordinate_{name}") for name in self.mesh.names
        }
        for node in self.source.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.new.__getitem__))
                continue
            if node.op in ("placeholder", "get_attr") or is_number(node) and not is_operation(node):
                local = copy_node(self.graph, node, self.new.get)
            elif node.target is operator.getitem:
                local = self.new[node.args[0]]
                local = (
                    local[node.args[1]]
                    if isinstance(local, list)
                    else copy_node(self.graph, node, self.new.__getitem__)
                )
            elif node.target in LOOP_MARKS:
                local = copy_node(self.graph, node, self.new.__getitem__)
            elif "step" in node.meta:
                local = node.target.localize(
                    StepEmitter(self, node), self.new[node.args[0]], *node.args[1:]
                )
            elif "mark" in node.meta:
                local = self.new[operands_of(node)[0]]
            else:
                local = self._operation(node)
            self.new[node] = local
            if isinstance(local, fx.Node) and "mark" not in node.meta:
                local.meta = self.local_meta(node)
                if "spec" in node.meta:
                    self.shapes[local] = node.meta["spec"].local_shape(
                        node.meta["val"].shape, self.mesh
                    )
                    local.meta |= {"shape": self.shapes[local], "spec": node.meta["spec"]}
            if "computed" in node.meta:
                self.new[node] = self._cast(local, node)
        infer_shapes(self.graph)
        return self.graph

    def _cast(self, local: fx.Node, node: fx.Node) -> fx.Node:
        """Return a value in its dtype, from the one that its operation computes."""
        dtype = node.meta["val"].dtype
        cast = self.graph.call_function(aten._to_copy.default, (local,), {"dtype": dtype})
        cast.meta = {**local.meta, "dtype": dtype}
        local.meta["dtype"], self.shapes[cast] = node.meta["computed"], self.shapes[local]
        return cast

    def local_meta(self, node: fx.Node) -> dict[str, Any]:
        """Return the metadata of a local node, taken from the global one."""
        val = node.meta.get("val")
        ring = {"ring": True} if node.meta.get("ring") else {}
        return {
            **ring,
            "source": None,
            "backward": False,
            **origin_of(node),
            "dtype": val.dtype if isinstance(val, torch.Tensor) else None,
            "step": node.meta.get("step"),
            "dynamic": node.meta.get("dynamic", False),
            "unknown": self._other_local_shape(node),
        }

    def _other_local_shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return the local shape with the other numbers for sizes that only a run knows."""
        if "spec" not in node.meta or "other" not in node.meta:
            return None
        return node.meta["spec"].local_shape(node.meta["other"].shape, self.mesh)

    def index(self, axes: Axes) -> fx.Node:
        """Return the node of the device's position along `axes`, computed once after the inputs."""
        if axes not in self.indices:
            node = self._axis_index(axes[0])
            for axis in axes[1:]:
                node = self._at_top(operator.mul, node, self.mesh.count((axis,)))
                node = self._at_top(operator.add, node, self._axis_index(axis))
            self.indices[axes] = node
        return self.indices[axes]

    def _axis_index(self, axis: str) -> fx.Node:
        """Return the node of the device's coordinate on an axis, or on a part of a split axis."""
        if axis in self.coordinates:
            return self.coordinates[axis]
        sub = sub_axis(axis)
        assert sub is not None, axis
        whole, before, size = sub
        node = self._at_top(
            operator.floordiv, self.coordinates[whole], self.mesh.count((whole,)) // (before * size)
        )
        return self._at_top(operator.mod, node, size)

    def _at_top(self, op: Any, a: fx.Node, b: Any) -> fx.Node:
        """Add arithmetic on coordinates right after the inputs."""
        with self.graph.inserting_after(
            self.top or [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        ):
            self.top = self.graph.call_function(op, (a, b))
        self.top.meta = {"source": None, "backward": False}
        return self.top

    # --------------------------------------------------------------------------------- operations

    def _operation(self, node: fx.Node) -> Any:
        """Localize an operation, by its local form's `emit` or with local arguments."""
        rule: FactorRule = node.meta["rule"]
        operands = [
            self._mask_operand(node, value, i, rule) for i, value in enumerate(operands_of(node))
        ]
        remaining = iter(operands)
        args, kwargs = fx.map_arg(
            (node.args, dict(node.kwargs)),
            lambda n: self.new[n] if is_number(n) else next(remaining),
        )
        moved = rule.moves and any(spec.windows for spec in node.meta["result_specs"])
        if rule.local.emit is not None and (
            moved or any(node.meta["assignment"].get(f) for f in {*rule.local.when, *rule.windowed})
        ):
            builder: LocalBuilder = Emitter(self, node)
            last = next(iter(reversed(self.graph.nodes)))
            result = rule.local.emit(builder, args, kwargs)
            check_sizes(node, last)
            return result
        if rule.local.arguments is not None:
            before = args
            args, kwargs = rule.local.arguments(args, kwargs, self._shapes(node))
            if node.meta.get("dynamic"):
                args = with_sizes(node, args, before, self.new, self.graph)
        return self.graph.call_function(node.target, args, kwargs)

    def _shapes(self, node: fx.Node) -> Shapes:
        return Shapes(
            tuple(
                v.meta["spec"].local_shape(v.meta["val"].shape, self.mesh)
                for v in operands_of(node)
            ),
            tuple(
                s.local_shape(t.shape, self.mesh)
                for s, t in zip(node.meta["result_specs"], tensors_of(node))
            ),
        )

    def _mask_operand(
        self, node: fx.Node, value: fx.Node, operand: int, rule: FactorRule
    ) -> fx.Node:
        """Overwrite the padding of an operand if the operation would reduce it or look it up."""
        local, spec, shape = self.new[value], value.meta["spec"], value.meta["val"].shape
        for d, (factors, axes) in enumerate(zip(rule.operands[operand], spec.dims)):
            fill = next(
                (rule.fill(f) for f in factors if rule.fill(f) is not None),
                rule.local.fill.get(operand),
            )
            if (
                axes
                and (operand, d) not in rule.halo
                and fill is not None
                and shape[d] % self.mesh.count(axes)
            ):
                local = self._mask(local, d, axes, shape[d], fill, node)
        return local

    def _mask(
        self, local: fx.Node, dim: int, axes: Axes, size: int, fill: float, node: fx.Node
    ) -> fx.Node:
        """Overwrite the padding of a value, once for all its readers of one phase."""
        key = (local, dim, axes, fill, node.meta.get("backward", False))
        if key not in self.masked:
            masked = self.graph.call_function(
                mask_padding, (local, dim, self.index(axes), size, fill)
            )
            masked.meta = {
                **local.meta,
                "backward": node.meta.get("backward", False) or local.meta.get("backward", False),
                "step": None,
            }
            self.shapes[masked] = self.shapes[local]
            self.masked[key] = masked
        return self.masked[key]


class StepEmitter:
    """Builder of the local nodes of one step, the first argument of a kind's `localize`."""

    def __init__(self, localizer: _Localizer, node: fx.Node) -> None:
        self.localizer, self.node = localizer, node
        self.shape = tuple(node.meta["val"].shape)

    def sizes(self, x: fx.Node) -> tuple[Any, ...]:
        """Return the global shape, with nodes for sizes that only a run knows."""
        sizes: list[Any] = list(self.shape)
        for d, _ in unknown_sizes(self.node):
            sizes[d] = self.call(aten.sym_size.int, x, d)
        return tuple(sizes)

    def call(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        """Add a call to the local graph."""
        return self.localizer.graph.call_function(op, args)

    def collective(self, *args: Any) -> fx.Node:
        """Add the step itself to the local graph."""
        return self.call(self.node.target, *args)

    def index(self, axes: str) -> fx.Node:
        """Return the node of the device's position along `axes`."""
        return self.localizer.index(split_axes(axes))

    def count(self, axes: str) -> int:
        """Return the number of devices along `axes`."""
        return self.localizer.mesh.count(split_axes(axes))

    def trimmed(self, gathered: fx.Node, dim: int) -> fx.Node:
        """Cut off the padding of a dimension that has been gathered whole."""
        size, spec = self.shape[dim], self.node.meta["spec"]
        count = self.localizer.mesh.count(self.node.args[0].meta["spec"].dims[dim])
        if spec.dims[dim] or size % count == 0:
            return gathered
        padded = list(spec.local_shape(self.shape, self.localizer.mesh))
        padded[dim] = -(-size // count) * count
        gathered.meta = self.localizer.local_meta(self.node) | {"shape": tuple(padded)}
        trimmed = self.call(aten.narrow.default, gathered, dim, 0, size)
        return self.call(aten.contiguous.default, trimmed)
