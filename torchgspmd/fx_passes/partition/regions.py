"""Operations whose strategies `partition` changes together, since none of them gains by changing
alone.

    %a = einsum(...);  %b = embedding_backward(...);  %c = reshape(%b);  %d = add(%a, %c)

is one sum: its summands, made by einsum and embedding_backward, are added up and nothing else, so
that one reduction does for all of them. A chain is a sequence of operations on one tensor each,
like reshape and transpose, alone or with the contraction whose result goes through it. A body is
all that lies between contractions and marks, like the residual stream of a transformer with its
norms, forward and backward. A thread is all that one dimension runs through, contractions too, like
the heads from their projections to the one back.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import fx

from ..ir import Op

# different contractions that the heads of one layer run through, forward and backward, and some
# more
LAYER = 24
LOOP = 96  # contractions in all, of a few layers or of a loop
ROUNDS = 4  # of a loop, at least


@dataclass(frozen=True)
class Region:
    """ops in program order (of a sum: those that make the summands, then those that add them up).
    values: what flows between them, with the result `value`.
    """

    ops: tuple[Op, ...]
    values: frozenset[fx.Node]
    value: fx.Node


@dataclass(frozen=True, eq=False)
class Body:
    """ops in program order; classes: factors that run through the body, with the name of each one
    in the operations that have it.
    """

    ops: tuple[Op, ...]
    classes: tuple[Mapping[fx.Node, str], ...]


def adds(op: Op) -> bool:
    """Whether the result is pending if both operands are, as that of a sum of two values."""
    return len(op.operands) == 2 and passes(op)


def passes(op: Op) -> bool:
    """Whether the result is pending if all operands are."""
    return len(op.results) == 1 and frozenset(range(len(op.operands))) in op.rule.linear


def sums(ops: Mapping[fx.Node, Op]) -> list[Region]:
    """All sums of at least two summands of which each is used but once."""
    makers = {value: op for op in ops.values() for value in op.results if value is not None}
    order = {node: i for i, node in enumerate(ops)}
    found = []
    for value, op in makers.items():
        user = ops.get(next(iter(value.users))) if len(value.users) == 1 else None
        if passes(op) and (user is None or not passes(user)):
            total = _collect(op, value, makers, order)
            if total is not None:
                found.append(total)
    return found


def _collect(
    root: Op, value: fx.Node, makers: Mapping[fx.Node, Op], order: Mapping[fx.Node, int]
) -> Region | None:
    passing, summands, values, stack = [], {}, {value}, [root]
    while stack:
        op = stack.pop()
        passing.append(op)
        for operand in op.operands:
            maker = makers.get(operand)
            if maker is None or len(operand.users) > 1:
                return None
            values.add(operand)
            if passes(maker):
                stack.append(maker)
            else:
                summands[maker.node] = maker
    if not any(adds(op) for op in passing):
        return None
    by_order = sorted(passing, key=lambda op: order[op.node])
    return Region(
        (*sorted(summands.values(), key=lambda op: order[op.node]), *by_order),
        frozenset(values),
        value,
    )


def chains(ops: Mapping[fx.Node, Op]) -> list[Region]:
    """The longest sequences of at least two operations of one operand and one result, each result
    used once.
    """
    return [_chain(links) for links in _linked(ops) if len(links) > 1]


def sources(ops: Mapping[fx.Node, Op]) -> list[Region]:
    """Contractions, each with the sequence of such operations that its result goes through, if
    nothing else uses it.
    """
    makers = {
        op.results[0]: op
        for op in ops.values()
        if op.rule.contraction and len(op.results[0].users) == 1
    }
    return [
        _chain([makers[links[0].operands[0]], *links])
        for links in _linked(ops)
        if links[0].operands[0] in makers
    ]


def _chain(ops: list[Op]) -> Region:
    return Region(tuple(ops), frozenset(op.results[0] for op in ops), ops[-1].results[0])


def _linked(ops: Mapping[fx.Node, Op]) -> list[list[Op]]:
    found = []
    for op in ops.values():
        if _links(op) and not _links(ops.get(op.operands[0])):
            chain = [op]
            while len(chain[-1].results[0].users) == 1 and _links(
                after := ops.get(next(iter(chain[-1].results[0].users)))
            ):
                chain.append(after)
            found.append(chain)
    return found


def _links(op: Op | None) -> bool:
    return (
        op is not None
        and len(op.operands) == len(op.results) == 1
        and op.node.meta.get("mark") is None
    )


# ------------------------------------------------------------------------------------------ bodies


class _Classes:
    """Things that are found to be the same, one pair at a time."""

    def __init__(self):
        self.parent: dict = {}

    def find(self, thing: Hashable) -> Hashable:
        while (above := self.parent.setdefault(thing, thing)) != thing:
            self.parent[thing] = thing = self.parent[above]
        return thing

    def join(self, one: Hashable, other: Hashable) -> None:
        self.parent[self.find(one)] = self.find(other)

    def all(self) -> list[list]:
        found: dict = {}
        for thing in self.parent:
            found.setdefault(self.find(thing), []).append(thing)
        return list(found.values())


def bodies(ops: Mapping[fx.Node, Op]) -> list[Body]:
    """What is connected by values, of operations that have a choice and are no contractions; at
    least two of them.
    """
    inner = {node: op for node, op in _free(ops).items() if not op.rule.contraction}
    together, factors = _joined(inner)
    classes: dict[Hashable, list[Mapping[fx.Node, str]]] = {}
    for found in factors.all():
        classes.setdefault(together.find(found[0][0]), []).append(dict(found))
    return [
        Body(tuple(inner[node] for node in group), tuple(classes.get(together.find(group[0]), ())))
        for group in together.all()
        if len(group) > 1
    ]


def threads(ops: Mapping[fx.Node, Op]) -> list[Body]:
    """What one factor runs through, of operations that have a choice; at least two contractions, no
    more different ones than in a layer, and no more in all than in a short loop. Also through
    weights that the rounds of a loop share.

    Not through convolutions: between them images stay divided in space, and neighbours exchange
    rows.
    """
    free = {node: op for node, op in _free(ops).items() if not op.rule.halo}
    found: dict[frozenset, Body] = {}
    for through_weights in (False, True):
        for factors in map(dict, _joined(free, through_weights)[1].all()):
            contractions = [free[node].key for node in factors if free[node].rule.contraction]
            different = len(set(contractions))
            if (
                1 < len(contractions) <= LOOP
                and different <= LAYER
                and (not through_weights or len(contractions) >= ROUNDS * different)
            ):
                found.setdefault(
                    frozenset(factors.items()),
                    Body(tuple(op for node, op in free.items() if node in factors), (factors,)),
                )
    return list(found.values())


def _free(ops: Mapping[fx.Node, Op]) -> dict[fx.Node, Op]:
    return {
        node: op for node, op in ops.items() if op.rule.known and op.node.meta.get("mark") is None
    }


def _joined(ops: Mapping[fx.Node, Op], through_weights: bool = False) -> tuple[_Classes, _Classes]:
    """Operations that are connected by values, and factors by dimensions. through_weights: by
    inputs that like operations share, too.
    """
    makers = {
        value: (op, i)
        for op in ops.values()
        for i, value in enumerate(op.results)
        if value is not None
    }
    together, factors = _Classes(), _Classes()
    sharers: dict[tuple, Op] = {}
    for op in ops.values():
        together.find(op.node)
        for at, (value, dims) in enumerate(zip(op.operands, op.rule.operands)):
            if value in makers:
                maker, i = makers[value]
                together.join(maker.node, op.node)
                for made, used in zip(maker.rule.results[i], dims):
                    if made and used:  # the major ones: an axis shards both or none
                        factors.join((maker.node, made[0]), (op.node, used[0]))
            elif through_weights:
                other = sharers.setdefault((value, at, op.key), op)
                together.join(other.node, op.node)
                for used in filter(None, dims):
                    factors.join((other.node, used[0]), (op.node, used[0]))
    return together, factors
