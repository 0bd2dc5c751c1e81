"""Compute lanes as one region with a dimension that says which of them, sharded over the devices.

before   %y0 = einsum(mk,kn->mn, %x0, %t0)     x0: data _      and so for x1, x2, x3
after    %s = stack([%x0, %x1, %x2, %x3])      _ data _
         %x = mark_sharding(%s, data _ _)      by an all_to_all
         %y = einsum(xmk,xkn->xmn, %x, %t)     data _ _
         %z = mark_sharding(%y, _ data _)      by an all_to_all
         %y0, ... = unbind(%z)
needs    a propagated graph, rules
source   ours. Distributed Shampoo (arXiv 2309.06497) and Muon (arXiv 2502.16982) divide the
         matrices among devices by hand.

A minimum cut chooses which operations around the core are computed with it. Values that cross it
are exchanged, so a cast to bfloat16 stands before the exchange, and a norm behind it. A value whose
views are cast (`q, k, v` of one weight) is cast before it, one that was joined of casts behind it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import add_node, drop_unused, origin_of
from ...compat.operators import aten
from ...fx_passes.expand.batched_op import Traced, add_batched, with_dim
from ...fx_passes.expand.undivided import Cut, Work
from ...fx_passes.ir import Op, add_mark
from ...fx_passes.partition.cost_constants import CostConstants
from ...fx_passes.partition.cost_model import local_bytes
from ...fx_passes.partition.reshard import Resharder
from ...fx_passes.schedule.arithmetic import flops
from ...rules.custom_ops.loops import LOOP_MARKS
from ...shard_spec import Axes, ShardSpec
from .find_lanes import Lanes, find_lanes

_INSIDE, _OUTSIDE = "inside", "outside"
_JOINS = (aten.cat.default, aten.stack.default)  # with views, they compute nothing


class Division(NamedTuple):
    """A way to divide lanes.

    axes: shard the lanes. nodes: the first lane's operations in it. cost: above the present one.
    """

    axes: Axes
    nodes: frozenset[fx.Node]
    cost: float


def batch_lanes(work: Work, constants: CostConstants) -> bool:
    """Rewrite the graph in place; return whether any lanes are computed as one region."""
    batcher = _Batcher(work, constants)
    # Found before any is rewritten: layouts are those of the values that there were.
    return any([batcher.batch(lanes) for lanes in [*find_lanes(work)]])


class _Batcher:
    def __init__(self, work: Work, constants: CostConstants) -> None:
        self.work, self.graph, self.layouts = work, work.graph, work.layouts
        self.mesh, self.constants = work.layouts.mesh, constants
        self.resharder = Resharder(self.mesh, constants)
        # Axes that the user shards something over: others are left alone.
        busy = {axis for spec in self.layouts.spec.values() for axis in spec.sharding_axes}
        self.axes = [a for a in self.mesh.names if a in busy and self.mesh.count((a,)) > 1]
        self.ops = {op.node: op for op in work.ops}
        self.makers = {v: op for op in self.ops.values() for v in op.results if v is not None}
        self.replaced: dict[fx.Node, fx.Node] = {}  # a lane's value -> the batched one's row
        self.done: set[fx.Node] = set()  # operations of lanes that are computed as one

    def batch(self, lanes: Lanes) -> bool:
        if any(op.node in self.done for op in lanes.core):
            return False
        best = min(self._divisions(lanes), key=lambda each: each.cost, default=None)
        if best is None or best.cost >= 0 or self._is_circular(lanes, best):
            return False
        rewriter = _Rewriter(self, lanes, best)
        self.done |= rewriter.inside
        return rewriter.run()

    # ------------------------------------------------------------------------------------- the cost

    def _present(self, op: Op) -> tuple[float, float]:
        """Return the bytes that an operation sends as it is laid out, and a device's FLOPs."""
        sent, count = 0.0, 1
        for axis, factors in self.work.axes_by_factor(op).items():
            shards = self.mesh.count((axis,))
            if len(factors) > 1 or factors <= op.rule.replicated:
                # Each operand that lies along the axis, but for one, is gathered.
                gathers = sorted(
                    self._bytes(v.meta["val"], self.layouts.spec[v]) * (shards - 1)
                    for v in op.operands
                    if axis in self.layouts.spec[v].sharding_axes
                )
                sent += sum(gathers[: max(len(gathers) - 1, 1)])
            elif factors <= {*op.rule.reduce}:
                results = (v for v in op.results if v is not None)
                whole = sum(self._bytes(v.meta["val"], self.layouts.spec[v]) for v in results)
                sent += 2 * whole * (shards - 1) / shards
            count *= 1 if factors <= op.rule.replicated else shards
        return sent, flops(op.node) / count

    def _moved(self, op: Op) -> float:
        """Return the bytes sent before an operation without products, as a cut of sharded rows."""
        places, sent = self.work.axes_by_factor(op), 0.0
        is_done = op.node in self.done  # erased
        for v in () if is_done or flops(op.node) else op.operands:
            spec = self.layouts.spec[v]
            # An axis in no factor shards rows that the operation divides otherwise: a view. Windows
            # are those of rows that are joined.
            for axis in spec.sharding_axes:
                if places.get(axis, set()) <= op.rule.replicated | op.rule.windowed:
                    shards = self.mesh.count((axis,))
                    sent += self._bytes(v.meta["val"], spec) * (shards - 1) / shards
        return sent

    def narrowed(
        self, lanes: Lanes, value: fx.Node, nodes: Collection[fx.Node], entering: bool
    ) -> torch.dtype | None:
        """Return the narrower dtype to which lanes cast a value, or views of it, or from which."""
        dtypes = set[torch.dtype | None]()
        makers = [op] if (op := self.makers.get(value)) and op.node in lanes.rows else []
        ops = [lanes.rows[user][0] for user in value.users if user in lanes.rows]
        for op in ops if entering else makers:
            ends = [v for v in (op.results if entering else op.operands) if v is not None]
            if op.node not in nodes:
                dtypes.add(None)
            elif op.node.target is aten._to_copy.default:
                dtypes.add(ends[0].meta["val"].dtype)
            elif op.node.target in _JOINS or getattr(op.node.target, "is_view", False):
                dtypes |= {self.narrowed(lanes, v, nodes, entering) for v in ends}
            else:
                dtypes.add(None)
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        val = value.meta["val"]
        if dtype is None or not (dtype.is_floating_point and val.is_floating_point()):
            return None
        return dtype if dtype.itemsize < val.itemsize else None

    def _bytes(self, val: Tensor, spec: ShardSpec) -> float:
        return local_bytes(val, spec, self.mesh)

    def _divisions(self, lanes: Lanes) -> Iterator[Division]:
        """Yield the ways to divide lanes: over sets of axes, or all on every device.

        Work is priced as in `arithmetic`, but work that others wait for by the link's speed.
        """
        constants, count = self.constants, lanes.count
        sizes = range(len(self.axes) + 1)
        ways = (itertools.combinations(self.axes, n) for n in sizes)
        for axes in itertools.chain.from_iterable(ways):
            nodes, sent = self._cut(lanes, axes)
            present = [self._present(self.ops[node]) for node in nodes if flops(node)]
            work = sum(flops(node) for node in nodes) * count
            now = sum(each for _, each in present) * count
            even = work / self.mesh.count(axes) if axes else now
            most = work / count * -(-count // self.mesh.count(axes))
            cost = sent - sum(each for each, _ in present) * count
            cost -= sum(self._moved(self.ops[node]) for node in nodes) * count
            cost += (even - now) / constants.flops_per_byte
            yield Division(axes, nodes, cost + (most - even) / constants.link_flops_per_byte)

    def _cut(self, lanes: Lanes, axes: Axes) -> tuple[frozenset[fx.Node], float]:
        """Return the operations to compute by lanes, as many as cost the least, and that cost.

        Edges lead from outside to inside, so that the first side is the fewest outside.
        """
        cut, cost = Cut(), {}
        inside = {op.node for row in lanes.rows.values() for op in row}
        for op in lanes.core:
            cut.tie(_INSIDE, op.node)
        for node, row in lanes.rows.items():
            op = row[0]
            cut.add(_OUTSIDE, node, math.inf if node in self.done else 0.0)
            cut.add(node, _INSIDE, self._moved(op) * lanes.count)
            for value in dict.fromkeys(op.operands):
                maker = self.makers.get(value)
                is_row = (
                    maker is not None and maker.node in lanes.rows and value not in lanes.inputs
                )
                before = maker.node if is_row and maker is not None else _OUTSIDE
                if (value, "in") not in cost:
                    cost[value, "in"] = self._exchange(lanes, value, axes, entering=True)
                    cut.add(before, (value, "in"), cost[value, "in"])
                cut.add((value, "in"), node, math.inf)
            for i, value in enumerate(op.results):
                if value is not None:
                    cost[value, "out"] = self._exchange(lanes, value, axes, entering=False)
                    cut.add((value, "out"), node, cost[value, "out"])
                    likes = [v for each in row if (v := each.results[i]) is not None]
                    if any(user not in inside for like in likes for user in like.users):
                        cut.add(_OUTSIDE, (value, "out"), math.inf)
                    for user in value.users:
                        if user in lanes.rows:
                            cut.add(user, (value, "out"), math.inf)
        outside = cut.first_side(_OUTSIDE, _INSIDE)
        nodes = frozenset(node for node in lanes.rows if node not in outside)
        sent = 0.0
        for (value, way), price in cost.items():
            maker = self.makers.get(value)
            if way == "in" and (value, way) not in outside:
                is_row = maker is not None and value not in lanes.inputs
                sent += price * (not (is_row and maker is not None and maker.node in nodes))
            elif way == "out" and maker is not None and maker.node in nodes:
                sent += price * ((value, way) in outside)
        return nodes, sent

    def _exchange(self, lanes: Lanes, value: fx.Node, axes: Axes, entering: bool) -> float:
        """Return the cost to bring the lanes' values to their devices, or back."""
        val, spec = value.meta["val"], self.layouts.spec[value]
        if value in lanes.shared:
            whole = ShardSpec.replicated(val.dim())
            return self.resharder.cost(tuple(val.shape), val.itemsize, spec, whole)
        there, here = self.stacked(val, spec, axes)
        shape = (lanes.count, *val.shape)
        ends = (here, there) if entering else (there, here)
        copied = lanes.count * self._bytes(val, spec) / self.constants.memory_per_byte
        dtype = self.narrowed(lanes, value, lanes.rows, entering)
        return self.resharder.cost(shape, (dtype or val.dtype).itemsize, *ends) + copied

    def stacked(self, val: Tensor, spec: ShardSpec, axes: Axes) -> tuple[ShardSpec, ShardSpec]:
        """Return a stack's layout by lanes, and the one in which each lane's value is laid out."""
        return ShardSpec((axes, *((),) * val.dim())), ShardSpec(((), *spec.dims))

    def _is_circular(self, lanes: Lanes, division: Division) -> bool:
        """Return whether an input of the region depends on one of its results.

        A loop counts as one operation, which does not move behind the region.
        """
        inside = {op.node for node in division.nodes for op in lanes.rows[node]}
        results = {v for node in inside for v in self.ops[node].results if v is not None}
        inputs = {
            self.replaced.get(v, v)
            for node in inside
            for v in self.ops[node].operands
            if v not in results
        }
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        last = max(map(order.__getitem__, inputs))
        loops = [node for node in order if _is_in_loop(node)]
        stack = [u for v in results for u in v.users if u not in inside]
        seen = {*stack}
        while stack:
            node = stack.pop()
            in_loop = _is_in_loop(node)
            if node in inputs or in_loop and order[node] < last:
                return True
            after = [
                user for user in (*node.users, *(loops if in_loop else ())) if user not in seen
            ]
            loops = [] if in_loop else loops
            seen.update(after)
            stack += after
        return bool(seen & inside)


def _is_in_loop(node: fx.Node) -> bool:
    return "runs" in node.meta or node.target in LOOP_MARKS


class _Rewriter:
    def __init__(self, batcher: _Batcher, lanes: Lanes, division: Division) -> None:
        self.at, self.lanes, self.division = batcher, lanes, division
        self.graph, self.axes = batcher.graph, division.axes
        self.rows = [row for node, row in lanes.rows.items() if node in division.nodes]
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.order = order
        self.rows.sort(key=lambda row: order[row[0].node])
        self.inside = {op.node for row in self.rows for op in row}
        self.traced: Traced = {}
        self.new: dict[fx.Node, tuple[fx.Node, bool]] = {}  # the first lane's value -> the region's

    def run(self) -> bool:
        """Add the region behind its last input, and move the users of its results behind it."""
        inputs = [
            self.at.replaced.get(v, v)
            for row in self.rows
            for op in row
            for v in op.operands
            if (maker := self.at.makers.get(v)) is None or maker.node not in self.inside
        ]
        anchor = max((*inputs, *self._unbatched()), key=self.order.__getitem__)
        # Placeholders stay together at the beginning.
        while anchor.next.op == "placeholder":
            anchor = anchor.next
        behind = anchor.next
        with self.graph.inserting_before(behind):
            for row in self.rows:
                if not self._emit(row[0]):
                    drop_unused(self.graph)
                    return False
            results = [new for row in self.rows for new in self._deliver(row)]
        self._move_users(results, anchor, behind)
        return True

    def _unbatched(self) -> set[fx.Node]:
        """Return the values that the region reads where they are, computed from shared ones."""
        found: set[fx.Node] = set()
        for op, *_ in self.rows:
            if all(v in self.lanes.shared or v in found for v in op.operands):
                found.update(v for v in op.results if v is not None)
        return found

    def _likes(self, value: fx.Node) -> tuple[fx.Node, ...]:
        """Return the values in all lanes that are like one of the first lane."""
        if value in self.lanes.inputs:
            likes: Sequence[fx.Node] = self.lanes.inputs[value]
        else:
            maker = self.at.makers[value]
            i = maker.results.index(value)
            row = self.lanes.rows[maker.node]
            likes = [v for op in row if (v := op.results[i]) is not None]
        return tuple(self.at.replaced.get(v, v) for v in likes)

    def _operand(self, value: fx.Node) -> tuple[fx.Node, bool]:
        """Return a value of the region, and whether it has the lanes' dimension."""
        if value not in self.new:
            if value in self.lanes.shared:
                self.new[value] = self.at.replaced.get(value, value), False
            else:
                self.new[value] = self._stack(value), True
        return self.new[value]

    def _stack(self, value: fx.Node) -> fx.Node:
        likes, val = self._likes(value), value.meta["val"]
        meta, dtype = origin_of(value), self._narrowed(value, True)
        if dtype is not None:
            likes = [self._cast(v, dtype) for v in likes]
        stack = add_node(self.graph, "call_function", aten.stack.default, ([*likes], 0), {})
        stack.meta = {**meta, "val": with_dim(likes[0].meta["val"], len(likes), 0)}
        there, _ = self.at.stacked(val, self.at.layouts.spec[value], self.axes)
        mark = add_mark(self.graph, stack, there, self.at.mesh, meta)
        # The region casts it again, which gives the same numbers.
        return mark if dtype is None else self._cast(mark, val.dtype)

    def _narrowed(self, value: fx.Node, entering: bool) -> torch.dtype | None:
        return self.at.narrowed(self.lanes, value, self.division.nodes, entering)

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        options = {"dtype": dtype}
        cast = add_node(self.graph, "call_function", aten._to_copy.default, (value,), options)
        cast.meta = {**origin_of(value), "val": value.meta["val"].to(dtype)}
        return cast

    def _emit(self, op: Op) -> bool:
        operands = [self._operand(v) for v in op.operands]
        batched = [is_batched for _, is_batched in operands]
        if not any(batched):
            self.new |= {v: (v, False) for v in op.results if v is not None}
            return True
        inputs = [node for node, _ in operands]
        results = add_batched(self.graph, op, batched, inputs, traced=self.traced)
        for value, new in zip(op.results, results or ()):
            if value is not None:
                self.new[value] = new, True
        return results is not None

    def _deliver(self, row: tuple[Op, ...]) -> Iterator[fx.Node]:
        """Give results back to their users outside; yield the nodes for them."""
        for value in row[0].results:
            if value is None or not self.new[value][1]:
                continue
            likes = self._likes(value)
            if all(user in self.inside for like in likes for user in like.users):
                continue
            val, spec, meta = value.meta["val"], self.at.layouts.spec[value], origin_of(value)
            mark, dtype = self.new[value][0], self._narrowed(value, False)
            mark = mark if dtype is None else self._cast(mark, dtype)
            # Layouts of the users end here, and begin behind it.
            for layout in self.at.stacked(val, spec, self.axes):
                mark = add_mark(self.graph, mark, layout, self.at.mesh, meta)
            mark = mark if dtype is None else self._cast(mark, val.dtype)
            unbind = add_node(self.graph, "call_function", aten.unbind.int, (mark, 0), {})
            unbind.meta = {**meta, "val": tuple(v.meta["val"] for v in likes)}
            for lane, like in enumerate(likes):
                args = unbind, lane
                new = add_node(self.graph, "call_function", operator.getitem, args, {})
                new.meta = {key: x for key, x in like.meta.items() if key != "spec"}
                self.at.replaced[like] = new
                self.at.layouts.spec[new] = spec
                like.replace_all_uses_with(new, lambda user: user not in self.inside)
                yield new

    def _move_users(self, results: Collection[fx.Node], anchor: fx.Node, behind: fx.Node) -> None:
        """Move what depends on the results and stands before the region behind it, in order."""
        late = {*results}
        for node in [*self.graph.nodes]:
            if late.intersection(node.all_input_nodes) and node.op == "call_function":
                late.add(node)
                if self.order.get(node, math.inf) <= self.order[anchor]:
                    behind.prepend(node)
        drop_unused(self.graph)
