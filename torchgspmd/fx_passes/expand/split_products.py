"""Slices of a result become slices of an operand, and joined parts are used one by one, where less
is moved so.

before   %y = einsum(bsm,mk->bsk, %x, %w)       %q = slice(%y, 2, 0, 64)        %k = slice(%y, 2, 64, 128)
after    %u = slice(%w, 1, 0, 64)               %q = einsum(bsm,mk->bsk, %x, %u) ...

before   %g = cat([%dq, %dk], 2)                %d = einsum(bsk,bsm->mk, %g, %x)        %e = einsum(bsk,mk->bsm, %g, %w)
after    %d = cat([einsum(%dq, %x), einsum(%dk, %x)], 1)        %e = einsum(%dq, %u) + einsum(%dk, %v)

needs    a propagated graph, rules
source   ours. A fused weight of queries, keys and values that is cut into equal shards has none of the three on all devices, so
         either the weight has to change places or what is made with it; there is more of the latter, mostly.

Only dimensions that are sharded matter. What would be moved is compared by the elements of one
device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from ...rules.ops import concat_slice
from ..ir import Op, Rules, tensors_of
from ..propagate.propagate import Layouts

Place = tuple[fx.Node, int]  # a value and one of its dimensions
Span = tuple[int, int]


@dataclass(frozen=True)
class Way:
    """What is to be moved: elements of one device, and the values and dimensions that are sliced or
    joined in the end.
    """

    elements: float
    ends: frozenset[Place]


def split_products(graph: fx.Graph, layouts: Layouts, rules: Rules) -> bool:
    """Rewrites the graph in place; says whether anything changed."""
    return _Parts(graph, layouts, rules).run()


class _Parts:
    def __init__(self, graph: fx.Graph, layouts: Layouts, rules: Rules):
        self.graph, self.rules, self.mesh = graph, rules, layouts.mesh
        self.specs = dict(layouts.spec)  # of new values those of what they are parts of
        self.ops: dict[fx.Node, Op] = {op.node: op for op in rules.ops(graph)}
        self.taken: dict[tuple[fx.Node, int, Span], fx.Node] = {}  # new slices
        self.order = {node: i for i, node in enumerate(graph.nodes)}

    def run(self) -> bool:
        changed = [self._pull(value, dim, cuts) for value, dim, cuts in self._cut_values()]
        changed += [
            self._push(value, dim, borders) for value, dim, borders in self._joined_values()
        ]
        return any(changed)

    def _elements(self, place: Place) -> float:
        value = place[0]
        return math.prod(self.specs[value].local_shape(value.meta["val"].shape, self.mesh))

    def _fits(self, place: Place, borders: Iterable[int]) -> bool:
        """Whether the dimension is sharded, and its parts can be as evenly."""
        count = self.mesh.count(self.specs[place[0]].dims[place[1]])
        return count > 1 and all(border % count == 0 for border in borders)

    def _factor(self, value: fx.Node, dim: int) -> str | None:
        """The factor of a dimension of a result, if parts of it are made of parts of operands."""
        op = self.ops.get(value)
        names = op.rule.results[0][dim] if op is not None and op.results == (value,) else ()
        return (
            names[0] if len(names) == 1 and concat_slice.passes_parts(op.rule, names[0]) else None
        )

    # -------------------------------------------------------------------------------------- slices

    def _cut_values(self) -> list[tuple[fx.Node, int, dict[fx.Node, Span]]]:
        """Values of which only slices along one sharded dimension are used, with these."""
        found = []
        for value in reversed(self.ops):
            cuts = [self._taken_of(user) for user in value.users]
            spans = sorted(cut[1:] for taken in cuts for cut in taken.values())
            dims = {d for taken in cuts for d, *_ in taken.values()}
            if (
                not all(cuts)
                or len(dims) != 1
                or any(a[1] > b[0] for a, b in zip(spans, spans[1:]))
            ):
                continue
            if self._fits((value, min(dims)), (n for span in spans for n in span)):
                found.append(
                    (
                        value,
                        min(dims),
                        {node: cut[1:] for taken in cuts for node, cut in taken.items()},
                    )
                )
        return found

    def _taken_of(self, node: fx.Node) -> dict[fx.Node, tuple[int, int, int]]:
        """The results of an operation that only takes rows of its operand, with these rows."""
        op = self.ops.get(node)
        if op is None or len(op.operands) != 1:
            return {}
        taken = concat_slice.parts_taken(
            node.target,
            node.args,
            op.rule,
            op.operands[0].meta["val"].shape,
            [tuple(t.shape) for t in tensors_of(node)],
        )
        return {result: cut for result, cut in zip(op.results, taken) if result is not None}

    def _pull(self, value: fx.Node, dim: int, cuts: dict[fx.Node, Span]) -> bool:
        way = self._way_up(value, dim)
        if (value, dim) in way.ends:
            return False
        for user, span in cuts.items():
            self._replace(user, self._part(value, dim, span, way, before=value))
        return True

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        """Puts a node in the place of another; what only that one needed goes with it."""
        for user in old.replace_all_uses_with(new):
            if user in self.ops:
                self.ops[user] = self.rules.op(user)
        dead = [old]
        while dead:
            node = dead.pop()
            if not node.users and node.op == "call_function":
                self.ops.pop(node, None)
                dead += node.all_input_nodes
                self.graph.erase_node(node)

    def _way_up(self, value: fx.Node, dim: int) -> Way:
        """Where slices of a value are taken at best: of it, or of what it is made of."""
        here, factor = (
            Way(self._elements((value, dim)), frozenset({(value, dim)})),
            self._factor(value, dim),
        )
        places = _with_factor(self.ops[value], factor) if factor is not None else []
        above = _together(
            self._way_up(*place) if len(place[0].users) == 1 else self._to(place)
            for place in places
        )
        return min(here, above, key=lambda way: way.elements) if places else here

    def _to(self, place: Place) -> Way:
        """Slices of a value that is there anyhow; they may be there as well."""
        known = any(taken[:2] == place for taken in self.taken)
        return Way(0.0 if known else self._elements(place), frozenset({place}))

    def _part(self, value: fx.Node, dim: int, span: Span, way: Way, before: fx.Node) -> fx.Node:
        """Rows of a value, made of rows of the way's ends."""
        if (value, dim) not in way.ends:
            op = self.ops[value]
            made = {
                v: self._part(v, d, span, way, before)
                for v, d in _with_factor(op, self._factor(value, dim))
            }
            return self._again(
                op, made, before, value.meta["val"].narrow(dim, span[0], span[1] - span[0])
            )
        key = (value, dim, span)
        if key not in self.taken or self.order[self.taken[key]] > self.order[before]:
            with self.graph.inserting_before(before):
                self.taken[key] = self._new(
                    concat_slice.take(self.graph, value, dim, *span), value, before
                )
        return self.taken[key]

    def _again(
        self, op: Op, parts: Mapping[fx.Node, fx.Node], before: fx.Node, val: Tensor
    ) -> fx.Node:
        """The same call with parts in place of operands."""
        with self.graph.inserting_before(before):
            copy = self.graph.node_copy(op.node, lambda n: parts.get(n, n))
        copy.meta = {
            key: item for key, item in op.node.meta.items() if key not in ("captured", "spec")
        } | {"val": val}
        return self._new(copy, op.node, before)

    def _new(self, node: fx.Node, like: fx.Node, before: fx.Node) -> fx.Node:
        self.order[node], self.ops[node], self.specs[node] = (
            self.order[before],
            self.rules.op(node),
            self.specs[like],
        )
        return node

    # -------------------------------------------------------------------------------------- joined parts

    def _joined_values(self) -> list[tuple[fx.Node, int, list[int]]]:
        """Values that are joined along a sharded dimension, with the borders between the parts."""
        found = []
        for op in self.ops.values():
            joined = (
                concat_slice.parts_joined(
                    op.rule, [v.meta["val"].shape for v in op.operands], op.node.meta["val"].shape
                )
                if (op.results == (op.node,))
                else None
            )
            if (
                joined
                and len(op.operands) <= concat_slice.MOST
                and self._fits((op.node, joined[0]), joined[1])
            ):
                found.append((op.node, *joined))
        return found

    def _push(self, value: fx.Node, dim: int, borders: list[int]) -> bool:
        way = self._way_down(value, dim, value)
        if (value, dim) in way.ends:
            return False
        self._use(value, dim, self.ops[value].operands, list(zip(borders, borders[1:])), way)
        return True

    def _way_down(self, value: fx.Node, dim: int, joined: fx.Node) -> Way:
        """Where parts are joined at best: here, or after all operations that use them. joined: what
        the parts are of at first.
        """
        here, ways = Way(self._elements((value, dim)), frozenset({(value, dim)})), []
        for user in value.users:
            op, factor = self.ops.get(user), self._used_as(user, value, dim)
            if op is None or factor is None:
                return here
            others = [place for place in _with_factor(op, factor) if place[0] is not value]
            if any(
                self._comes_of(other, joined) for other, _ in others
            ):  # it would have to be parted and joined before
                return here
            ways += [self._to(place) for place in others]
            ways += (
                [self._way_down(user, op.rule.results[0].index((factor,)), joined)]
                if (factor,) in op.rule.results[0]
                else []
            )
        return min(here, _together(ways), key=lambda way: way.elements)

    def _comes_of(self, value: fx.Node, source: fx.Node) -> bool:
        """Whether a value is another one, or computed from it."""
        stack, seen = [value], set()
        while stack:
            node = stack.pop()
            if node is source:
                return True
            if node not in seen and self.order[node] > self.order[source]:
                seen.add(node)
                stack += node.all_input_nodes
        return False

    def _used_as(self, user: fx.Node, value: fx.Node, dim: int) -> str | None:
        """The factor that a dimension of a value is, wherever an operation takes the value; None if
        it has to be joined for it.
        """
        op = self.ops.get(user)
        names = (
            {dims[dim] for v, dims in zip(op.operands, op.rule.operands) if v is value}
            if op is not None
            else ()
        )
        if len(names) != 1 or op.results != (user,) or len(next(iter(names))) != 1:
            return None
        factor = next(iter(names))[0]
        return factor if concat_slice.passes_parts(op.rule, factor) else None

    def _use(
        self, value: fx.Node, dim: int, parts: Sequence[fx.Node], spans: list[Span], way: Way
    ) -> None:
        """Gives the parts to all that use the value, in its place."""
        for user in list(value.users):
            op, factor = self.ops[user], self._used_as(user, value, dim)
            others = [place for place in _with_factor(op, factor) if place[0] is not value]
            ends, val = Way(0.0, frozenset(others)), user.meta["val"]
            at = op.rule.results[0].index((factor,)) if (factor,) in op.rule.results[0] else None
            made = [
                self._again(
                    op,
                    {value: part, **{v: self._part(v, d, span, ends, user) for v, d in others}},
                    user,
                    val if at is None else val.narrow(at, span[0], span[1] - span[0]),
                )
                for part, span in zip(parts, spans)
            ]
            if at is not None and (user, at) not in way.ends:
                self._use(user, at, made, spans, way)
                continue
            with self.graph.inserting_before(user):
                total = (
                    concat_slice.add(self.graph, made, val, user.meta)
                    if at is None
                    else concat_slice.join(self.graph, made, at, val, user.meta)
                )
            self._replace(user, self._new(total, user, user))


def _with_factor(op: Op, factor: str) -> list[Place]:
    """The operands that have a factor, and in which dimension."""
    return [
        (v, dims.index((factor,)))
        for v, dims in zip(op.operands, op.rule.operands)
        if (factor,) in dims
    ]


def _together(ways: Iterable[Way]) -> Way:
    ways = list(ways)
    return Way(sum(way.elements for way in ways), frozenset().union(*(way.ends for way in ways)))
