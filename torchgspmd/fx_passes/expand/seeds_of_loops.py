"""Random numbers in bodies of loops: the seeds of all iterations are drawn before the loop.

    %s = draw_seed() in loops 1x4/2x8;  %u = uniform(%s, ...)

becomes

    %a = draw_seeds([4, 8]);  %r = row(%a, 1x4);  %s = row(%r, 1x4/2x8);  %u = uniform(%s, ...)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ...custom_ops.loops import ROW, nest_of, nest_text
from ...custom_ops.random import DRAW_SEEDS
from ...fx_nodes import add_node


def seed_of_iteration(graph: fx.Graph, draw: fx.Node, meta: dict[str, Any]) -> fx.Node:
    """Add the seed of an iteration to a graph. draw: what draws a seed. meta: has its loops."""
    nest = nest_of(meta["loop"])
    val, plain = draw.meta["val"], {key: value for key, value in meta.items() if key != "loop"}
    shape = [loop.length for loop in nest]
    seed = add_node(graph, "call_function", DRAW_SEEDS, (shape,), {}, draw.name)
    seed.meta = {**plain, "val": val.new_empty(shape)}
    for depth in range(len(nest)):
        seed = add_node(
            graph, "call_function", ROW, (seed, nest_text(nest[: depth + 1])), {}, draw.name
        )
        seed.meta = {**plain, "val": val.new_empty(shape[depth + 1 :])}
    return seed
