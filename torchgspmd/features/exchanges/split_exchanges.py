"""Compute the operations between two exchanges in parts, each beside the exchange of another.

before   %r = all_to_all(%x, 1, 0, expert);  %h = einsum(egcm,emh->egch, %r, %up)
         %y = einsum(egch,ehm->egcm, %h, %down);  %s = all_to_all(%y, 0, 1, expert)
after    %r_0, %r_1 = all_to_all of the halves of c of %x
         %h_0 = einsum(egcm,emh->egch, %r_0, %up);  %y_0 = ...;  %s_0 = all_to_all(%y_0, ...)
         %h_1 = einsum(egcm,emh->egch, %r_1, %up);  %y_1 = ...;  %s_1 = all_to_all(%y_1, ...)
needs    one device's program, before start_wait
ensures  the same bytes are sent; the program is faster by the time of its two streams
source   ours. Tutel (arXiv 2206.03382, section 3.3) and FasterMoE divide the capacity by hand.

Later passes start a part's exchange when its operand exists, and wait for it where it is used. A
sum over the dimension that is cut may become a sum of parts; other operations read the parts
joined. The pass compares no parts, two and four, in all chains, and then leaves out like chains.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx

from ...compat.fx_nodes import add_node, origin_of
from ...compat.operators import aten, draws
from ...fx_passes.loop_call import BodyCall, copy_of
from ...fx_passes.program import Program
from ...fx_passes.schedule.arithmetic import flops
from ...fx_passes.schedule.liveness import bytes_of, peak
from ...fx_passes.schedule.overlap import EXTRA, scheduled_seconds
from ...rules import Shapes
from .fill_waits import fill_waits
from .find_chains import COLLECTIVES, Chains, tensors_in

PARTS = 2, 4
GAIN = 0.99  # Rewrite a program if it takes at most this share of its time then.
Key = tuple[int, int, int, int]


def split_exchanges(program: Program) -> fx.Graph | None:
    """Rewrite the program's graph, if it is faster then."""
    if not program.hardware.beside or "overlap" in program.request.skip_passes:
        return None
    found = Chains(program.graph).found
    search = _Search(program)
    before = search.way(1, frozenset(), fill=False)
    ways = [search.way(parts, frozenset()) for parts in (1, *(PARTS if found else ()))]
    best = min(ways, key=lambda way: way.seconds)
    kinds = dict.fromkeys(chain.likeness for chain in found)
    for kind in kinds if best.parts > 1 and len(kinds) > 1 else ():
        best = min(best, search.way(best.parts, best.left_out | {kind}), key=lambda w: w.seconds)
    if best.seconds > GAIN * before.seconds:
        return None
    return search.rewrite(program.graph, best.parts, best.left_out)


class _Way(NamedTuple):
    seconds: float
    parts: int
    left_out: frozenset[object]  # chains like these


