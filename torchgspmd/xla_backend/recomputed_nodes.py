"""Keep XLA from merging a checkpoint's recomputation with the first computation.

Merged, the value would stay in memory from the forward to the backward.

before   forward   %y = einsum(.., %x, %w)
         backward  %y_1 = einsum(.., %x, %w)             equal to %y: XLA would compute one of them
after    backward  %b = barrier([%x, %w, %grad]); %y_1 = einsum(.., %b[0], %b[1])

XLA does not look through a barrier. The gradient among its operands keeps the recomputation out of
the forward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ..fx_passes.ir import Rules, is_operation


def mark_repeated(graph: fx.Graph, rules: Rules | None = None) -> None:
    """Set meta["again"] on backward nodes that repeat a forward node.

    They repeat it if they compute the same from equal inputs. Only regions with a contraction are
    marked: others cost little.
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
            # Inputs are equal if they are one node, or a repetition of one.
            repr(fx.map_arg((node.args, dict(node.kwargs)), lambda n: id(twin.get(n, n)))),
        )
        original = first.setdefault(key, node)
        if original is not node and node.meta.get("backward") and not original.meta.get("backward"):
            twin[node] = original
            again.append(node)
    for region in _runs(graph, set(again)):
        if any(is_operation(n) and rules.op(n).rule.contraction for n in region):
            for node in region:
                node.meta["again"] = True


def separate(graph: fx.Graph) -> fx.Graph:
    """Insert a barrier before every backward region that mark_repeated has marked."""
    # A list: the loop inserts nodes into the graph that `_runs` walks.
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


def _latest_value(node: fx.Node, excluded: list[fx.Node]) -> list[fx.Node]:
    """Return the last value computed before a node, if there is one."""
    before = node.prev
    while before.op == "call_function":
        if isinstance(before.meta.get("val"), Tensor) and before not in excluded:
            return [before]
        before = before.prev
    return []


def _runs(graph: fx.Graph, chosen: set[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield the longest runs in which chosen nodes follow one another."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node in chosen:
            run.append(node)
        elif run:
            yield run
            run = []


def barrier(values: list[Tensor]) -> list[Tensor]:
    """Return the same values; no user runs before all are computed."""
    import torch_xla.core.xla_model as xm

    # optimization_barrier_ writes to its operands.
    copies = [v.clone() for v in values]
    xm.optimization_barrier_(copies)
    return copies
