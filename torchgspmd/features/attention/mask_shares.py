"""Price the keys that a mask leaves to send, where planning knows it.

given    %y = flex_attention(%q, %k, %v, [%documents], "aten.eq.Tensor(...)", ...)    queries: seq
priced   %y = flex_attention(%q, %k, %v, [%documents], "aten.eq.Tensor(...)", ..., 0.3)
needs    a propagated graph, rules
ensures  `ring_keys` sends rows round a ring; the partition keeps the queries' axis if that is least

Known are positions, and buffers that are constants or computed from constants. Which rows travel is
decided when the program runs, by ring_rows.py: buffers may have other values then. The price is
relative to a gather. It counts the rows, and the time in which devices wait for the one that
computes most, as bytes that are sent meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...fx_passes.expand.split_fused import axes_along
from ...fx_passes.ir import Rules
from ...fx_passes.propagate.layouts import Layouts
from .flex_op import BACKWARDS, Flex, flex_attention
from .order_in_run import is_pure, pairs_of
from .ring_rows import pieces_of, rows_seen, size_of_runs
from .tiles import Place
from .token_orders import IN_ORDER, TokenOrder, blocks_of, in_order, orders

_CPU = torch.device("cpu")
OWN = "tokens in their own order, which takes least time"
UNORDERED = "tokens in their own order, since their mask is known in a run alone"
IN_RUN = "blocks of tokens in an order that each run computes from the mask"
# Of a mask that only a run knows, how much longer the busiest device computes than the mean, in
# parts of the mean of all pairs: documents leave half of them, and some device twice its share.
UNKNOWN = 0.5
Pieces = list[tuple[int, int]]
# The operators, and the index of their queries. Buffers, expressions and the scale follow values.
FLEX: dict[Any, int] = {
    flex_attention._opoverload: 0,
    **{op._opoverload: 1 for op in BACKWARDS},
}


class Masks:
    """The masks of a graph, as far as planning knows them.

    constants: has the graph's constants. flops_per_byte: FLOPs of a device while it sends a byte.
    """

    def __init__(self, constants: nn.Module, flops_per_byte: float) -> None:
        self.constants, self.flops_per_byte = constants, flops_per_byte
        self.known: dict[fx.Node, Any] = {}
        self.rings: dict[tuple[Any, ...], MaskedRing] = {}

    def add(self, value: Tensor, device: torch.device) -> str:
        """Add a constant; return its name, which is the same on every rank."""
        name = "token_" + sha256(repr(value.tolist()).encode()).hexdigest()[:12]
        # A plan may be for devices that this machine lacks.
        is_available = getattr(getattr(torch, device.type, None), "is_available", bool)
        self.constants.register_buffer(name, value.to(device) if is_available() else value)
        return name

    def share(self, node: fx.Node, n: int) -> float:
        """Return the part of other devices' keys that n devices send each other, at most."""
        ring = self.ring(node, n)
        return 1.0 if ring is None else ring.share

    def ring(self, node: fx.Node, n: int) -> MaskedRing | None:
        """Return a call under a mask along n devices, or None."""
        if node.target not in FLEX or n == 1 or node.meta.get("dynamic"):
            return None
        q, k, v = (node.args[FLEX[node.target] + i].meta["val"] for i in range(3))
        at = 3 + 3 * FLEX[node.target]
        buffers, *texts = node.args[at : at + 4]
        values = [_value(x, self.constants, self.known) for x in buffers]
        if not texts[0]:
            return None
        sizes = [(tuple(x.shape), x.dtype) for x in (q, k, v)]
        key = (*texts, *map(id, values), *sizes, n)
        new = MaskedRing(q, k, v, Flex(values, *texts), n, self.flops_per_byte)
        return self.rings.setdefault(key, new)

    def set_price(self, node: fx.Node, n: int) -> bool:
        """Add the price to a call along n devices, if the mask leaves keys out."""
        ring, last = self.ring(node, n), 8 + 3 * FLEX[node.target]
        if ring is None or ring.share >= 1 and len(node.args) == last:
            return False
        node.args = (*node.args[:last], ring.price if ring.share < 1 else 1.0)
        return True


def price_masks(graph: fx.Graph, layouts: Layouts, rules: Rules, masks: Masks) -> bool:
    """Add prices to the calls in a graph, in place; return whether there are any."""
    priced = False
    for op in [op for op in rules.ops(graph) if op.node.target in FLEX]:
        cuts = {*axes_along(op, "s", layouts)}
        axes = cuts.pop() if len(cuts) == 1 else ()
        priced |= masks.set_price(op.node, layouts.mesh.count(axes))
    return priced


