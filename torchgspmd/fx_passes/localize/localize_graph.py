"""From global sizes to one device's program.

before   %y : f32[8@data, 10] = reshape(%x, [8, 10])             on a mesh with data=2
after    y = reshape(x, [4, 10])
needs    partitioned graph: rule and assignment on every operation, spec on every value
ensures  the text is the same on every rank: a device's mesh coordinates are inputs, the first ones
         in the program

The padding past a dimension's end has unspecified content. It is overwritten where an operation
reduces over it. Nowhere else does it matter.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...comm.local_ops import mask_padding
from ...compat.fx_nodes import copy_node, origin_of
from ...compat.operators import aten
from ...layout.mesh import Mesh, sub_axis
from ...layout.open_sizes import OpenSize
from ...rules import FactorRule, Shapes
from ...rules.custom_ops.loops import LOOP_MARKS, SIZED_MARKS
from ...shard_spec import Axes, ShardSpec
from ..ir import is_number, is_operation, operands_of, other_shapes, planned_shape, tensors_of
from ..partition.verify_partition import check_open_sizes
from ..program import Program
from .infer_shapes import infer_shapes, is_packed_result, restored
from .op_emitter import emit
from .sizes_in_a_run import LocalSizes, RunSizes, local_shape, needs_number
from .step_emitter import StepEmitter

_NO_SIZES: Mapping[str, int] = {}


def localize_program(p: Program) -> fx.Graph:
    """Return one device's graph; the partitioned one stays with the program."""
    p.sharded = p.graph
    return localize_graph(p.graph, p.mesh, p.stand_ins)


def localize_graph(
    graph: fx.Graph, mesh: Mesh, stand_ins: Mapping[str, int] = _NO_SIZES
) -> fx.Graph:
    """Return one device's graph.

    Its inputs are a coordinate (int) for every mesh axis, argument sizes (int) that its shards
    depend on, then the input shards. stand_ins: the numbers in place of these sizes.
    """
    check_open_sizes(graph)
    return _Localizer(graph, mesh, stand_ins).run()


