"""Operations whose strategies `partition` changes together, since none of them gains by changing alone.

    %a = einsum(...);  %b = embedding_backward(...);  %c = reshape(%b);  %d = add(%a, %c)

is one sum: its summands, made by einsum and embedding_backward, are added up and nothing else, so that one reduction
does for all of them. A chain is a sequence of operations on one tensor each, like reshape and transpose.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from .graph import Op


@dataclass(frozen=True)
class Region:
    """ops in program order (of a sum: those that make the summands, then those that add them up). values: what flows
    between them, with the result `value`."""
    ops: tuple[Op, ...]
    values: frozenset[fx.Node]
    value: fx.Node


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


def _collect(root: Op, value: fx.Node, makers: Mapping[fx.Node, Op], order: Mapping[fx.Node, int]) -> Region | None:
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
    return Region((*sorted(summands.values(), key=lambda op: order[op.node]), *by_order), frozenset(values), value)


def chains(ops: Mapping[fx.Node, Op]) -> list[Region]:
    """The longest sequences of at least two operations of one operand and one result, each result used once."""
    found = []
    for op in ops.values():
        if _links(op) and not _links(ops.get(op.operands[0])):
            chain = [op]
            while len(chain[-1].results[0].users) == 1 and _links(after := ops.get(next(iter(chain[-1].results[0].users)))):
                chain.append(after)
            if len(chain) > 1:
                found.append(Region(tuple(chain), frozenset(o.results[0] for o in chain), chain[-1].results[0]))
    return found


def _links(op: Op | None) -> bool:
    return op is not None and len(op.operands) == len(op.results) == 1 and op.node.meta.get("mark") is None
