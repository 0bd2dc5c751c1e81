"""Cut a loop between two iterations where they pass on least.

    ds = ds + dy[i] - b         cut behind the iteration: ds and b are carries, each reads both
    b = ds * gate[i]            cut between the lines: ds is the only one

    b = ds * gate[i + 1]        the loop with the other cut, from its last row to its first
    ds = ds + dy[i] - b

The backward of `state + (x - state) * gate` is such a loop. The cheapest cut is found among all
values that lead from carries to the next ones. Operations behind it run in the next iteration, on
rows of the one before: a device needs one row of its neighbor.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from ...compat.fx_nodes import add_node, copy_node, origin_of
from ...compat.operators import aten
from ...fx_passes.expand.undivided import Cut
from ...fx_passes.ir import Op, operands_of
from .recurrence import Carry, Recurrence, choice


class MovedCut(NamedTuple):
    """A recurrence with fewer carries. Its operations are those to add in front of the others.

    carries: the old ones -> their values in an iteration. before: new rows -> the rows that have
    their values in the iteration before.
    """

    found: Recurrence
    carries: dict[fx.Node, fx.Node]
    before: dict[fx.Node, fx.Node]


def move_cut(
    graph: fx.Graph, found: Recurrence, waiting: Collection[fx.Node], is_first: fx.Node
) -> MovedCut | None:
    """Return a recurrence with another cut; None if no cut passes on less.

    waiting: its carries, and all values that wait for one. found.rows has the other values that
    differ by iteration. is_first: a row that says whether an iteration is the first one.
    """
    cut = _least_values(found, waiting)
    if not cut:
        return None
    ops, size = [op for op in found.ops if op.results == (op.node,)], dict[fx.Node, float]()
    for op in ops:  # of the rows that a value needs
        below = sum(size.get(v, _size(v)) for v in {*op.operands} if v in found.rows)
        size[op.node] = min(below, _size(op.node))
    needed = dict.fromkeys(carry.again for carry in found.carries.values())
    copied = list[Op]()
    for op in reversed(ops):
        v = op.node
        is_smaller_above = v in found.rows and size[v] < _size(v)
        if v in needed and v not in cut and (v in waiting or is_smaller_above):
            needed |= dict.fromkeys(op.operands)
            copied.append(op)
    for op in copied:
        needed.pop(op.node, None)
    if any(v in waiting and v not in cut for v in needed):
        return None  # by an operation with several results
    moved = {v: _stand_in(graph, v) for v in needed if v in cut or v in found.rows}
    before = {moved[v]: v for v in moved if v not in cut}
    added = [_copied(graph, op, moved) for op in reversed(copied)]
    new = replace(found, ops=added, carries={moved[v]: Carry(None, v) for v in cut}, known={})
    carries, firsts = {}, list[Op]()
    for carry, (first, again) in found.carries.items():
        carries[carry] = value = moved.get(again, again)
        if not (found.vanishes(carry, found.begin) and new.vanishes(value, found.begin)):
            firsts.append(choice(graph, is_first, first, value))
            carries[carry] = firsts[-1].node
    again = {moved[v]: Carry(None, carries.get(v, v)) for v in cut}
    new = replace(new, ops=[*added, *firsts], carries=again, known={})
    return MovedCut(new, carries, before)


def _least_values(found: Recurrence, waiting: Collection[fx.Node]) -> list[fx.Node]:
    """Return the values of fewest bytes that all next carries follow from; none if these are least.

    Among equals, those nearest to the next carries, so that few operations move.
    """
    cut, agains = Cut(), {carry.again for carry in found.carries.values()}
    for value in waiting:
        cut.add((value, "read"), (value, "made"), _size(value))
        op = found.makers.get(value)
        for operand in op.operands if op and value not in found.carries else ():
            if operand in waiting:
                cut.add((value, "made"), (operand, "read"), math.inf)
    for carry, (_, again) in found.carries.items():
        cut.add((carry, "made"), "before", math.inf)
        cut.add("after", (again, "read"), math.inf)
    side = cut.first_side("after", "before")
    least = [v for v in waiting if (v, "read") in side and (v, "made") not in side]
    return least if sum(map(_size, least)) < sum(map(_size, agains)) else []


def _size(value: fx.Node) -> int:
    return value.meta["val"].nbytes


def _stand_in(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Add a node for a value of the iteration before. No operation reads it in the end."""
    node = add_node(graph, "call_function", aten.clone.default, (value,), {})
    node.meta = {**origin_of(value), "val": value.meta["val"]}
    return node


def _copied(graph: fx.Graph, op: Op, moved: dict[fx.Node, fx.Node]) -> Op:
    """Copy an operation into the next iteration."""
    operands = tuple(moved.get(v, v) for v in op.operands)
    node = copy_node(graph, op.node, dict(zip(operands_of(op.node), operands)).__getitem__)
    moved[op.node] = node
    return replace(op, node=node, operands=operands, results=(node,))