class _Localizer:
    """Builder for the local graph: `new` maps each global node to its local node or results."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, stand_ins: Mapping[str, int]) -> None:
        self.source, self.mesh, self.graph = graph, mesh, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.indices: dict[Axes, fx.Node] = {}
        self.masked: dict[tuple, fx.Node] = {}
        self.top: fx.Node | None = None
        self.sizes = RunSizes(self.graph, mesh, stand_ins, self.add_at_top)

    def run(self) -> fx.Graph:
        self.coordinates = {
            # Coordinates are inputs, not numbers, so that all ranks have one text and may compare
            # it.
            name: self.graph.placeholder(f"coordinate_{name}")
            for name in self.mesh.names
        }
        for node in self.source.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.new.__getitem__))
                # After the graph, as conversions at the boundary need sizes that no operation has
                # read.
                self._take_sizes(node)
                continue
            if (size := self._size_of_shards(node)) is not None:
                self.new[node] = size
                continue
            # Numbers are the same on all devices: they need no layout.
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
                if node.target in SIZED_MARKS and (sizes := self.sizes.all()):
                    local.args = (*local.args, sizes)
            elif "step" in node.meta:
                local = node.target.localize(
                    StepEmitter(self, node), self.new[node.args[0]], *node.args[1:]
                )
            elif "mark" in node.meta:
                # The partitioner has turned a mark into steps: here it is the identity.
                local = self.new[operands_of(node)[0]]
            else:
                local = self._operation(node)
            self.new[node] = local
            if isinstance(local, fx.Node) and "mark" not in node.meta:
                local.meta = self.local_meta(node)
                if is_packed_result(local):
                    local.meta["lies"] = None
                if "order" in node.meta and local.target is node.target:
                    local.meta["order"] = node.meta["order"]
                if "spec" in node.meta:
                    spec = node.meta["spec"]
                    (self.shapes[local],) = self._local_shapes(node, [spec])
                    shape = tuple(map(int, self.shapes[local]))
                    local.meta |= {"shape": shape, "spec": spec}
            # The operation computes in another dtype (reduce_dtype) than its users expect.
            if "computed" in node.meta:
                self.new[node] = self._cast(local, node)
        infer_shapes(self.graph)
        return self.graph

    def _cast(self, local: fx.Node, node: fx.Node) -> fx.Node:
        """Return a value in its dtype, cast from the one that its operation computes."""
        dtype = node.meta["val"].dtype
        cast = self.graph.call_function(aten._to_copy.default, (local,), {"dtype": dtype})
        cast.meta = {**local.meta, "dtype": dtype}
        cast.meta.pop("lies", None)
        local.meta["dtype"], self.shapes[cast] = node.meta["computed"], self.shapes[local]
        return cast

    def local_meta(self, node: fx.Node) -> dict[str, Any]:
        """Return a local node's metadata, taken from the global one."""
        val = node.meta.get("val")
        ring = {"ring": node.meta["ring"]} if "ring" in node.meta else {}
        denoted = node
        while "step" in denoted.meta and "captured" not in denoted.meta:
            denoted = denoted.args[0]  # the same value in another layout
        return {
            **ring,
            **{key: denoted.meta[key] for key in ("captured",) if key in denoted.meta},
            "source": None,
            "backward": False,
            **origin_of(node),
            "dtype": val.dtype if isinstance(val, torch.Tensor) else None,
            "step": node.meta.get("step"),
            "dynamic": node.meta.get("dynamic", False),
            "unknown": self._other_local_shape(node),
            "value": node.name,
        }

    def _other_local_shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return the local shape with the other numbers for sizes that only a run knows."""
        if "spec" not in node.meta or "other" not in node.meta:
            return None
        return node.meta["spec"].local_shape(node.meta["other"].shape, self.mesh)

    def _take_sizes(self, output: fx.Node) -> None:
        """Add the sizes that convert input and output shards to the program."""
        nodes = [*self.source.find_nodes(op="placeholder"), *output.all_input_nodes]
        for node in (n for n in nodes if "other" in n.meta and "spec" in n.meta):
            for size, axes in zip(planned_shape(node), node.meta["spec"].dims):
                if axes and isinstance(size, OpenSize):
                    self.sizes.take(int(size), size.other)

    def _size_of_shards(self, node: fx.Node) -> fx.Node | None:
        """Return the number that a node reads from a tensor, if shards lack it."""
        if not is_number(node) or not any(v.meta["spec"].sharding_axes for v in operands_of(node)):
            return None
        return self.sizes.whole(node.meta["val"], node.meta.get("other", node.meta["val"]))

    def rows(self, size: OpenSize, axes: Axes, node: fx.Node) -> fx.Node:
        """Return a shard's rows along `axes`, for a size known in a run; () for all rows."""
        rows = self.sizes.shard(int(size), size.other, axes)
        if rows is None:
            raise needs_number(node.name, node.meta.get("source"))
        return rows

    def index(self, axes: Axes) -> fx.Node:
        """Return the node with the device's position along `axes`, computed once at the top."""
        # At the top of the graph, so that every later operation may read it.
        if axes not in self.indices:
            node = self._axis_index(axes[0])
            for axis in axes[1:]:
                node = self.add_at_top(operator.mul, node, self.mesh.count((axis,)))
                node = self.add_at_top(operator.add, node, self._axis_index(axis))
            self.indices[axes] = node
        return self.indices[axes]

    def _axis_index(self, axis: str) -> fx.Node:
        """Return the node with the device's coordinate on an axis, or on a part of a split axis."""
        if axis in self.coordinates:
            return self.coordinates[axis]
        sub = sub_axis(axis)
        assert sub is not None, axis
        whole, before, size = sub
        node = self.add_at_top(
            operator.floordiv, self.coordinates[whole], self.mesh.count((whole,)) // (before * size)
        )
        return self.add_at_top(operator.mod, node, size)

    def add_at_top(self, op: Any, a: fx.Node, b: Any) -> fx.Node:
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
        # In the order of operands_of, in which map_arg meets the arguments, too.
        remaining = iter(operands)
        args, kwargs = fx.map_arg(
            (node.args, dict(node.kwargs)),
            lambda n: self.new[n] if is_number(n) else next(remaining),
        )
        # Rows that were moved before lie in windows, so the call itself has other arguments.
        moved = rule.moves and any(spec.windows for spec in node.meta["result_specs"])
        if rule.local.emit is not None and (
            rule.local.always
            or moved
            or any(node.meta["assignment"].get(f) for f in {*rule.local.when, *rule.windowed})
        ):
            return emit(self, node, args, kwargs)
        if rule.local.arguments is not None:
            before = args
            args, kwargs = rule.local.arguments(args, kwargs, self._shapes(node))
            if node.meta.get("dynamic"):
                sizes = LocalSizes(node, self.new, self.sizes, self.mesh)
                args = sizes.arguments(args, before, self.graph)
        args, kwargs = self._in_memory_order(node, args, kwargs)
        return self.graph.call_function(node.target, args, kwargs)

    def _in_memory_order(self, node: fx.Node, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return a call's arguments in the order in memory that they had in the trace."""
        if (orders := node.meta.get("order")) is None:
            return args, kwargs

        def add(op: Any, x: fx.Node, *rest: object) -> fx.Node:
            made = self.graph.call_function(op, (x, *rest))
            made.meta = {**x.meta, "backward": node.meta.get("backward", False), "step": None}
            self.shapes[made] = self.shapes[x]
            return made

        return restored(node.target, args, kwargs, orders, add)

    def _shapes(self, node: fx.Node) -> Shapes:
        return Shapes(
            tuple(self._local_shapes(v, [v.meta["spec"]])[0] for v in operands_of(node)),
            self._local_shapes(node, node.meta["result_specs"]),
        )

    def _local_shapes(
        self, node: fx.Node, specs: Sequence[ShardSpec]
    ) -> tuple[tuple[int, ...], ...]:
        each = zip(tensors_of(node), other_shapes(node), specs)
        return tuple(local_shape(*tensor, self.mesh) for tensor in each)

    def _mask_operand(
        self, node: fx.Node, value: fx.Node, operand: int, rule: FactorRule
    ) -> fx.Node:
        """Overwrite an operand's padding if the operation would reduce it or look it up."""
        local, spec, shape = self.new[value], value.meta["spec"], planned_shape(value)
        for d, (factors, axes) in enumerate(zip(rule.operands[operand], spec.dims)):
            fill = next(
                (rule.fill(f) for f in factors if rule.fill(f) is not None),
                rule.local.fill.get(operand),
            )
            if axes and (operand, d) not in rule.halo and fill is not None:
                if isinstance(size := shape[d], OpenSize):
                    local = self._mask(local, d, axes, self.rows(size, (), node), fill, node)
                # Where the devices divide the size there is no padding.
                elif size % self.mesh.count(axes):
                    local = self._mask(local, d, axes, size, fill, node)
        return local

    def _mask(
        self, local: fx.Node, dim: int, axes: Axes, size: object, fill: float, node: fx.Node
    ) -> fx.Node:
        """Overwrite a value's padding, once for all its readers in one phase."""
        # The phase is in the key: a mask of the forward would be saved for the backward.
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
            masked.meta.pop("lies", None)
            self.shapes[masked] = self.shapes[local]
            self.masked[key] = masked
        return self.masked[key]
