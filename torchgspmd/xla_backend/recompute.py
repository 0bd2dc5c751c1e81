"""Keeps what checkpointing computes again from being merged with the first computation, which would
keep it in memory.

before   forward   %y = einsum(.., %x, %w)
         backward  %y_1 = einsum(.., %x, %w)                    equal to %y: XLA would compute one of them
after    backward  %b = barrier([%x, %w, %grad]); %y_1 = einsum(.., %b[0], %b[1])

XLA does not look through a barrier; the gradient among its operands keeps it from starting in the
forward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ..fx_passes.ir import Rules, is_operation


def mark_repeated(graph: fx.Graph, rules: Rules | None = None) -> None:
    """meta["again"] on nodes of the backward that compute what a node of the forward has computed,
    from equal inputs, if they belong to a region that repeats a contraction: others cost little.
    """
    rules = rules or Rules()
    twin: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    again = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        key = (
            node.target,
            repr(fx.map_arg((node.args, dict(node.kwargs)), lambda n: id(twin.get(n, n)))),
        )
        known = first.setdefault(key, node)
        if known is not node and node.meta.get("backward") and not known.meta.get("backward"):
            twin[node] = known
            again.append(node)
    for region in _runs(graph, set(again)):
        if any(is_operation(n) and rules.op(n).rule.contraction for n in region):
            for node in region:
                node.meta["again"] = True


def separate(graph: fx.Graph) -> fx.Graph:
    """Puts a barrier before every region of the backward that mark_repeated has found."""
    for region in list(_runs(graph, {n for n in graph.nodes if n.meta.get("again")})):
        inside = set(region)
        inputs = list(
            dict.fromkeys(
                n
                for node in region
                for n in node.all_input_nodes
                if n not in inside and n.op != "get_attr"
            )
        )
        gradient = _latest_value(region[0], inputs)
        with graph.inserting_before(region[0]):
            group = graph.call_function(barrier, ([*inputs, *gradient],))
            copies = {
                n: graph.call_function(operator.getitem, (group, i)) for i, n in enumerate(inputs)
            }
        for node in region:
            for n in set(node.all_input_nodes) & copies.keys():
                node.replace_input_with(n, copies[n])
    return graph


def _latest_value(node: fx.Node, but: list[fx.Node]) -> list[fx.Node]:
    """The value that is made last before a node."""
    before = node.prev
    while before.op == "call_function":
        if isinstance(before.meta.get("val"), Tensor) and before not in but:
            return [before]
        before = before.prev
    return []


def _runs(graph: fx.Graph, chosen: set[fx.Node]) -> Iterator[list[fx.Node]]:
    """Chosen nodes that follow one another."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node in chosen:
            run.append(node)
        elif run:
            yield run
            run = []


def barrier(values: list[Tensor]) -> list[Tensor]:
    """The same values; nothing that uses them is computed before all of them are."""
    import torch_xla.core.xla_model as xm

    copies = [v.clone() for v in values]
    xm.optimization_barrier_(copies)
    return copies
