"""Random number seeds: one for each draw, which a repeated draw has, too.

    %u = uniform(%s, ...) of draw 0, %v = uniform(%t, ...) of draw 0 again:  %t is %s

In loop bodies the seeds for all iterations are drawn before the loop:

    %s = draw_seed() in loops 1x4/2x8;  %u = uniform(%s, ...)

becomes

    %a = draw_seeds([4, 8]);  %r = row(%a, 1x4);  %s = row(%r, 1x4/2x8);  %u = uniform(%s, ...)

A loop that computes an earlier one again takes rows from the same seeds.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ...compat.fx_nodes import add_node
from ...errors import ShardingError
from ...rules.custom_ops.loops import ROW, nest_of, nest_text
from ...rules.custom_ops.random import DRAW_SEED, DRAW_SEEDS


class DrawSeeds:
    """Adds a program's seeds to a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.first: dict[tuple[int, int], fx.Node] = {}  # by draw, and how many came before in it
        self.within: dict[fx.Node, int] = {}  # how many seeds an operation has taken

    def seed(self, of: fx.Node, draw: fx.Node, meta: dict[str, Any]) -> fx.Node:
        """Return an operation's seed.

        of: the operation in the captured graph. draw: the node that draws a seed. meta: has its
            loops.
        """
        nest, plain = nest_of(meta["loop"]) if "loop" in meta else (), dict(meta)
        for key in ("loop", "draw", "other", "dynamic"):  # a seed has no sizes of the operation
            plain.pop(key, None)
        shape = [loop.length for loop in nest]
        position = self.within[of] = self.within.get(of, -1) + 1
        number = meta.get("draw")
        # A checkpoint computes a draw again, and needs the same random numbers.
        seed = self.first.get((number, position)) if number is not None else None
        if seed is None:
            target, args = (DRAW_SEEDS, (shape,)) if nest else (DRAW_SEED, ())
            seed = add_node(self.graph, "call_function", target, args, {}, draw.name)
            seed.meta = {**plain, "val": draw.meta["val"].new_empty(shape)}
            if number is not None:
                self.first[number, position] = seed
        if [*seed.meta["val"].shape] != shape:
            raise _other_loops(meta)
        for depth in range(len(nest)):
            args = seed, nest_text(nest[: depth + 1])
            seed = add_node(self.graph, "call_function", ROW, args, {}, draw.name)
            seed.meta = {**plain, "val": draw.meta["val"].new_empty(shape[depth + 1 :])}
        return seed


def _other_loops(meta: dict[str, Any]) -> ShardingError:
    return ShardingError(
        "random numbers are recomputed in other loops than they were drawn in",
        where=meta.get("source"),
        why="each iteration has a seed of its own, which only a loop of the same length has again",
        fix="checkpoint the function inside of the loop, or the whole loop",
    )
