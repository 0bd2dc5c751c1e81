"""Decompose operations without a rule into operations that have one.

before   any ATen graph                     %y = mean(%x, [1])
after    only operations with rules,        %s = sum(%x, [1]); %y = div(%s, 8)
         or without a decomposition
needs    val on every node
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx

from ...compat.fx_nodes import add_node, copy_node, drop_unused
from ...compat.operators import OPERATOR_ERRORS
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from ...rules import DECLINED, RENAMED, SplitRequest, decomposition_of, simplified, trace
from ...rules.algebra_masks import choose_elements
from ...rules.custom_ops.loops import ROW, nest_of, nest_text
from ...rules.custom_ops.random import DRAW_SEED, DRAW_SEEDS
from ...rules.registry import traced_orders
from ..ir import is_number, signature
from .traced_sizes import with_sizes

_OF_THE_STEP = ("other", "dynamic", "draw", "order")
# Graphs of decompositions by (signature, splitting); None if there is none.
Traced = dict[tuple, fx.Graph | None]


def decompose_ops(
    graph: fx.Graph,
    splitting: Mapping[fx.Node, SplitRequest] = MappingProxyType({}),
    lookup: Callable[..., Callable | None] = decomposition_of,
    traced: Traced | None = None,
) -> fx.Graph:
    """Return a copy with operations decomposed.

    splitting: nodes with a rule to decompose all the same, and how they are sharded.
    lookup: finds a decomposition, as decomposition_of does.
    traced: cache for decompositions, for like graphs.
    """
    return _Expander(splitting, lookup, {} if traced is None else traced).run(graph)


class _Expander:
    """Copies a graph to a new one, and decomposes operations on the way."""

    def __init__(
        self, splitting: Mapping[fx.Node, SplitRequest], lookup: Callable, traced: Traced
    ) -> None:
        self.splitting, self.lookup, self.traced = splitting, lookup, traced
        self.graph = fx.Graph()
        self.seeds = DrawSeeds(self.graph)

    def run(self, graph: fx.Graph) -> fx.Graph:
        """Copy the graph, decomposing operations."""
        new: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            # Decompositions with several results have left a tuple: its elements need no getitem.
            if (
                node.op == "call_function"
                and node.target is operator.getitem
                and not isinstance(new[node.args[0]], fx.Node)
            ):
                new[node] = new[node.args[0]][node.args[1]]
            elif node.op == "call_function":
                new[node] = self.emit(node, new, node.meta, splitting=self.splitting.get(node))
            else:
                new[node] = copy_node(self.graph, node, new.__getitem__)
                new[node].meta = dict(node.meta)
            # Nodes keep the name of the captured value that they compute, for reports.
            if isinstance(new.get(node), fx.Node) and "captured" in node.meta:
                new[node].meta.setdefault("captured", node.meta["captured"])
        # list(): the loop adds nodes to the graph that it walks.
        for node in list(self.graph.nodes):
            if any(n.meta.get("dynamic") for n in (node, *node.all_input_nodes)):
                continue  # what has the same value for the sizes that stand there
            if (same := simplified(node)) is not DECLINED:
                if "captured" in node.meta:
                    same.meta.setdefault("captured", node.meta["captured"])
                # An output that is a result of its own stays one.
                node.replace_all_uses_with(
                    same, lambda user, same=same: user.op != "output" or same.op == "call_function"
                )
        choose_elements(self.graph)
        drop_unused(self.graph)
        return self.graph

    def emit(
        self,
        node: fx.Node,
        new: dict[fx.Node, Any],
        meta: dict,
        splitting: SplitRequest | None = None,
        within: tuple = (),
        of: fx.Node | None = None,
    ) -> Any:
        """Return the node's value in the new graph: a node, or a decomposition's results.

        of: the operation in the old graph that the node belongs to.
        """
        dynamic = node.meta.get("dynamic", False)
        # `within`: a decomposition that calls its own operation again would never end.
        keep = node.target in within or not dynamic and any(map(is_number, node.all_input_nodes))
        function = None if keep else self.lookup(node.target, splitting=splitting)
        inner = self.trace(node, function, splitting) if function else None
        if inner is None:
            if node.target is DRAW_SEED and ("draw" in meta or "loop" in meta):
                return self.seeds.seed(of or node, node, meta)
            copy = copy_node(self.graph, node, new.__getitem__)
            copy.target = RENAMED.get(node.target, node.target)
            sizes = {key: node.meta[key] for key in ("other", "dynamic") if key in node.meta}
            # Sizes are those of the step, not of the operation that it is a part of.
            plain = {key: value for key, value in meta.items() if key not in _OF_THE_STEP}
            copy.meta = {**plain, "val": node.meta["val"], **sizes}
            if (orders := node.meta.get("order", traced_orders(node))) is not None:
                copy.meta["order"] = orders
            return copy
        operands: list[fx.Node] = []
        fx.map_arg((node.args, dict(node.kwargs)), lambda n: operands.append(n))
        placeholders = iter(operands)
        values: dict[fx.Node, Any] = {}
        for step in inner.nodes:
            if step.op == "placeholder":
                values[step] = new[next(placeholders)]
            elif step.op == "output":
                return fx.map_arg(step.args[0], values.__getitem__)
            elif step.target is operator.getitem and not isinstance(values[step.args[0]], fx.Node):
                values[step] = values[step.args[0]][step.args[1]]
            else:
                inner_meta = {key: value for key, value in meta.items() if key != "captured"}
                inside = (*within, node.target)
                values[step] = self.emit(step, values, inner_meta, within=inside, of=of or node)
        raise AssertionError("a graph without output")

    def trace(
        self, node: fx.Node, function: Callable, splitting: SplitRequest | None
    ) -> fx.Graph | None:
        """Return a decomposition's graph, cached by signature.

        None if it cannot be traced, or if it contains tensors of its own.
        """
        key = (signature(node), splitting)
        if key not in self.traced:
            one = _traced(node, function, "val")
            # Traced twice, with two sizes: numbers in which the graphs differ are sizes of the run.
            if one is not None and node.meta.get("dynamic"):
                other = _traced(node, function, "other")
                one = None if other is None else with_sizes(one, other, node)
            self.traced[key] = one
        return self.traced[key]


def _traced(node: fx.Node, function: Callable, name: str) -> fx.Graph | None:
    """Return a decomposition's graph, traced with the arguments' values under one metadata key."""
    values = {n: n.meta.get(name, n.meta["val"]) for n in (node, *node.all_input_nodes)}
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    try:
        inner = trace(function, args, kwargs)
    except ShardingError:
        raise
    except OPERATOR_ERRORS:
        # PyTorch's own have many ways to decline. torch 2.9 raises IndexError for errors without
        # a text.
        return None
    return None if inner is DECLINED or not _is_valid(inner, node, values[node]) else inner


def _is_valid(inner: fx.Graph, node: fx.Node, results: object) -> bool:
    """Return whether a decomposition can replace its operation, which has these results.

    It has no constants, does not contain the operation itself, and has like results.
    """
    steps = [n for n in inner.nodes if n.op not in ("placeholder", "output")]
    # An operation that contains itself would be decomposed for ever.
    if any(n.op != "call_function" for n in steps) or any(
        n.target is node.target and signature(n) == signature(node) for n in steps
    ):
        return False
    got = [
        n.meta["val"] if isinstance(n, fx.Node) else None
        for n in pytree.tree_leaves(inner.output_node().args[0])
    ]
    want = [t for t in pytree.tree_leaves(results)]
    return len(got) == len(want) and all(
        not isinstance(w, Tensor)
        or (isinstance(g, Tensor) and g.shape == w.shape and g.dtype == w.dtype)
        for g, w in zip(got, want)
    )


# Random number seeds: one for each draw, which a repeated draw has, too.
#
#     %u = uniform(%s, ...) of draw 0, %v = uniform(%t, ...) of draw 0 again:  %t is %s
#
# In loop bodies the seeds for all iterations are drawn before the loop:
#
#     %s = draw_seed() in loops 1x4/2x8;  %u = uniform(%s, ...)
#
# becomes
#
#     %a = draw_seeds([4, 8]);  %r = row(%a, 1x4);  %s = row(%r, 1x4/2x8);  %u = uniform(%s, ...)
#
# A loop that computes an earlier one again takes rows from the same seeds.


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