@dataclass(frozen=True, eq=False)
class MaskedRing:
    """Queries, keys and values over all devices, a mask, and the number of devices.

    flops_per_byte: FLOPs of a device while it sends a byte.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    change: Flex
    n: int
    flops_per_byte: float

    @property
    def shape(self) -> tuple[int, ...]:
        """A device's sizes [b, heads of keys, groups, queries, keys]."""
        q, k = self.q, self.k
        local = (-(-x.shape[-2] // self.n) for x in (q, k))
        return (*k.shape[:-2], q.shape[-3] // k.shape[-3], *local)

    @property
    def place(self) -> Place:
        whole = (*self.shape[:3], self.q.shape[-2], self.k.shape[-2])
        return Place((0,) * 5, whole)

    @cached_property
    def share(self) -> float:
        """The part of other devices' keys that a device sends, or receives, at most."""
        seen = rows_seen(self.change, self.place, self.shape, self.n, _CPU)
        counts = [
            [0 if i == j else size_of_runs(runs) for j, runs in enumerate(blocks)]
            for i, blocks in enumerate(seen)
        ]
        most = max(map(sum, (*counts, *zip(*counts))))
        return most / ((self.n - 1) * self.shape[-1])

    @cached_property
    def price(self) -> float:
        """The time for keys that travel, and for the busiest device, relative to a gather."""
        mean = sum(self.work) / self.n
        waiting = max(self.work) - mean
        if not self.change.is_known:
            waiting = max(waiting, UNKNOWN * mean)
        return self.share + waiting * self.rows_per_pair / ((self.n - 1) * self.shape[-1])

    @cached_property
    def work(self) -> list[float]:
        """The pairs that each device computes."""
        queries, keys = pieces_of(self.place, self.shape, self.n)
        flat = [[piece for pieces in each for piece in pieces] for each in (queries, keys)]
        _, pairs = self._pairs(*flat)
        return [float(part.sum()) for part in pairs.split([len(pieces) for pieces in queries])]

    def in_run(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the operands with which a run computes an order; see TokenOrder."""
        at = 3 + 3 * FLEX[node.target]
        buffers, mask = node.args[at : at + 2]
        return (*(tuple(buffers), mask), *self.q.shape[:2], 1 / self.rows_per_pair)

    def described(self) -> str:
        """Return how tokens are divided, for a plan's summary."""
        if not self.change.is_known:
            return IN_RUN if IN_ORDER in self.change.mask else UNORDERED
        most = max(self.work) * self.n / (sum(self.work) or 1.0)
        order = "blocks of tokens ordered by their work" if IN_ORDER in self.change.mask else OWN
        return f"{order}; the busiest device computes {most:.2f} of the mean"

    @property
    def rows_per_pair(self) -> float:
        """How many rows of keys and values travel while a pair is computed."""
        flops = 2 * self.q[..., 0, 0].numel() * (self.q.shape[-1] + self.v.shape[-1])
        row = (self.k.nbytes + self.v.nbytes) / self.k.shape[-2]
        return flops / (self.flops_per_byte * row)

    def _pairs(self, queries: Pieces, keys: Pieces) -> tuple[Tensor, Tensor]:
        """Return which pieces see which, and how many pairs: half of a block seen in part."""
        seen = self.change.blocks(self.shape, self.place, queries, keys, _CPU)
        assert seen is not None  # there is a mask
        return seen.some, pairs_of(seen, queries, keys)

    @cached_property
    def balanced(self) -> tuple[TokenOrder, float] | None:
        """The cheapest order of tokens and its price, or None."""
        rows = self.q.shape[-2]
        count = blocks_of(rows, self.n) * self.n
        if not count or rows != self.k.shape[-2]:
            return None
        if not self.change.is_known:
            # A run finds an order that leaves hardly anybody to wait.
            return TokenOrder(self.n, rows, tuple(range(count))), self.share
        width = rows // count
        pieces = [(i, i + width) for i in range(0, rows, width)]
        seen, pairs = self._pairs(pieces, pieces)
        if bool((pairs == pairs[0, 0]).all()):
            return None
        found: dict[TokenOrder, float] = {}
        for blocks in orders(seen, pairs, self.n, width / self.rows_per_pair):
            order = TokenOrder(self.n, rows, blocks)
            functions = in_order(self.change.functions, order, order.starts())
            found[order] = replace(self, change=Flex(*functions)).price
        return min(found.items(), key=lambda item: item[1])


def _value(node: fx.Node, constants: nn.Module, known: dict[fx.Node, Any]) -> Any:
    """Return a node's value on the CPU if it follows from constants alone, else None."""
    if node not in known:
        known[node] = None
        if node.op == "get_attr":
            value = getattr(constants, str(node.target), None)
            if isinstance(value, Tensor) and not value.is_meta:
                known[node] = value.cpu()
        elif node.op == "call_function" and is_pure(node.target):
            operands = {x: _value(x, constants, known) for x in node.all_input_nodes}
            if not any(x is None for x in operands.values()):
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
                here = {"device": torch.device("cpu")} if "device" in kwargs else {}
                known[node] = node.target(*args, **kwargs | here)
    return known[node]
