"""Reorder tokens, so that all devices have the same work under a mask.

before   %x = embedding(%w, %tokens)                 tokens: seq
         %q, %k, %v = ... %x
         %y, %lse = attention(%q, %k, %v, True, 0.1)
after    %z = zigzag(%tokens, 0, 4)                  four shards; written as views, a flip, a stack
         %x = embedding(%w, %z)
         %q, %k, %v = ... %x
         %y, %lse = zigzag_attention(%q, %k, %v, 0.1, 4, ...)
         %z = index_select(%tokens, 0, %token_blocks)     under another mask that planning knows
         %y, %lse = flex_attention(..., [..., %token_starts], "... u1[q // 64] + q % 64 ...")
         %blocks = token_order(...)              and under one that a run knows (order_in_run.py)
needs    a propagated graph, rules
source   ours, with the order that Ring Flash Attention uses (op.py)

A norm, a product or a loss has the same rule for all tokens, so it takes them in any order. The
values between attention and the program's inputs may therefore be in zigzag order as well. Devices
then exchange tokens, not queries. A minimum cut separates the two orders. It lies between causal
attention and operations that need tokens in their own order: inputs, outputs, positions. A value on
the cut is exchanged. Attention on the natural side costs the time that devices wait for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import copy_node, origin_of
from ...fx_passes.expand.split_fused import axes_along
from ...fx_passes.expand.undivided import Cut
from ...fx_passes.ir import Op, Rules, add_mark, runs, tensors_of, values
from ...fx_passes.partition.cost_constants import CostConstants
from ...fx_passes.partition.cost_model import local_bytes
from ...fx_passes.propagate.layouts import Layouts
from ...layout.open_sizes import OpenSize
from ...rules import trace
from ...rules.custom_ops.loops import NEXT
from ...rules.notation import Balance, Dims
from ...shard_spec import ShardSpec
from .mask_shares import FLEX, Masks
from .op import zigzag
from .order_in_run import add_order
from .ring_keys import RINGS, cheapest_loans, is_hidden
from .rule import instead
from .token_orders import TokenDim, TokenOrder, Tokens, in_blocks

# The sides of a cut.
NATURAL, ZIGZAG = "natural", "zigzag"


def balance(
    graph: fx.Graph,
    layouts: Layouts,
    rules: Rules,
    constants: CostConstants,
    masks: Masks,
    lends: bool,
) -> bool:
    """Rewrite the graph in place; return whether anything changed.

    lends: late devices of a ring may lend queries to early ones.
    """
    changed = False
    ops = {op.node: op for op in rules.ops(graph)}
    orders = {
        node: order
        for node, op in ops.items()
        if op.rule.balance
        and (order := _order(op, op.rule.balance, layouts, constants, masks, lends))
    }
    for order in dict.fromkeys(order for order, _ in orders.values()):
        attention = {node: saving for node, (its, saving) in orders.items() if its == order}
        # One order at a time: lengths that differ have orders of their own, and never share tokens.
        changed |= _Reordering(graph, layouts, ops, order, constants, masks).run(attention)
    return changed


def _order(
    op: Op,
    balance: Balance,
    layouts: Layouts,
    constants: CostConstants,
    masks: Masks,
    lends: bool,
) -> tuple[TokenOrder, float] | None:
    """Return the order that balances an operation, and what it saves, in bytes on the wire.

    Fewer shards differ if another factor takes over some axes. The result is None if all have the
    same work, or if they cannot be halved.
    """
    cuts = {*axes_along(op, balance.factors[0], layouts)}
    if len(cuts) != 1:
        return None
    count, rows = layouts.mesh.count(cuts.pop()), op.rule.sizes[balance.factors[0]]
    if op.node.target in FLEX:
        return _masked_order(op, count, masks, layouts) if lends else None
    rest, part, ways = count, _shards_of_heads(op, count, layouts), op.rule.instead
    # Heads that take over axes leave fewer shards along the queries.
    if ways and ways.sent(count, part) <= ways.sent(count, 1):
        rest = count // part
    # Zigzag order has two chunks on each device, so both have to be whole numbers of rows.
    if rest == 1 or isinstance(rows, OpenSize) or rows % (2 * count):
        return None
    return TokenOrder(count, rows), _causal_saving(op, balance, rest, layouts, constants, lends)


def _shards_of_heads(op: Op, count: int, layouts: Layouts) -> int:
    """Return over how many of `count` shards heads may be divided in place of queries."""
    if op.rule.instead is None:
        return 1
    other = op.rule.instead.other
    taken = [layouts.mesh.count(axes) for axes in axes_along(op, other, layouts)]
    return math.gcd(op.rule.sizes.get(other, 1) // max(taken, default=1), count)


def _causal_saving(
    op: Op,
    balance: Balance,
    shards: int,
    layouts: Layouts,
    constants: CostConstants,
    lends: bool,
) -> float:
    """Return the last device's excess work, in bytes on the wire.

    In a ring late devices may lend queries to early ones, for fewer bytes.
    """
    result = next(v for v in op.results if v is not None)
    n = layouts.mesh.count(layouts.spec[result].sharding_axes)
    # The last device has all scores of its rows, an even share is about half of that.
    flops = balance.flops / n * (1 - 1 / shards)
    excess, ring = flops / constants.link_flops_per_byte, RINGS[op.node.target]
    keys = op.operands[ring.queries : ring.queries + 3]
    q, k, v = values = [x.meta["val"] for x in keys]
    if lends and is_hidden(q, k, v, shards, True, constants.link_flops_per_byte):
        local = [local_bytes(x, layouts.spec[y], layouts.mesh) for x, y in zip(values, keys)]
        excess = min(excess, max(0, cheapest_loans(ring, values, local, shards)[0]))
    return excess * runs(op.node)


def _masked_order(
    op: Op, count: int, masks: Masks, layouts: Layouts
) -> tuple[TokenOrder, float] | None:
    """Return the order for a mask that planning knows, unless heads take over for fewer bytes."""
    ring = masks.ring(op.node, count)
    found = ring and ring.balanced
    if ring is None or found is None:
        return None
    order, price = found
    part = _shards_of_heads(op, count, layouts)

    def least(price: float) -> float:
        ways = (instead(ring.q, ring.k, price).sent(count, p) for p in (1, part))
        return price * min(ways)

    # `instead` counts in the bytes of all keys and values, of which a device has a part.
    shares = [
        local_bytes(x.meta["val"], layouts.spec[x], layouts.mesh)
        for x in op.operands[FLEX[op.node.target] + 1 :][:2]
    ]
    saving = (least(ring.price) - least(price)) * sum(shares) * count
    order = order if ring.change.is_known else order._replace(in_run=ring.in_run(op.node))
    return (order, saving * runs(op.node)) if saving > 0 else None


class _Reordering:
    def __init__(
        self,
        graph: fx.Graph,
        layouts: Layouts,
        ops: dict[fx.Node, Op],
        order: TokenOrder,
        constants: CostConstants,
        masks: Masks,
    ) -> None:
        self.graph, self.layouts, self.ops, self.order = graph, layouts, ops, order
        self.constants, self.masks, self.cut = constants, masks, Cut()
        self.blocks: dict[bool, fx.Node] = {}
        self.attention: dict[fx.Node, Balance] = {}
        self.operands: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.added: dict[str, fx.Node] = {}
        self.exchanged: dict[tuple[fx.Node, TokenDim], fx.Node] = {}
        self.producers = {v: op for op in ops.values() for v in op.results if v is not None}
        self.users: dict[fx.Node, list[tuple[Op, int]]] = {v: [] for v in values(graph.nodes)}
        for op in ops.values():
            for i, value in enumerate(op.operands):
                self.users[value].append((op, i))

    def run(self, attention: dict[fx.Node, float]) -> bool:
        """Cut and rewrite; return whether any attention is balanced.

        attention: operations to balance, each with what that saves, in bytes on the wire.
        """
        rules = {node: self.ops[node].rule for node in attention}
        self.attention = {node: rule.balance for node, rule in rules.items() if rule.balance}
        begin = [Tokens(node, "", 1) for node in self.attention]
        for tokens in begin:
            self.cut.add(ZIGZAG, tokens, attention[tokens.node])
        places = self._add_values(begin)
        reordered = self.cut.first_side(ZIGZAG, NATURAL)
        chosen = [tokens.node for tokens in begin if tokens in reordered]
        if chosen and self.order.in_run:
            added = add_order(self.graph, self.layouts, self.order, chosen[0])
            if added is None:
                return False
            self.added["starts"], self.blocks = added
        for place in places:
            self._exchange(place, reordered)
        for node in chosen:
            starts = self.added.get("starts")
            if self.order.blocks and starts is None:
                starts = self._constant(self.order.starts(), node)
            node.target, node.args = self.attention[node].call(node.args, self.order, starts)
            if self.order.blocks:
                self.masks.set_price(node, self.order.shards)
        return bool(chosen)

    def _constant(self, value: Tensor, like: fx.Node) -> fx.Node:
        """Return a constant of the program, in front of its operations."""
        (x, *_) = tensors_of(like)
        name = self.masks.add(value, x.device)
        if name in self.added:
            return self.added[name]
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first):
            self.added[name] = node = self.graph.get_attr(name)
        node.meta = {**origin_of(like), "source": None, "backward": False}
        node.meta["val"] = x.new_empty(value.shape, dtype=value.dtype)
        self.layouts.spec[node] = ShardSpec.replicated(1)
        return node

    # --------------------------------------------------------------------------------- the cut

    def _add_values(self, begin: list[Tokens]) -> list[TokenDim]:
        seen, places, queue = set(begin), dict[TokenDim, None](), [*begin]
        while queue:
            for place in self._places(queue.pop()):
                if place in places:
                    continue
                places[place] = None
                ends = self._add_value(place)
                queue += [end for end in ends if end not in seen]
                seen.update(ends)
        return [*places]

    def _add_value(self, place: TokenDim) -> list[Tokens]:
        """Add the cost of exchanging a value's tokens; return the operations that hold them."""
        producer = self._producer(place)
        users = [(op.node, self._tokens(op, i, place)) for op, i in self.users[place.value]]
        users += [(user, NATURAL) for user in place.value.users if user.op == "output"]
        cost, any_user, all_users = self._cost(place), (place, "any"), (place, "all")
        # One exchange serves all users on the other side, so two nodes a value make it count once.
        self.cut.add(producer, all_users, cost)
        self.cut.add(any_user, producer, cost)
        first: dict[fx.Node, Any] = {}
        for user, tokens in users:
            # An infinite edge: a user has its tokens in the order in which it computes.
            self.cut.add(all_users, tokens, math.inf)
            self.cut.add(tokens, any_user, math.inf)
            self.cut.tie(first.setdefault(user, tokens), tokens)  # One exchange is for all of it.
            if user.target is NEXT or place.value not in user.all_input_nodes:
                self.cut.tie(producer, tokens)  # All iterations of a loop have one order.
        ends = (producer, *(tokens for _, tokens in users))
        return [end for end in ends if isinstance(end, Tokens)]

    def _cost(self, place: TokenDim) -> float:
        """Return the cost of exchanging a value's tokens, in bytes on the wire."""
        spec, mesh = self.layouts.spec[place.value], self.layouts.mesh
        size = local_bytes(place.value.meta["val"], spec, mesh)
        count = mesh.count(spec.dims[place.dim])
        # In zigzag order a device keeps one of its two chunks; for others tokens are gathered.
        sent = 0.0 if count == 1 else size / 2 if count == self.order.shards else size
        sent *= count - 1 if self.order.blocks else 1
        return (sent + size / self.constants.memory_per_byte) * runs(place.value)

    def _producer(self, place: TokenDim) -> object:
        op = self.producers.get(place.value)
        if op is None:
            return NATURAL
        at = len(op.operands) + op.results.index(place.value)
        return self._tokens(op, at, place)

    def _tokens(self, op: Op, tensor: int, place: TokenDim) -> object:
        """Return the holder of an operation's tokens; NATURAL if it needs their positions."""
        factor, outer = self._factor(op, tensor, place)
        if op.node in self.attention and factor in self.attention[op.node].factors and outer == 1:
            return Tokens(op.node, "", 1)
        rule = op.rule
        # Along these factors results depend on positions, so tokens keep their own order.
        bound = rule.replicated | rule.special | rule.windowed | rule.chosen
        if factor == "" or factor in bound or op.node.meta.get("dynamic") or not rule.described:
            return NATURAL
        return Tokens(op.node, factor, outer)

    def _factor(self, op: Op, tensor: int, place: TokenDim) -> tuple[str, int]:
        """Return the factor that has all tokens along a dimension, and its sequences, or ""."""
        dims: Dims = (*op.rule.operands, *op.rule.results)[tensor]
        # The dimension is [outer, rows, inner]; one factor has to hold all rows.
        inner = place.value.meta["val"].shape[place.dim] // (place.outer * self.order.rows)
        before = 1
        for factor in dims[place.dim]:
            size = op.rule.sizes[factor]
            after = math.prod(op.rule.sizes[f] for f in dims[place.dim]) // (before * size)
            if place.outer % before == 0 and inner % after == 0:
                outer = place.outer // before
                if outer * self.order.rows * (inner // after) == size:
                    return factor, outer
            before *= size
        return "", 1

    def _places(self, tokens: Tokens) -> Iterator[TokenDim]:
        op = self.ops[tokens.node]
        factors = (tokens.factor,)
        if tokens.factor == "":
            factors = self.attention[tokens.node].factors
        tensors = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results))
        for value, dims in tensors:
            for d, names in enumerate(dims):
                for i, name in enumerate(names):
                    if value is not None and name in factors:
                        before = math.prod(op.rule.sizes[f] for f in names[:i])
                        yield TokenDim(value, d, before * tokens.outer)

    # -------------------------------------------------------------------------- exchanges

    def _exchange(self, place: TokenDim, reordered: set[Any]) -> None:
        """Exchange a value's tokens for the operations on the other side."""
        here, value = self._producer(place) in reordered, place.value
        if here:
            value.meta.pop("captured", None)  # its rows are not in the program's order
        users = [
            op.node
            for op, i in self.users[value]
            if (self._tokens(op, i, place) in reordered) != here
        ]
        users += [user for user in value.users if user.op == "output" and here]
        for user in dict.fromkeys(users):
            now = self.operands.get((user, value), value)
            self.operands[user, value] = self._exchanged(now, place, users, here)
            user.replace_input_with(now, self.operands[user, value])

    def _exchanged(
        self, value: fx.Node, place: TokenDim, users: list[fx.Node], back: bool
    ) -> fx.Node:
        key = value, place
        if key not in self.exchanged:
            # An exchange belongs to the backward only if all its users do.
            after, backward = value, all(user.meta.get("backward", False) for user in users)
            # Placeholders and constants stay together at the beginning.
            while after.next.op in ("placeholder", "get_attr"):
                after = after.next
            if self.blocks and after < self.added["starts"]:
                after = self.added["starts"]
            with self.graph.inserting_before(after.next):
                self.exchanged[key] = self._emit_exchange(value, place, backward, back)
        return self.exchanged[key]

    def _emit_exchange(
        self, value: fx.Node, place: TokenDim, backward: bool, back: bool
    ) -> fx.Node:
        """Add the operations that exchange tokens. back: into their own order.

        Keys in zigzag order get a mark. Without it they would be gathered first, which sends less,
        and could not travel round a ring.
        """
        meta = {"source": None, **origin_of(value), "backward": backward}
        spec, producer = self.layouts.spec[place.value], self.producers.get(place.value)
        if producer is not None and self._keys(producer, place):
            value = add_mark(self.graph, value, spec, self.layouts.mesh, meta)
        operands, function, rest = [value], zigzag, (self.order.shards, place.outer)
        if blocks := self.order.blocks:
            at = torch.tensor(blocks, device="cpu")
            constant = self.blocks.get(back)
            constant = constant or self._constant(at.argsort() if back else at, value)
            operands.append(constant)
            function, rest = in_blocks, (place.outer, operands[1].meta["val"])
        inner = trace(function, (value.meta["val"], place.dim, *rest), {})
        assert isinstance(inner, fx.Graph)
        new = dict(zip(inner.find_nodes(op="placeholder"), operands))
        for step in inner.nodes:
            if step.op == "call_function":
                new[step] = copy_node(self.graph, step, new.__getitem__)
                new[step].meta = {**meta, "val": step.meta["val"]}
        result = new[inner.output_node().args[0]]
        if blocks or any(self._keys(op, place) for op, _ in self.users[place.value]):
            result = add_mark(self.graph, result, spec, self.layouts.mesh, meta)
        return result

    def _keys(self, op: Op, place: TokenDim) -> bool:
        """Return whether a place has keys, or their gradient, in balanced attention."""
        rows = self.attention[op.node].factors[1:] if op.node in self.attention else ()
        tensors = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results))
        return any(
            value is place.value and any(f in rows for f in dims[place.dim])
            for value, dims in tensors
        )