class _Search:
    """Ways to rewrite a program. most: bytes of a peak, as `overlap` may raise it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.most = math.inf

    def way(self, parts: int, left_out: frozenset[object], fill: bool = True) -> _Way:
        graph = copy_of(self.program.graph)
        if fill:
            self.rewrite(graph, parts, left_out)
        seconds = scheduled_seconds(graph, self.program)
        most = peak(graph)
        if not fill:
            # A share of the whole program's peak, which has each iteration's saved values.
            call = self.program.call
            runs = call.loop.length if isinstance(call, BodyCall) else 1
            self.most = (1 + EXTRA * runs) * most
        return _Way(seconds if most <= self.most else math.inf, parts, left_out)

    def rewrite(self, graph: fx.Graph, parts: int, left_out: frozenset[object]) -> fx.Graph:
        if parts > 1:
            _Parts(graph, parts, left_out).rewrite()
        fill_waits(graph, self.program.mesh, self.program.hardware)
        return graph


class _Parts:
    """Rewrites the chains of a graph, but for those that are left out."""

    def __init__(self, graph: fx.Graph, parts: int, left_out: Collection[object]) -> None:
        self.graph, self.parts = graph, parts
        self.chains = Chains(graph, left_out)
        self.place, self.cut = self.chains.place, self.chains.cut
        self.keys: dict[fx.Node, Key] = {n: (i, 0, 0, 0) for n, i in self.place.items()}
        self.pieces: dict[fx.Node, list[fx.Node]] = {}
        self.slices: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def rewrite(self) -> fx.Graph:
        region: dict[fx.Node, tuple[str, int]] = {}  # node -> its factor, the place of its parts
        for chain in self.chains.found:
            sent = (self.place[n] for n in chain.head if n.target in COLLECTIVES)
            begin, end = max(sent), self.place[chain.last]
            region |= {n: (factor, begin) for n, factor in chain.head.items()}
            region |= {n: (factor, end) for n, factor in chain.core.items()}
        for node, (factor, _) in region.items():
            assert self.chains.of_parts(node).results[0][self.cut[node]] == (factor,), "other parts"
        sums = self._sums(region)
        with self.graph.inserting_before(self.graph.output_node()):
            for node in sorted(region | sums, key=self.place.__getitem__):
                if node in sums:
                    self._add_sum(node, sums[node])
                else:
                    self.pieces[node] = [*self._parts_of(node, *region[node])]
            for value in self.cut:
                self._join(value, region | sums)
        for node in sorted(region | sums, key=self.place.__getitem__, reverse=True):
            self.graph.erase_node(node)
        self._order()
        return self.graph

    def _sums(self, region: Collection[fx.Node]) -> dict[fx.Node, tuple[str, int]]:
        """Return the operations that sum over a dimension in parts, if that moves fewer bytes."""
        last = {n: self.place[c.last] for c in self.chains.found for n in (*c.head, *c.core)}
        sums: dict[fx.Node, tuple[str, int]] = {}
        for node in dict.fromkeys(u for v in self.cut for u in v.users if u not in region):
            factor = self.chains.factor(node)
            if factor is None or not flops(node) or factor not in self.chains.of_parts(node).reduce:
                continue
            read = [v for v in tensors_in(node) if v in self.cut]
            if 3 * (self.parts - 1) * bytes_of(node) <= 2 * sum(map(bytes_of, read)):
                sums[node] = factor, max(self.place[node], *(last[v] for v in read))
        return sums

    def _rows(self, size: int) -> list[tuple[int, int]]:
        """Return the first row of each part of a dimension, and how many it has."""
        ends = [size * k // min(self.parts, size) for k in range(min(self.parts, size) + 1)]
        return [(first, end - first) for first, end in zip(ends, ends[1:])]

    def _parts_of(self, node: fx.Node, factor: str, place: int) -> Iterator[fx.Node]:
        """Yield the parts of an operation: the same one, on parts of its operands."""
        rule, operands = self.chains.of_parts(node), tensors_in(node)
        size = rule.sizes[factor]
        for k, (_, rows) in enumerate(self._rows(size)):
            key = place, k, self.place[node], 1
            new = iter(  # a value may be two operands, with the factor in other dimensions
                self._part(v, dims.index((factor,)), k, key, node) if (factor,) in dims else v
                for v, dims in zip(operands, rule.operands)
            )
            args, kwargs = fx.map_arg(
                (node.args, dict(node.kwargs)),
                lambda n, new=new: n if n.meta.get("dtype") is None else next(new),
            )
            shape = tuple(
                rows if dims == (factor,) else n
                for n, dims in zip(node.meta["shape"], rule.results[0])
            )
            if rule.local.arguments is not None:
                shapes = tuple(
                    tuple(rows if d == (factor,) else n for n, d in zip(v.meta["shape"], dims))
                    for v, dims in zip(operands, rule.operands)
                )
                args, kwargs = rule.local.arguments(args, kwargs, Shapes(shapes, (shape,)))
            meta = {"shape": shape, "dtype": node.meta["dtype"], "dynamic": False, "unknown": None}
            if (step := node.meta.get("step")) is not None:
                share = rows / size
                meta["step"] = replace(step, payload=share * step.payload, sent=share * step.sent)
            yield self._add(node.target, args, kwargs, key, meta | origin_of(node), node.name)

    def _part(self, value: fx.Node, dim: int, k: int, key: Key, user: fx.Node) -> fx.Node:
        """Return a part of an operand: computed so, or a slice."""
        if value in self.pieces and self.cut[value] == dim:  # else another chain's parts
            return self.pieces[value][k]
        if (value, dim, k) not in self.slices:
            first, rows = self._rows(value.meta["shape"][dim])[k]
            shape = list(value.meta["shape"])
            shape[dim] = rows
            meta = {
                **origin_of(value),
                **{name: value.meta.get(name) for name in ("dtype", "source")},
                "backward": user.meta.get("backward", False),
                "shape": tuple(shape),
                "unknown": None,
            }
            self.slices[value, dim, k] = self._add(
                aten.narrow.default, (value, dim, first, rows), {}, (*key[:3], 0), meta, value.name
            )
        return self.slices[value, dim, k]

    def _add_sum(self, node: fx.Node, row: tuple[str, int]) -> None:
        total, *terms = self._parts_of(node, *row)
        for i, term in enumerate(terms, 2):
            key = row[1], self.parts, self.place[node], i
            total = self._add(aten.add.Tensor, (total, term), {}, key, total.meta, node.name)
        total.meta = _claims(node)
        node.replace_all_uses_with(total)

    def _join(self, value: fx.Node, region: Collection[fx.Node]) -> None:
        """Join a value's parts for its users outside, and for chains that cut it elsewhere."""
        users = [u for u in value.users if u not in region]
        if not users:
            return
        key = min(self.keys[u][0] for u in users), -1, self.place[value], 0
        args = self.pieces[value], self.cut[value]
        joined = self._add(aten.cat.default, args, {}, key, _claims(value), value.name)
        joined.meta["backward"] = all(u.meta.get("backward", u.op == "output") for u in users)
        for user in users:
            user.replace_input_with(value, joined)

    def _add(
        self, target: Any, args: tuple, kwargs: dict, key: Key, meta: dict, name: str
    ) -> fx.Node:
        node = add_node(self.graph, "call_function", target, args, kwargs, name)
        node.meta, self.keys[node] = dict(meta), key
        return node

    def _order(self) -> None:
        """Order the graph by keys, operands before users; random numbers stay in their order."""
        end, nodes = self.graph.output_node(), [*self.graph.nodes]
        inner = [n for n in nodes if n.op != "placeholder" and n is not end]
        drawing = [n for n in inner if draws(n.target)]
        inner_set = {*inner}
        before = {n: {x for x in n.all_input_nodes if x in inner_set} for n in inner}
        for one, other in zip(drawing, drawing[1:]):
            before[other].add(one)
        after: dict[fx.Node, list[fx.Node]] = {n: [] for n in inner}
        for node, needed in before.items():
            for x in needed:
                after[x].append(node)
        missing = {n: len(needed) for n, needed in before.items()}
        number = {n: i for i, n in enumerate(inner)}
        ready = [(self.keys[n], number[n], n) for n in inner if not missing[n]]
        heapq.heapify(ready)
        while ready:
            _, _, node = heapq.heappop(ready)
            end.prepend(node)
            for user in after[node]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (self.keys[user], number[user], user))


def _claims(node: fx.Node) -> dict[str, Any]:
    """Return the metadata of a value that is computed in another way."""
    return {key: each for key, each in node.meta.items() if key not in ("step", "lies")}
