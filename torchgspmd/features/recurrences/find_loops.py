"""Take the recurrences that torch's scan has made: loops whose rows are parts of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ...compat.operators import draws
from ...fx_passes.expand.undivided import Work
from ...fx_passes.ir import Op
from ...rules.custom_ops.loops import (
    CARRY,
    ENTRIES,
    EXITS,
    NEXT,
    ROW,
    TOTAL,
    end_of,
    mark_of,
    nests,
)
from .recurrence import Carry, Recurrence


@dataclass
class FlatLoop:
    """A loop in a flat graph. exits: in order."""

    found: Recurrence
    exits: list[fx.Node]


def loops_of(work: Work) -> Iterator[FlatLoop]:
    """Yield the loops that are in no other one, and that no value ends."""
    nest, inside = nests(work.graph), dict[str, list[fx.Node]]()
    for node in work.graph.nodes:
        loops = mark_of(node).nest if node.target in EXITS else nest[node]
        if loops and not loops[0].ends:
            inside.setdefault(str(loops[0]), []).append(node)
    ops = {op.node: op for op in work.ops}
    for nodes in inside.values():
        if all(len(nest[n]) < 2 for n in nodes) and (loop := _loop_of(nodes, ops)) is not None:
            yield loop


def _loop_of(nodes: list[fx.Node], ops: dict[fx.Node, Op]) -> FlatLoop | None:
    entries = [n for n in nodes if n.target in ENTRIES]
    exits = [n for n in nodes if n.target in EXITS]
    body = [ops[n] for n in nodes if n in ops and n.target not in ENTRIES and n.target not in EXITS]
    if not entries or not exits or any(map(_draws, nodes)):
        return None
    loop = mark_of(entries[0]).nest[-1]
    found = Recurrence(loop.length, loop.reverse, body)
    for entry in entries:
        mark, end = mark_of(entry), end_of(entry) if entry.target is CARRY else None
        if entry.target is ROW:
            found.rows[entry] = mark.value
        elif end is not None and (again := mark_of(end).again) is not None:
            found.carries[entry] = Carry(mark.value, again)
        else:
            return None
    return FlatLoop(found, exits)


def _draws(node: fx.Node) -> bool:
    return draws(node.target) or any(
        key in node.meta for key in ("draw", "loop", "dynamic", "other")
    )


def value_behind(node: fx.Node, rows: torch.Tensor, last: int) -> torch.Tensor:
    """Return a loop's exit. rows: its value in all iterations. last: the one that ends the loop."""
    if node.target is NEXT:
        return rows.select(0, last)
    return rows.sum(0, dtype=rows.dtype) if node.target is TOTAL else rows
