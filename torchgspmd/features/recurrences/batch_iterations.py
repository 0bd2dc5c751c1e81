"""Compute all iterations of a recurrence at once, with a first dimension that says which one.

program  for each i:  %y = mul(%h, %a);  %h = add(%y, %x)         the next iteration's h
becomes  %A = mul(ones, %as);  %B = %xs                           h becomes A h + B
         %hs = affine_states(%A, %B, %h0, False)                  the states before all iterations
         %ys = mul(%hs, %as)                                      all else at once

needs    an affine recurrence: operations between a carry and the next one are linear in it. If they
         mix elements of the carry, A is a matrix for each step (linear_map.py)
source   ours; affine maps are composed as in Blelloch, Prefix sums and their applications, 1990
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import add_node, inline, origin_of
from ...compat.operators import aten
from ...fx_passes.expand.batched_op import Traced, add_batched
from ...fx_passes.ir import Op, operands_of
from ...rules import DECLINED, trace
from ...rules.ops.pointwise import CONJUGATES
from .affine_states import AFFINE_STATES, ALGEBRAS
from .carry_dims import carry_dims, joint_shapes, linear_group, sums
from .linear_map import LinearMap
from .move_cut import move_cut
from .recurrence import Carry, Recurrence, added_op, reading
from .semirings import SEMIRINGS, SUMS, Semiring, normal_form

Value = tuple[fx.Node, bool]  # a new value, and whether it has the iterations' dimension


def batch_iterations(graph: fx.Graph, found: Recurrence) -> dict[fx.Node, fx.Node] | None:
    """Add a recurrence's values at the graph's insert point.

    Returns:
        For each value in an iteration, that of all iterations along a first dimension. A carry has
        the states before them. None if the recurrence is not affine: the new nodes are unused then.
    """
    batcher = _Batcher(graph, found)
    if not batcher.run():
        return None
    return {value: batcher.widened(new) for value, new in batcher.new.items()}


class _Batcher:
    """Adds all iterations. new: by value in an iteration. waits: the carries that it reads."""

    def __init__(self, graph: fx.Graph, found: Recurrence) -> None:
        self.graph, self.found = graph, found
        self.new: dict[fx.Node, Value] = {value: (all, True) for value, all in found.rows.items()}
        self.traced: Traced = {}
        self.origin = origin_of(found.ops[0].node) if found.ops else {}
        self.waits: dict[fx.Node, frozenset[fx.Node]] = {}
        self._note_waits()

    def _note_waits(self) -> None:
        self.waits = {c: frozenset((c,)) for c in self.found.carries}
        for op in self.found.ops:
            above = frozenset[fx.Node]().union(*(self._waits(v) for v in op.operands))
            self.waits.update((v, above) for v in op.results if v is not None)

    def _waits(self, value: fx.Node) -> frozenset[fx.Node]:
        return self.waits.get(value, frozenset())

    def run(self) -> bool:
        """Add the iterations; return False if the recurrence is not affine."""
        pending = dict.fromkeys(self.found.carries)
        remaining, aliases = self._emit(self.found.ops, pending), dict[fx.Node, fx.Node]()
        while pending:
            # A carry that another one's next value reads comes first.
            ready = (c for c, (_, again) in self.found.carries.items() if c in pending)
            carry = next((c for c in ready if self._again(c) & pending.keys() <= {c}), None)
            if carry is None:
                carries = self._move_cut(pending, remaining) or self._join(pending, remaining)
                if not carries:
                    return False
                aliases |= carries
                pending, remaining = dict.fromkeys(self.found.carries), self.found.ops
            elif self._add_states(carry):
                del pending[carry]
            else:
                return False
            remaining = self._emit(remaining, pending)
        for carry, value in reversed(aliases.items()):  # a later cut replaces an earlier one's
            self.new[carry] = self.operand(value)
        return not remaining

    def _move_cut(
        self, pending: Collection[fx.Node], remaining: Sequence[Op]
    ) -> dict[fx.Node, fx.Node]:
        """Cut the loop where iterations pass on less; return the carries, replaced by others."""
        found, count, begin = self.found, self.found.count, self.found.begin
        rows = {value: new for value, (new, is_batched) in self.new.items() if is_batched}
        carries = {c: carry for c, carry in found.carries.items() if c in pending}
        results = (v for op in remaining for v in op.results if v is not None)
        waiting = dict.fromkeys((*pending, *results))
        is_first = self._full(torch.empty((), dtype=torch.bool, device="meta"), 0)
        moved = move_cut(self.graph, replace(found, rows=rows, carries=carries), waiting, is_first)
        if moved is None:
            return {}
        step, like = -1 if begin else 1, next(iter(pending))
        place = lambda x: torch.arange(count, device=x.device) == begin  # noqa: E731
        self.new[is_first] = self._row(place, like)
        for value, row in moved.before.items():
            self.new[value] = self._row(lambda x: x.roll(step, 0), rows[row])
        ops = [reading(op, moved.carries) for op in remaining]
        self.found = replace(moved.found, ops=[*moved.found.ops, *ops])
        self._note_waits()
        return moved.carries

    def _join(
        self, pending: Collection[fx.Node], remaining: Sequence[Op]
    ) -> dict[fx.Node, fx.Node]:
        """Concatenate carries that read each other, so that they are one; return their new values.

        Their map is a matrix over them, for each element if no elements are mixed.
        """
        found, best = self.found, (math.inf, self.found, dict[fx.Node, fx.Node]())
        group = min((self._needed(c, pending) for c in found.carries if c in pending), key=len)
        vals = [c.meta["val"] for c in group]
        if len({val.dtype for val in vals}) == 1:
            for shapes, d in joint_shapes([val.shape for val in vals]):
                self.found, new, state = self._joined(found, group, shapes, d, pending, remaining)
                self._note_waits()
                again, size = self.found.carries[state].again, state.meta["val"].shape
                path, again = normal_form(self.graph, SUMS, self._path(state, again), again)
                dims = carry_dims(path, state, again, sums)
                rows = math.inf if dims is None else math.prod(size[d] for d in dims.mixed)
                best = min(best, (rows, self.found, new), key=operator.itemgetter(0))
        _, self.found, new = best
        self._note_waits()
        return new

    def _joined(
        self,
        found: Recurrence,
        group: Sequence[fx.Node],
        shapes: Sequence[list[int]],
        d: int,
        pending: Collection[fx.Node],
        remaining: Sequence[Op],
    ) -> tuple[Recurrence, dict[fx.Node, fx.Node], fx.Node]:
        """Return a recurrence whose state is a concatenation, the old carries' values, the state.

        shapes: the carries' shapes in the state, which they fill along dimension d.
        """
        like, vals = group[0], [c.meta["val"] for c in group]
        olds = [found.carries[c] for c in group]
        starts = [old.first or self._full(val, 0) for old, val in zip(olds, vals)]
        join = lambda *xs: torch.cat([x.reshape(n) for x, n in zip(xs, shapes)], d)  # noqa: E731
        first = self._traced(join, *starts)
        parts = [
            added_op(self.graph, aten.view.default, (old.again, shape), val.new_empty(shape), like)
            for old, shape, val in zip(olds, shapes, vals)
        ]
        nodes, val = [op.node for op in parts], join(*vals)
        again = added_op(self.graph, aten.cat.default, (nodes, d), val, like)
        state = added_op(self.graph, aten.cat.default, (nodes, d), val, like).node
        new, ops, start = dict[fx.Node, fx.Node](), list[Op](), 0
        for c, shape in zip(group, shapes):
            end = start + shape[d]
            args = state, d, start, end
            part = added_op(
                self.graph, aten.slice.Tensor, args, val.narrow(d, start, shape[d]), like
            )
            args, start = (part.node, [*c.meta["val"].shape]), end
            ops += part, added_op(self.graph, aten.view.default, args, c.meta["val"], like)
            new[c] = ops[-1].node
        carries = {c: carry for c, carry in found.carries.items() if c in pending and c not in new}
        carries = {c: Carry(first, new.get(v, v)) for c, (first, v) in carries.items()}
        carries[state] = Carry(first, again.node)
        ops += [reading(op, new) for op in (*remaining, *parts, again)]
        return replace(found, ops=ops, carries=carries, known={}), new, state

    def _needed(self, carry: fx.Node, pending: Collection[fx.Node]) -> list[fx.Node]:
        """Return the pending carries that the next ones of a carry follow from, and itself."""
        known = {carry: None}
        for c in (queue := [carry]):
            more = [v for v in self._again(c) if v in pending and v not in known]
            known |= dict.fromkeys(more)
            queue += more
        return [c for c in self.found.carries if c in known]

    def _row(self, function: Callable[[Tensor], Tensor], value: fx.Node) -> Value:
        node = self._traced(function, value)
        assert node is not None, "it moves or counts rows"
        return node, True

    def _again(self, carry: fx.Node) -> frozenset[fx.Node]:
        return self._waits(self.found.carries[carry].again)

    def _emit(self, ops: Sequence[Op], pending: dict[fx.Node, None]) -> list[Op]:
        """Add operations that wait for no pending carry; return the others."""
        remaining = []
        for op in ops:
            waits = frozenset[fx.Node]().union(*map(self._waits, op.operands))
            if waits & pending.keys():
                remaining.append(op)
            elif (results := self._apply(op, [self.operand(v) for v in op.operands])) is None:
                remaining.append(op)
            else:
                self.new |= {v: new for v, new in zip(op.results, results) if v is not None}
        return remaining

    def operand(self, value: fx.Node) -> Value:
        """Return the new value for an operand; one from outside is the same in all iterations."""
        return self.new.get(value, (value, False))

    def _apply(self, op: Op, operands: Sequence[Value]) -> list[Value] | None:
        """Add an operation on new operands. None if it cannot be batched."""
        nodes, batched = [node for node, _ in operands], [each for _, each in operands]
        if any(batched):
            results = add_batched(self.graph, op, batched, nodes, traced=self.traced)
            return None if results is None else [(node, True) for node in results]
        if all(node is v for node, v in zip(nodes, op.operands)):
            return [(v, False) for v in op.results if v is not None]
        if op.results != (op.node,):
            return None
        new = dict(zip(operands_of(op.node), nodes))
        copy = self.graph.node_copy(op.node, lambda n: new.get(n, n))
        copy.meta = {**origin_of(op.node), "val": op.node.meta["val"]}
        return [(copy, False)]

    # ------------------------------------------------------------------------------------- the maps

    def _add_states(self, carry: fx.Node) -> bool:
        """Add the states of a carry; return False if the next one is no affine function of it."""
        first, again = self.found.carries[carry]
        val = carry.meta["val"] if first is None else first.meta["val"]
        after = again.meta["val"]
        path = self._path(carry, again)
        if after.shape != val.shape or after.dtype != val.dtype or not _is_over(path, val.dtype):
            return False
        first = self._full(val, 0) if first is None else first
        for ring in SEMIRINGS:
            way, end = normal_form(self.graph, ring, path, again)
            dims = carry_dims(way, carry, end, ring.groups)
            if dims is None or not (dims.depends or ring is SUMS):
                continue
            if dims.mixed:
                map_ = LinearMap(way, carry, end, dims, val, ring)
                states = self._add_mixed(map_, first)
            else:
                states = self._add_elements(way, carry, end, first, ring)
            if states is not None:
                self.new[carry] = states, True
                return True
        return False

    def _shift(
        self, path: Sequence[Op], carry: fx.Node, again: fx.Node, ring: Semiring
    ) -> fx.Node | None:
        """Add what a map makes of zeros; None if an operation cannot be batched."""
        shift = self._along(path, {carry: None}, ring, True).get(again, self.operand(again))
        if shift is _FAILED:
            return None
        zero = ALGEBRAS[ring.elements].zero
        return self.widened(shift or (self._full(again.meta["val"], zero), False))

    def _add_elements(
        self, path: Sequence[Op], carry: fx.Node, again: fx.Node, first: fx.Node, ring: Semiring
    ) -> fx.Node | None:
        """Add the states of a carry whose elements each have a map of their own."""
        val, (*_, one, zero) = again.meta["val"], ALGEBRAS[ring.elements]
        start = {carry: (self._full(val, one), False)}
        scale = self._along(path, start, ring, False).get(again)
        shift = self._shift(path, carry, again, ring)
        if scale is _FAILED or shift is None:
            return None
        scale = self.widened(scale or (self._full(val, zero), False))
        return self._states(scale, shift, first, ring.elements)

    def _states(self, scale: fx.Node, shift: fx.Node, first: fx.Node, algebra: str) -> fx.Node:
        args = (scale, shift, first, self.found.reverse, algebra)
        states = add_node(self.graph, "call_function", AFFINE_STATES, args, {})
        states.meta = {**self.origin, "val": shift.meta["val"]}
        return states

    def _add_mixed(self, map_: LinearMap, first: fx.Node) -> fx.Node | None:
        """Add the states of a carry whose dimensions are mixed; None if torch.vmap has no rule."""
        shift = self._shift(map_.path, map_.carry, map_.again, map_.ring)
        if shift is None or map_.rows > map_.ring.most_rows:
            return None
        others = [self.operand(v) for v in map_.others]
        nodes = [node for node, _ in others]
        batched = [each for _, each in others]
        scale = self._traced(lambda *xs: map_.matrices(batched, *xs), *nodes)
        if scale is None:
            return None
        scale = self.widened((scale, any(batched)))
        added, start = (self._traced(map_.as_columns, x) for x in (shift, first))
        if added is None or start is None:
            return None
        return self._traced(map_.as_carry, self._states(scale, added, start, map_.ring.matrices))

    def _traced(self, function: Callable[..., Tensor], *values: fx.Node) -> fx.Node | None:
        """Add what a function computes; None if it cannot be traced."""
        try:
            inner = trace(function, tuple(v.meta["val"] for v in values), {})
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            return None
        return None if inner is DECLINED else inline(self.graph, inner, values, self.origin)

    def _along(
        self,
        path: Sequence[Op],
        start: Mapping[fx.Node, Value | None],
        ring: Semiring,
        with_others: bool,
    ) -> dict[fx.Node, Value | None]:
        """Add a path's operations from a carry's value on. None stands for zeros.

        with_others: whether terms that do not depend on the carry count; they are zeros otherwise.
        """
        known, zero = dict(start), ALGEBRAS[ring.elements].zero
        for op in path:
            places = [i for i, v in enumerate(op.operands) if v in known]
            group = linear_group(ring.groups(op), places)
            assert group is not None, "carry_dims has checked it"
            terms = [
                known[v]
                if i in places
                else self.operand(v)
                if with_others or i not in group
                else None
                for i, v in enumerate(op.operands)
            ]
            known[op.node] = result = self._sum(op, group, terms, zero)
            if result is _FAILED:
                return dict.fromkeys(known, _FAILED)
        return known

    def _path(self, carry: fx.Node, again: fx.Node) -> list[Op]:
        """Return the operations that lead from a carry to the next one, in order."""
        needed, path = {again}, []
        for op in reversed(self.found.ops):
            results = needed.intersection(op.results)
            if any(carry in self._waits(v) for v in results):
                path.append(op)
                needed |= {*op.operands}
        return path[::-1]

    def _sum(
        self, op: Op, group: frozenset[int], terms: Sequence[Value | None], zero: float
    ) -> Value | None:
        """Add an operation, linear in a group of operands. None stands for zeros."""
        if all(terms[i] is None for i in group):
            return None
        operands = [
            (self._full(v.meta["val"], zero), False) if term is None else term
            for term, v in zip(terms, op.operands)
        ]
        results = self._apply(op, operands)
        return _FAILED if results is None else results[0]

    def _full(self, like: object, number: float) -> fx.Node:
        """Add a constant tensor."""
        kwargs = {"dtype": like.dtype, "device": like.device}  # pyright: ignore
        args = (list(like.shape), number)  # pyright: ignore
        node = add_node(self.graph, "call_function", aten.full.default, args, kwargs)
        node.meta = {**self.origin, "val": like.new_empty(like.shape)}  # pyright: ignore
        return node

    def widened(self, value: Value) -> fx.Node:
        """Return a value with the iterations' dimension."""
        node, is_batched = value
        count = self.found.count
        if is_batched:
            return node
        inner = trace(lambda x: x.expand(count, *x.shape), (node.meta["val"],), {})
        return inline(self.graph, inner, [node], self.origin)  # pyright: ignore


def _is_over(path: Sequence[Op], dtype: torch.dtype) -> bool:
    """Return whether what is linear along a path is so over the numbers of a dtype.

    A conjugate is linear over real numbers alone, and so are the parts of a complex number.
    """
    if not dtype.is_complex:
        return dtype.is_floating_point
    return all(op.node.meta["val"].is_complex() and op.node.target not in CONJUGATES for op in path)


_FAILED: Value = (fx.Graph().placeholder("failed"), False)
