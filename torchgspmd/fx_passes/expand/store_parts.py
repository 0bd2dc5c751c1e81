"""Store a weight by parts that are each sharded, if its product is cut into these parts.

before   %w : f32[192@model, 64] = input                          # queries, keys and values
         %y : f32[8, 192@model]  = einsum(bm,km->bk, %x, %w)      %q, %k, %v = split(%y, 64, 1)
after    %w : f32[3*64@model, 64] = input
         %u : f32[3, 64@model, 64] = .. views of %w;  its reshape to [192, 64] replaces %w
         %q, %k, %v = unbind(reshape(%y, [8, 3, 64]), 1)          # keep_dims removes the reshapes
needs    a propagated graph, rules
source   ours. By hand, Megatron-LM stores such a weight by heads, and converts its checkpoints.

A device's rows of the weight are its rows of each part, one part after the other. The program sees
them as equal blocks of rows, in the order of shards; views put them into the user's order. None
of these views moves data. Gradients go the same way back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import fx

from ...capture import ARGUMENT, BUFFER, GRADIENT, MUTATION, PARAMETER, Captured
from ...compat.fx_nodes import add_node, origin_of
from ...compat.operators import aten
from ...dtensor.parts import IS_EXACT
from ...fx_passes.ir import ops_around
from ...layout.mesh import Mesh
from ...rules.ops import concat_slice
from ...shard_spec import ShardSpec
from ..ir import Op, Rules, tensors_of
from ..program import Program
from ..propagate.layouts import Layouts
from ..replication_report import data_axes
from .keep_dims import is_view, keeps

Place = tuple[fx.Node, int]  # a value's dimension


class PartStorage:
    """Finds the weights of a graph that are to be stored by parts, and rewrites the graph."""

    def __init__(self, graph: fx.Graph, layouts: Layouts, rules: Rules, captured: Captured) -> None:
        self.graph, self.layouts, self.captured = graph, layouts, captured
        self.mesh: Mesh = layouts.mesh
        self.around = ops_around(rules.ops(graph))

    def wanted(
        self, node: fx.Node, spec: ShardSpec, of_batch: Collection[str]
    ) -> tuple[int, int] | None:
        """Return (dimension, parts) for a weight whose product is cut into parts; else None."""
        for d, axes in enumerate(spec.dims):
            if len(axes) == 1 and axes[0] not in of_batch and (shards := self.mesh.count(axes)) > 1:
                counts = {*self._cuts((node, d))}
                if len(counts) == 1 and (count := counts.pop()) > 1:
                    if node.meta["val"].shape[d] % (count * shards) == 0:
                        return d, count
        return None

    def _cuts(self, start: Place) -> Iterator[int]:
        """Yield into how many parts the forward cuts a dimension; 0 where it is used otherwise."""
        todo, seen = [start], {start}
        while todo:
            value, dim = todo.pop()
            for op in self.around.get(value, ()):
                if value not in op.operands or op.node.meta.get("backward"):
                    continue
                if (count := self._cut(op, dim)) is not None:
                    yield count if self._is_sharded(value, dim, start) else 0
                    continue
                after = {*self._after(op, value, dim)}
                if not after or is_view(op) and not self._is_sharded(value, dim, start):
                    yield 0
                todo += after - seen
                seen |= after

    def _cut(self, op: Op, dim: int) -> int | None:
        """Return the number of parts into which an operation cuts its operand's dimension."""
        if len(op.operands) != 1:
            return None
        cut = concat_slice.equal_parts(
            op.node.target,
            op.node.args,
            op.rule,
            op.operands[0].meta["val"].shape,
            [tuple(t.shape) for t in tensors_of(op.node)],
        )
        return cut[1] if cut is not None and cut[0] == dim else None

    def _is_sharded(self, value: fx.Node, dim: int, start: Place) -> bool:
        """Return whether layouts shard a value that is cut as the weight is.

        Elsewhere the weight is gathered: its axis divides the batch. A dimension behind a reshape,
        such as 3 in [8, 3, 64], has the layout of the whole one.
        """
        axes = self.layouts.spec[start[0]].dims[start[1]]
        size, whole = value.meta["val"].shape[dim], start[0].meta["val"].shape[start[1]]
        return size < whole or self.layouts.spec[value].dims[dim] == axes

    def _after(self, op: Op, value: fx.Node, dim: int) -> Iterator[Place]:
        """Yield the results' dimensions that have a dimension's rows, or their major part's."""
        for operand, dims in zip(op.operands, op.rule.operands):
            if operand is not value or not dims[dim]:
                continue
            major, *minor = dims[dim]
            if minor and not is_view(op) or not minor and not keeps(op, major):
                continue
            for result, others in zip(op.results, op.rule.results):
                if result is not None:
                    yield from ((result, e) for e, names in enumerate(others) if names == (major,))

    def store(self, parts: Mapping[fx.Node, tuple[int, int]]) -> None:
        """Rewrite the graph for weights that are stored by parts: (dimension, count) for each."""
        placeholders = self.graph.find_nodes(op="placeholder")
        outputs = self.graph.output_node()
        values = list(outputs.args[0])  # type: ignore[arg-type]
        of_weight = {
            i: (weight, *parts[weight])
            for i, out in enumerate(self.captured.outputs)
            if out.kind in (GRADIENT, MUTATION)
            and isinstance(values[i], fx.Node)
            and (weight := placeholders[out.input]) in parts
        }
        starts = {(node, dim): count for node, (dim, count) in parts.items()}
        starts |= {(values[i], dim): count for i, (_, dim, count) in of_weight.items()}
        self._keep_apart(starts)
        # The rewrites may have replaced an output.
        values = list(outputs.args[0])  # type: ignore[arg-type]
        for i, (weight, dim, count) in of_weight.items():
            values[i] = self._by_shards(values[i], dim, count, self._shards(weight, dim))
        outputs.args = (tuple(values),)
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        for node, (dim, count) in parts.items():
            users = [*node.users]
            with self.graph.inserting_before(first):
                whole = self._by_parts(node, dim, count, self._shards(node, dim))
            for user in users:
                user.replace_input_with(node, whole)
            node.meta["parts"] = dim, count

    def _shards(self, weight: fx.Node, dim: int) -> int:
        return self.mesh.count(self.layouts.spec[weight].dims[dim])

    def _by_parts(self, x: fx.Node, dim: int, count: int, shards: int) -> fx.Node:
        """Return a value whose rows are in the order of shards with these in the user's order."""
        shape = [*x.meta["val"].shape]
        head, rows, tail = shape[:dim], shape[dim], shape[dim + 1 :]
        each = rows // count
        apart = self._reshape(x, [*head, shards, count, each // shards, *tail])
        x = self._call(aten.transpose.int, apart, dim, dim + 1)
        # In two steps: after the first one each part is a dimension that the axis shards.
        return self._reshape(self._reshape(x, [*head, count, each, *tail]), shape)

    def _by_shards(self, x: fx.Node, dim: int, count: int, shards: int) -> fx.Node:
        """Return a value whose rows are in the user's order with these in the order of shards."""
        shape = [*x.meta["val"].shape]
        head, rows, tail = shape[:dim], shape[dim], shape[dim + 1 :]
        each = rows // count
        with self.graph.inserting_before(self.graph.output_node()):
            x = self._reshape(x, [*head, count, each, *tail])
            x = self._reshape(x, [*head, count, shards, each // shards, *tail])
            return self._reshape(self._call(aten.transpose.int, x, dim, dim + 1), shape)

    def _reshape(self, x: fx.Node, shape: list[int]) -> fx.Node:
        return self._call(aten.reshape.default, x, shape)

    def _call(self, target: object, x: fx.Node, *args: object) -> fx.Node:
        node = add_node(self.graph, "call_function", target, (x, *args), {})
        node.meta = {**origin_of(x), "val": target(x.meta["val"], *args)}  # type: ignore[operator]
        return node

    def _keep_apart(self, starts: Mapping[Place, int]) -> None:
        """Cut values along a dimension with the parts, and join gradients along such a one."""
        done: set[fx.Node] = set()
        for (value, dim), count in self.places(starts).items():
            shape = [*value.meta["val"].shape]
            apart = [*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]]
            for op in self.around.get(value, ()):
                if op.node in done:
                    continue
                if value in op.operands and self._cut(op, dim) == count:
                    self._unbind(op, dim, apart)
                    done.add(op.node)
                elif op.results == (value,) and self._is_join(op, dim, count):
                    self._stack(op, dim, shape)
                    done.add(op.node)
                elif op.results == (value,) and (start := self._placed(op, dim, count)) is not None:
                    self._select_backward(op, dim, apart, start)
                    done.add(op.node)

    def _unbind(self, op: Op, dim: int, apart: list[int]) -> None:
        """Replace an operation that takes equal parts of a value."""
        (x,), node, width = op.operands, op.node, apart[dim + 1]
        with self.graph.inserting_before(node):
            x = self._reshape(x, apart)
            if isinstance(node.meta["val"], (tuple, list)):
                new = self._call(aten.unbind.int, x, dim)
            else:
                taken = concat_slice.parts_taken(
                    node.target,
                    node.args,
                    op.rule,
                    op.operands[0].meta["val"].shape,
                    [tuple(node.meta["val"].shape)],
                )
                new = self._call(aten.select.int, x, dim, taken[0][1] // width)
        self._replace(node, new)

    def _is_join(self, op: Op, dim: int, count: int) -> bool:
        """Return whether an operation concatenates equal parts along a dimension."""
        shapes = [v.meta["val"].shape for v in op.operands]
        if len(shapes) != count or len({*shapes}) != 1:
            return False
        joined = concat_slice.parts_joined(op.rule, shapes, op.node.meta["val"].shape)
        return joined is not None and joined[0] == dim

    def _stack(self, op: Op, dim: int, shape: list[int]) -> None:
        """Replace a concatenation of equal parts."""
        values = [v.meta["val"] for v in op.operands]
        with self.graph.inserting_before(op.node):
            x = add_node(self.graph, "call_function", aten.stack.default, (op.operands, dim), {})
            x.meta = {**origin_of(op.node), "val": aten.stack.default(values, dim)}
            new = self._reshape(x, shape)
        self._replace(op.node, new)

    def _placed(self, op: Op, dim: int, count: int) -> int | None:
        """Return where an operation puts one of equal parts among zeros."""
        if len(op.operands) != 1:
            return None
        part = op.operands[0].meta["val"].shape
        placed = concat_slice.part_placed(op.node.target, op.node.args, part)
        if placed is None or placed[0] != dim:
            return None
        whole = part[dim] * count == op.node.meta["val"].shape[dim]
        return placed[1] if whole and placed[1] % part[dim] == 0 else None

    def _select_backward(self, op: Op, dim: int, apart: list[int], start: int) -> None:
        """Replace an operation that puts a part among zeros."""
        shape = [*op.node.meta["val"].shape]
        with self.graph.inserting_before(op.node):
            index = start // apart[dim + 1]
            x = self._call(aten.select_backward.default, op.operands[0], apart, dim, index)
            new = self._reshape(x, shape)
        self._replace(op.node, new)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        new.meta = {**old.meta, "val": new.meta["val"]}
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def places(self, starts: Mapping[Place, int]) -> dict[Place, int]:
        """Return all dimensions, in forward and backward, that have the rows of weights.

        With each the number of parts.
        """
        seen = dict(starts)
        todo = [*starts]
        while todo:
            value, dim = place = todo.pop()
            for op in self.around.get(value, ()):
                names = {dims[dim] for v, dims in op.tensors if v is value}
                kept = {each for each in names if len(each) == 1 and keeps(op, each[0])}
                for v, dims in op.tensors:
                    for e, each in enumerate(dims):
                        if each in kept and (v, e) not in seen:
                            seen[v, e] = seen[place]
                            todo.append((v, e))
        return seen


def store_parts(p: Program) -> fx.Graph | None:
    """Rewrite the graph in place for weights that are stored by parts; None if it has none.

    Weights over axes that divide arguments are gathered, and stay as they are.
    """
    placeholders, captured, bound = p.placeholders, p.captured, p.request.bound
    if any("parts" in node.meta for node in placeholders):
        return None
    of_batch = data_axes(captured, p.request.arguments) | p.request.stored_over
    storage, parts = PartStorage(p.graph, p.layouts, p.rules, captured), {}
    # Arguments may be such weights in another program.
    given = iter(p.request.arguments)
    for node, inp, spec in zip(placeholders, captured.inputs, p.inputs):
        stored = next(given, None) if inp.kind == ARGUMENT else p.request.stored.get(inp.name)
        if stored is not None and stored.parts:
            parts[node] = next((d, n) for d, n in enumerate(stored.parts) if n > 1)
        elif inp.kind == PARAMETER and spec is not None and IS_EXACT and inp.name not in bound:
            if (found := storage.wanted(node, spec, of_batch)) is not None:
                parts[node] = found
    # An optimizer's states, in a program that updates weights, are stored as these are.
    places = storage.places({(node, dim): count for node, (dim, count) in parts.items()})
    for node, inp, spec in zip(placeholders, captured.inputs, p.inputs):
        if inp.kind in (PARAMETER, BUFFER) and node not in parts and inp.name not in bound:
            at = [(d, n) for (value, d), n in places.items() if value is node]
            if len(at) == 1 and spec in {s for n, s in zip(placeholders, p.inputs) if n in parts}:
                parts[node] = at[0]
    storage.store(parts)
    return p.graph if parts else None
