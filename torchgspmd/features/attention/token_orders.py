"""Assign blocks of tokens to devices, so that a mask leaves all of them the same work.

    documents   aaaabbcc|dddddddd                 tokens of devices 0 and 1
    work        10+3+3  | 36                      pairs that are seen
    exchanged   aaaabbdd|ccdddddd                 13+3+13 | 3+23: one block each

A table says which blocks see which. Where planning knows the mask, it has the table. Else the
program computes it in each run, and all devices find the same order (`order_in_run.py`). The search
begins with tokens in their own order, and in zigzag order. The busiest device exchanges a block
with one of the least busy, as long as its work shrinks. Of all orders on the way, the one with the
smallest time counts: the rows that travel, and the work of the busiest device as bytes that are
sent meanwhile.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

# Blocks that a device has, at most; devices with which the busiest one may exchange.
BLOCKS, PARTNERS = 8, 4
# Names for positions in an expression, whose own names count from t0.
POSITIONS = {"q": "t900000", "k": "t900001"}
IN_ORDER = "t90000"  # Is in each expression for tokens in another order.


class TokenOrder(NamedTuple):
    """An order of `rows` tokens for so many shards.

    blocks: which block of tokens is at each place. (): zigzag order, as `op.zigzag` makes it.
    in_run: the mask's buffers and expression, its positions b and h, and the pairs that a device
    computes while a row travels. Then each run computes the blocks, and `blocks` has their number.
    """

    shards: int
    rows: int
    blocks: tuple[int, ...] = ()
    in_run: tuple[Any, ...] = ()

    def starts(self) -> Tensor:
        """Return where each block begins in the sequence."""
        return torch.tensor(self.blocks, device="cpu") * (self.rows // len(self.blocks))


class TokenDim(NamedTuple):
    """The dimension of a value along which tokens lie. outer: the sequences along it."""

    value: fx.Node
    dim: int
    outer: int


class Tokens(NamedTuple):
    """Holds tokens in one order: a factor of an operation, or (factor "") causal attention."""

    node: fx.Node
    factor: str
    outer: int


def in_blocks(x: Tensor, dim: int, outer: int, blocks: Tensor) -> Tensor:
    """Put blocks of rows along a dimension into another order.

    outer: the number of sequences along the dimension.
    """
    sizes, at = ((outer, len(blocks), -1), dim + 1) if outer > 1 else ((len(blocks), -1), dim)
    return x.unflatten(dim, sizes).index_select(at, blocks).flatten(dim, at + 1)


def blocks_of(rows: int, shards: int) -> int:
    """Return how many blocks of equal size a device's tokens are; 0 if it cannot have two."""
    sizes = (m for m in range(BLOCKS, 1, -1) if rows % (m * shards) == 0)
    return next(sizes, 0)


def orders(seen: Tensor, pairs: Tensor, shards: int, price: float) -> list[tuple[int, ...]]:
    """Return the best order from each start. seen, pairs: which blocks see which, how much.

    price: the pairs that are computed while a block travels.
    """
    place = torch.arange(len(seen), device="cpu")
    paired = torch.where(place % 2 == 0, place // 2, len(seen) - 1 - place // 2)
    search = _Search(seen, pairs.sum(1), price)
    return [search.best(start.view(shards, -1)) for start in (place, paired)]


def best_order(seen: Tensor, pairs: Tensor, shards: int, price: float) -> Tensor:
    """Return the order with the smallest time; see `orders`."""
    search = _Search(seen, pairs.sum(1), price)
    found = [torch.tensor(x, device="cpu") for x in orders(seen, pairs, shards, price)]
    return min(found, key=lambda blocks: search.cost(blocks.view(shards, -1)))


class _Search(NamedTuple):
    """seen [blocks, blocks]; work [blocks]; price: of a block that travels, in pairs."""

    seen: Tensor
    work: Tensor
    price: float

    def cost(self, owned: Tensor) -> float:
        """Return an order's time, in pairs. owned: each device's blocks [shards, blocks]."""
        needed = self.seen[owned].any(1)
        needed.scatter_(1, owned, False)
        sent = needed.sum(0)[owned].sum(1)
        most = max(int(needed.sum(1).max()), int(sent.max()))
        return most * self.price + float(self.work[owned].sum(1).max())

    def best(self, owned: Tensor) -> tuple[int, ...]:
        best, least = owned, self.cost(owned)
        for _ in range(4 * len(owned)):
            changed = self._exchanged(owned)
            if changed is None:
                break
            owned, cost = changed, self.cost(changed)
            if cost < least:
                best, least = owned, cost
        return tuple(best.sort(1).values.flatten().tolist())

    def _exchanged(self, owned: Tensor) -> Tensor | None:
        """Exchange a block between the busiest device and another; None if that does not help."""
        load = self.work[owned].sum(1)
        order = load.argsort().tolist()
        most, found = order[-1], []
        for other in order[: min(PARTNERS, len(order) - 1)]:
            mine, theirs = owned[most], owned[other]
            moved = self.work[mine].view(-1, 1) - self.work[theirs]
            busier = torch.maximum(load[most] - moved, load[other] + moved)
            rows = self._needed(mine, theirs) + self._needed(theirs, mine).T
            cost = torch.where(busier < load[most], busier + rows * self.price, torch.inf)
            at = int(cost.argmin())
            found.append((float(cost.flatten()[at]), other, *divmod(at, cost.shape[1])))
        cost, other, i, j = min(found)
        if cost == torch.inf:
            return None
        owned = owned.clone()
        owned[most, i], owned[other, j] = owned[other, j].clone(), owned[most, i].clone()
        return owned

    def _needed(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """Return how many foreign blocks a device needs, without mine[i] but with theirs[j]."""
        count = len(mine)
        others = ~torch.eye(count, dtype=torch.bool, device="cpu")
        rest = torch.stack([self.seen[mine[keep]].any(0) for keep in others])  # [i, blocks]
        needed = rest.unsqueeze(1) | self.seen[theirs]  # [i, j, blocks]
        own = torch.zeros(count, count, len(self.work), dtype=torch.bool, device="cpu")
        for i, keep in enumerate(others):
            own[i, :, mine[keep]] = True
        own[:, torch.arange(count, device="cpu"), theirs] = True
        return (needed & ~own).sum(-1)


def in_order(functions: Sequence[Any], order: TokenOrder, starts: Any) -> list[Any]:
    """Return flex_attention's buffers and expressions for tokens in another order.

    starts: a buffer, where each block of tokens begins in the sequence.
    """
    buffers, *texts = functions
    name = f"u{len(buffers)}"
    return [[*buffers, starts], *(_InOrder(order, name).of(text) for text in texts)]


class _InOrder(ast.NodeTransformer):
    """Replaces places by the positions of the tokens there, which are computed once."""

    def __init__(self, order: TokenOrder, starts: str) -> None:
        self.width, self.starts, self.known = order.rows // len(order.blocks), starts, set[str]()

    def of(self, text: str) -> str:
        self.known.clear()
        return ast.unparse(self.visit(ast.parse(text, mode="eval"))) if text else ""

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id not in POSITIONS:
            return node
        name = POSITIONS[node.id]
        if name in self.known:
            return ast.Name(name)
        self.known.add(name)
        block = f"aten.floor_divide.default({node.id}, {self.width})"
        within = f"aten.remainder.Scalar({node.id}, {self.width})"
        text = f"({name} := aten.add.Tensor(aten.index.Tensor({self.starts}, [{block}]), {within}))"
        return ast.parse(text, mode="eval").body
