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

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...compat.private_apis import OpOverload
from ...fx_passes.expand.split_fused import axes_along
from ...fx_passes.ir import Rules
from ...fx_passes.propagate.layouts import Layouts
from .flex_op import Flex
from .ring_rows import pieces_of, rows_seen
from .tiles import Place

_CPU = torch.device("cpu")
# The operators, and the index of their queries. Buffers, expressions and the scale follow values.
FLEX = {
    torch.ops.torchgspmd.flex_attention.default: 0,
    torch.ops.torchgspmd.flex_attention_backward.default: 1,
}


class Masks:
    """The masks of a graph, as far as planning knows them. constants: has the graph's constants."""

    def __init__(self, constants: nn.Module) -> None:
        self.constants = constants
        self.known: dict[fx.Node, Any] = {}

    def share(self, node: fx.Node, n: int) -> float:
        """Return the part of other devices' keys that n devices send each other, at most."""
        ring = self.ring(node, n)
        return 1.0 if ring is None else ring.share()

    def ring(self, node: fx.Node, n: int) -> _Ring | None:
        """Return a call under a mask along n devices, or None."""
        if node.target not in FLEX or n == 1 or node.meta.get("dynamic"):
            return None
        q, k, v = (node.args[FLEX[node.target] + i].meta["val"] for i in range(3))
        at = 3 + 3 * FLEX[node.target]
        buffers, mask, score, gradient = node.args[at : at + 4]
        values = [_value(x, self.constants, self.known) for x in buffers]
        return _Ring(q, k, v, Flex(values, mask, score, gradient), n) if mask else None


def price_masks(
    graph: fx.Graph, layouts: Layouts, rules: Rules, masks: Masks, flops_per_byte: float
) -> bool:
    """Add prices to the calls in a graph, in place; return whether there are any.

    flops_per_byte: FLOPs of a device while it sends a byte.
    """
    priced = False
    for op in [op for op in rules.ops(graph) if op.node.target in FLEX]:
        node, cuts = op.node, {*axes_along(op, "s", layouts)}
        axes = cuts.pop() if len(cuts) == 1 else ()
        count = layouts.mesh.count(axes)
        ring = masks.ring(node, count)
        if ring is None or (share := ring.share()) >= 1:
            continue
        node.args = (*node.args, share + ring.waiting() / flops_per_byte)
        priced = True
    return priced


class _Ring(NamedTuple):
    """Queries, keys and values over all devices, a mask, and the number of devices."""

    q: Tensor
    k: Tensor
    v: Tensor
    change: Flex
    n: int

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

    def share(self) -> float:
        """Return the part of other devices' keys that a device sends, or receives, at most."""
        seen = rows_seen(self.change, self.place, self.shape, self.n, _CPU)
        counts = [
            [0 if i == j else rows.stop - rows.start for j, rows in enumerate(blocks)]
            for i, blocks in enumerate(seen)
        ]
        most = max(map(sum, (*counts, *zip(*counts))))
        return most / ((self.n - 1) * self.shape[-1])

    def waiting(self) -> float:
        """Return the FLOPs for which a device waits for the busiest, per byte of others' keys."""
        queries, keys = pieces_of(self.place, self.shape, self.n)
        flat = [[piece for pieces in each for piece in pieces] for each in (queries, keys)]
        seen = self.change.blocks(self.shape, self.place, flat[0], flat[1], _CPU)
        assert seen is not None  # there is a mask
        sizes = [torch.tensor(each, device=_CPU).diff()[:, 0] for each in flat]
        # Of a block that is seen in part, half the pairs.
        pairs = (seen.some.double() + seen.whole) / 2 * sizes[0].view(-1, 1) * sizes[1]
        work = [float(part.sum()) for part in pairs.split([len(pieces) for pieces in queries])]
        flops = 2 * self.q[..., 0, 0].numel() * (self.q.shape[-1] + self.v.shape[-1])
        others = (self.k.nbytes + self.v.nbytes) * (self.n - 1) / self.n
        return (max(work) - sum(work) / self.n) * flops / others


def _value(node: fx.Node, constants: nn.Module, known: dict[fx.Node, Any]) -> Any:
    """Return a node's value on the CPU if it follows from constants alone, else None."""
    if node not in known:
        known[node] = None
        if node.op == "get_attr":
            value = getattr(constants, str(node.target), None)
            if isinstance(value, Tensor) and not value.is_meta:
                known[node] = value.cpu()
        elif node.op == "call_function" and _is_pure(node.target):
            operands = {x: _value(x, constants, known) for x in node.all_input_nodes}
            if not any(x is None for x in operands.values()):
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
                here = {"device": torch.device("cpu")} if "device" in kwargs else {}
                known[node] = node.target(*args, **kwargs | here)
    return known[node]


def _is_pure(target: Any) -> bool:
    """Return whether an operation follows from its arguments, and changes none."""
    if target is operator.getitem or not isinstance(target, OpOverload):
        return target is operator.getitem
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return target.namespace in ("aten", "prims") and not draws and not target._schema.is_mutable
