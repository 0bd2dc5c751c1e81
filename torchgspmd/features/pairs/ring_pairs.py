"""Compute a region's values a block at a time, while the columns' operands travel round a ring.

before   %l = einsum(mk,kn->mn, %a, %b);  %p = log_sigmoid(%l);  %s = sum(%p)
after    %bs = view(%b, 8 shards)         [8, k, n/8]: 8 sharded over data; and so for a
         %c = carry(%bs, 1x7)
         %r = roll(%c, -1, 0)             device i has the columns of device i + t in step t
         %l = einsum(zmk,zkn->zmn, %as, %r);  ...  the block's sums are added up in carries
         %e = next(%r, %r, %c, 1x7)
needs    a propagated graph, rules
ensures  no device has a value for more pairs than a block's; the bytes are those of one gather, and
         of one reduce_scatter for each sum over rows
source   ours, after Ring Attention (arXiv 2310.01889) and SigLIP's chunks (arXiv 2303.15343,
         section 3.3), which are written by hand

Sums over columns stay where they are; sums over rows travel with their columns. Operations that
read a sum, as a softmax reads its maximum, are in the next ring, which computes its blocks again.
The columns travel once: later rings, those of the backward too, take them from a stack. So the
memory is that of the operands, and of a block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...comm.local_ops import as_dtype
from ...compat.fx_nodes import add_node, drop_unused, inline, origin_of
from ...fx_passes.expand.batched_op import may_batch
from ...fx_passes.expand.undivided import Work
from ...fx_passes.ir import Op, add_mark
from ...rules import DECLINED, IDENTITY, SplitRequest, trace
from ...rules.custom_ops.loops import CARRY, LOOP_MARKS, NEXT, ROW, STACK, Loop, mark_of
from ...shard_spec import ShardSpec
from .block import COMBINED, REDUCED, BlockSide, computed
from .find_pairs import COLUMNS, PairRegion, Places, places_of, region_of

Side = tuple[fx.Node, Places]  # a value in a block
HALF = (torch.float16, torch.bfloat16)


def ring_pairs(work: Work, least: float) -> bool | dict[fx.Node, SplitRequest]:
    """Rewrite the graph in place; return whether it has such regions, or operations to split first.

    least: see Work.pairs.
    """
    changed = False
    for pair in work.pairs(least):
        if pair.op.node.graph is not work.graph or not pair.op.node.users:
            continue  # it was in another product's region
        region = region_of(work, pair)
        if isinstance(region, dict):
            if not changed:
                return region
        elif region is not None and _Rings(work, region).run():
            changed = True
            break  # operations and layouts are others now; the pass runs again
    return changed


class BlockOp(NamedTuple):
    """An operation in a block. factors: of the rows and the columns, if it has them."""

    op: Op
    factors: tuple[str | None, str | None]

    def operands(self) -> list[Side]:
        """Return the operands, each with the dimensions of its rows and its columns."""
        dims = zip(self.op.operands, self.op.rule.operands)
        return [(v, places_of(self.factors, each)) for v, each in dims]

    def results(self) -> list[Side | None]:
        dims = zip(self.op.results, self.op.rule.results)
        return [v and (v, places_of(self.factors, each)) for v, each in dims]


@dataclass
class _Ring:
    """One ring of a region. exits: its results. steps: to compute them. sides: their operands.

    graph: of all blocks of a step, of the step's number and the sides.
    """

    exits: list[fx.Node]
    steps: list[BlockOp]
    sides: list[tuple[fx.Node, Places]]
    graph: fx.Graph | None = None

    @property
    def columns(self) -> list[fx.Node]:
        return list(dict.fromkeys(v for v, (row, column) in self.sides if column is not None))


class _Rings:
    """Computes a region by rings."""

    def __init__(self, work: Work, region: PairRegion) -> None:
        self.graph, self.layouts, self.region = work.graph, work.layouts, region
        self.count = work.layouts.mesh.count(region.axes)
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.makers = {v: op for op in work.ops for v in op.results if v is not None}
        self.known: dict[fx.Node, int] = {}  # value -> the first ring that may read it
        self.keys: dict[fx.Node, float] = {}
        self.replaced: dict[fx.Node, fx.Node] = {}  # an exit -> its value now
        self.stacks: dict[tuple[fx.Node, int], fx.Node] = {}  # columns' values in all steps
        texts = [mark_of(n).nest for n in self.graph.nodes if n.target in LOOP_MARKS]
        self.number = 1 + max((loop.number for nest in texts for loop in nest), default=0)

    def run(self) -> bool:
        rings = self._rings()
        for ring in rings:
            ring.graph = self._traced(ring)
            if ring.graph is None:
                return False
        for i, ring in enumerate(rings):
            later = {v for each in rings[i + 1 :] for v in each.columns}
            self._add(ring, i, later)
        drop_unused(self.graph)
        _sort(self.graph, {**self.order, **self.keys})
        return True

    # -------------------------------------------------------------------- the rings and their steps

    def _rings(self) -> list[_Ring]:
        """Return the rings: an exit is in the first one that knows all that it needs."""
        region, number, last = self.region, dict[fx.Node, int](), -1
        for node in self.graph.nodes:
            if (op := region.ops.get(node)) is None:
                if node not in self.known:  # else it is an element of a tuple in the region
                    inputs = (self.known[v] for v in node.all_input_nodes)
                    self.known[node] = max(inputs, default=0)
                continue
            ring = max((self.known[v] for v in op.operands), default=0)
            is_exit = not {*op.results}.isdisjoint(region.exits)
            if node.meta.get("backward"):
                ring = max(ring, last + 1)  # the forward may be a program of its own
            elif is_exit:
                last = max(last, ring)
            number[node] = self.known[node] = ring
            for value in op.results:
                if value is not None:
                    self.known[value] = ring if value in region.makers else ring + 1
        by_number: dict[int, list[fx.Node]] = {}
        for value, op in region.exits.items():
            if value.users:
                by_number.setdefault(number[op.node], []).append(value)
        return [self._ring(by_number[i]) for i in sorted(by_number)]

    def _ring(self, exits: list[fx.Node]) -> _Ring:
        region, needed = self.region, set[fx.Node]()
        stack = [region.exits[v].node for v in exits]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                values = region.ops[node].operands
                stack += [region.makers[v] for v in values if v in region.makers]
        steps = [BlockOp(op, region.factors[n]) for n, op in region.ops.items() if n in needed]
        sides = dict.fromkeys(
            side for step in steps for side in step.operands() if side[0] not in region.makers
        )
        made = dict[Side, BlockOp]()
        for side in [*sides]:
            if side[1][COLUMNS] is not None and self._makes(side, made):
                del sides[side]
        others = (side for step in made.values() for side in step.operands() if side not in made)
        return _Ring(exits, [*made.values(), *steps], [*{**sides, **dict.fromkeys(others)}])

    def _makes(self, side: Side, made: dict[Side, BlockOp]) -> bool:
        """Add the steps that compute a side from no tensor, as an arange; else return False."""
        value, places = side
        op = self.makers.get(value)
        if places == (None, None) or side in made:
            return True
        if op is None or op.results != (value,) or not may_batch(op):
            return False
        names = [None if p is None else op.rule.results[0][p] for p in places]
        if any(each is not None and len(each) != 1 for each in names):
            return False
        step = BlockOp(op, tuple(each and each[0] for each in names))  # pyright: ignore
        operands = step.operands()
        if not op.rule.replicated.isdisjoint(filter(None, step.factors)) or any(
            v not in self.makers and p != (None, None) for v, p in operands
        ):
            return False
        found = dict(made)
        if not all(self._makes(each, found) for each in operands):
            return False
        made.update(found)
        made[side] = step
        return True

    def _traced(self, ring: _Ring) -> fx.Graph | None:
        """Return the graph of a step; None if an operation cannot be computed so."""
        count = self.count

        def run(
            steps: Sequence[BlockOp], values: dict[Side, Tensor], row: Any, column: Any
        ) -> None:
            for step in steps:
                known = zip(step.factors, self.region.sizes, (row, column))
                shards = {f: BlockSide(size, count, index) for f, size, index in known if f}
                results = computed(step.op, [values[side] for side in step.operands()], shards)
                tensors = (x for x in results if isinstance(x, Tensor))
                values.update((side, x) for side, x in zip(step.results(), tensors) if side)

        def step_of(number: Tensor, *tensors: Tensor) -> Any:
            rows = torch.arange(count, device=number.device)
            values = dict(zip(ring.sides, tensors))
            # Operations without rows or columns are the same in all blocks.
            run(same, values, 0, 0)
            batched = [s for s, x in values.items() if s[1] != (None, None)]
            batched_values = [
                values[s] if s in sides else values[s].expand(count, *values[s].shape)
                for s in batched
            ]

            def block(row: Tensor, column: Tensor, *each: Tensor) -> tuple[Tensor, ...]:
                known = {**values, **dict(zip(batched, each))}
                run(rest, known, row, column)
                return tuple(known[side] for side in exits)

            columns = (rows + number) % count
            return torch.vmap(block)(rows, columns, *batched_values)

        sides, same, rest = {*ring.sides}, list[BlockOp](), list[BlockOp]()
        constant = {side for side in sides if side[1] == (None, None)}
        for step in ring.steps:
            is_same = step.op.rule.local.emit is None and constant.issuperset(step.operands())
            (same if is_same else rest).append(step)
            constant.update(side for side in step.results() if side and is_same)
        by_value = {side[0]: side for step in ring.steps for side in step.results() if side}
        exits = [by_value[value] for value in ring.exits]
        vals = [
            v.meta["val"] if p == (None, None) else self._of_blocks(v, p) for v, p in ring.sides
        ]
        number = ring.exits[0].meta["val"].new_empty((), dtype=torch.int64)
        try:
            graph = trace(step_of, (number, *vals), {})
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            return None
        return None if graph is DECLINED else graph  # pyright: ignore

    def _of_blocks(self, value: fx.Node, places: Places) -> Tensor:
        """Return a fake value that has a block for each device along a first dimension."""
        val = value.meta["val"]
        at = next(((side, p) for side, p in enumerate(places) if p is not None), None)
        if at is None:
            return val
        side, dim = at
        shape = list(val.shape)
        shape[dim] = -(-self.region.sizes[side] // self.count)
        return val.new_empty([self.count, *shape])

    # ----------------------------------------------------------------------------- its new program

    def _add(self, ring: _Ring, number: int, later: set[fx.Node]) -> None:
        """Add a ring's program, and replace its exits. later: columns that other rings need."""
        region, count, graph = self.region, self.count, self.graph
        origin = region.exits[ring.exits[0]].node
        self.meta = {**origin_of(origin), "backward": bool(origin.meta.get("backward"))}
        before = {*graph.nodes}
        self.loop = str(Loop(self.number, number, count - 1, False))
        with graph.inserting_before(graph.output_node()):
            place = lambda x: torch.arange(1, count, device=x.device)  # noqa: E731
            numbers = self._traced_call(place, ring.exits[0])
            step = self._mark(ROW, numbers)
            first = self._traced_call(lambda x: x.new_zeros(()), numbers)
            own, moved = list[fx.Node](), list[fx.Node]()
            for value, places in ring.sides:
                mine, other = self._side(value, places, step, value in later)
                own.append(mine)
                moved.append(other)
            assert ring.graph is not None
            terms = inline(graph, ring.graph, [step, *moved], self.meta)
            lasts = inline(graph, ring.graph, [first, *own], self.meta)
            for value, term, last in zip(ring.exits, terms, lasts):
                self._add_exit(value, term, last)
        place = max(self.order[region.exits[v].node] for v in ring.exits)
        self.keys.update((n, place + 0.5) for n in graph.nodes if n not in before)

    def _side(
        self, value: fx.Node, places: Places, step: fx.Node, is_kept: bool
    ) -> tuple[fx.Node, fx.Node]:
        """Add an operand of the blocks; return that of a device's own block, and of a step's."""
        count, dim = self.count, next((p for p in places if p is not None), None)
        now = self.replaced.get(value, value)
        if dim is None:
            return now, now
        spec = self.layouts.spec.get(value)
        is_whole = self.known[value] == 0 and spec is not None and not spec.dims[dim]
        own = self._blocks(now, dim, is_pinned=not is_whole)
        if places[COLUMNS] is None:
            return own, own
        if is_whole:  # each device has all columns

            def chosen(x: Tensor, number: Tensor) -> Tensor:
                at = (torch.arange(count, device=x.device) + number) % count
                return x.index_select(0, at)

            return own, self._traced_call(chosen, own, step)
        if (stack := self.stacks.get((value, dim))) is not None:
            return own, self._mark(ROW, stack)
        carry = self._mark(CARRY, own)
        moved = self._pinned(self._traced_call(lambda x: x.roll(-1, 0), carry))
        self._mark(NEXT, moved, moved, carry)
        if is_kept:
            self.stacks[value, dim] = self._mark(STACK, moved)
        return own, moved

    def _blocks(self, value: fx.Node, dim: int, is_pinned: bool) -> fx.Node:
        """Add a value's blocks along a first dimension, one for each device."""
        count = self.count

        def blocks(x: Tensor) -> Tensor:
            if missing := -x.shape[dim] % count:
                x = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])
            return x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0)

        added = self._traced_call(blocks, value)
        return self._pinned(added) if is_pinned else added

    def _add_exit(self, value: fx.Node, term: fx.Node, last: fx.Node) -> None:
        """Add up an exit's terms, and replace it."""
        op = self.region.exits[value]
        dims = op.rule.results[op.results.index(value)]
        places, dtype = places_of(self.region.factors[op.node], dims), value.meta["val"].dtype
        lost = (f for f, p in zip(self.region.factors[op.node], places) if p is None)
        kind = op.rule.reduce[next(lost)]
        travels = places[COLUMNS] is not None
        # A sum that travels is sent in its own dtype; others lose no digits.
        wide = torch.float32 if kind == "sum" and dtype in HALF and not travels else dtype

        def added(total: Tensor, x: Tensor) -> Tensor:
            total = COMBINED[kind](total, x.to(total.dtype))
            return total.roll(-1, 0) if travels else total

        def end(total: Tensor, x: Tensor) -> Tensor:
            x = COMBINED[kind](total, x.to(total.dtype)).to(dtype)
            at = next(((s, p) for s, p in enumerate(places) if p is not None), None)
            if at is None:
                return REDUCED[kind](x, 0)
            side, dim = at
            x = x.movedim(0, dim).flatten(dim, dim + 1)
            return x.narrow(dim, 0, self.region.sizes[side])

        fill = as_dtype(IDENTITY[kind], wide)
        start = self._traced_call(lambda x: torch.full_like(x, fill, dtype=wide), last)
        carry = self._mark(CARRY, self._pinned(start))
        total = self._pinned(self._traced_call(added, carry, term))
        total = self._mark(NEXT, total, total, carry)
        self.replaced[value] = self._traced_call(end, total, last)
        value.replace_all_uses_with(self.replaced[value])

    def _traced_call(self, function: Callable[..., Tensor], *values: fx.Node) -> fx.Node:
        """Add the operations that a function calls."""
        inner = trace(function, tuple(v.meta["val"] for v in values), {})
        assert isinstance(inner, fx.Graph), "views, sums and rows have a graph"
        return inline(self.graph, inner, values, self.meta)

    def _pinned(self, value: fx.Node) -> fx.Node:
        """Add a mark: the blocks lie on the devices whose rows they have."""
        dims = (self.region.axes, *((),) * (value.meta["val"].dim() - 1))
        spec = ShardSpec(dims, open=(False, *(True,) * (len(dims) - 1)))
        return add_mark(self.graph, value, spec, self.layouts.mesh, self.meta)

    def _mark(self, target: Any, x: fx.Node, *others: fx.Node) -> fx.Node:
        """Add a loop's entry or exit."""
        node = add_node(self.graph, "call_function", target, (x, *others, self.loop), {})
        val = x.meta["val"]
        shape = val.shape[1:] if target is ROW else val.shape
        rows = [self.count - 1] if target is STACK else []
        node.meta = {**self.meta, "val": val.new_empty([*rows, *shape])}
        return node


def _sort(graph: fx.Graph, keys: dict[fx.Node, float]) -> None:
    """Order a graph by keys, operands before users."""
    end = graph.output_node()
    nodes = [n for n in graph.nodes if n is not end]
    missing = {n: len(n.all_input_nodes) for n in nodes}
    number = {n: i for i, n in enumerate(nodes)}
    ready = [(keys[n], number[n], n) for n in nodes if not missing[n]]
    heapq.heapify(ready)
    while ready:
        _, _, node = heapq.heappop(ready)
        end.prepend(node)
        for user in node.users:
            if user is not end:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (keys[user], number[user], user))
