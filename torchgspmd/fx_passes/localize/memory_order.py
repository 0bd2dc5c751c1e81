"""Bring operands into the order in memory that they had in the trace.

    %lu = _linalg_slogdet(%a)

    %c = contiguous(%a);  %lu = _linalg_slogdet(%c)          where the matrix was contiguous
    %c = in_order(%a, [1, 0]);  %lu = _linalg_slogdet(%c)    where its columns were

Nothing is copied if the operand has that order. rules/memory_order.py says for which operands it
matters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ...comm.local_ops import in_order
from ...compat.operators import aten
from ...rules.registry import Orders, declares_order, is_packed, map_ordered


def restored(
    op: object, args: tuple, kwargs: Mapping[str, Any], orders: Orders, add: Callable[..., fx.Node]
) -> tuple[tuple, dict[str, Any]]:
    """Return a call's arguments, with the operands in their orders.

    add: adds a call to the graph, from its target and arguments.
    """

    def restore(name: str, operand: fx.Node) -> fx.Node:
        order = orders.get(name)
        if _has_order(operand, order):
            return operand
        rest = () if order is None else (list(order),)
        made = add(aten.contiguous.default if order is None else in_order, operand, *rest)
        made.meta["lies"] = order
        return made

    return map_ordered(op, args, kwargs, restore)


def _has_order(operand: fx.Node, order: tuple[int, ...] | None) -> bool:
    """Return whether a value has an order in memory on every device; None: is contiguous."""
    if operand.meta.get("shape") == () or operand.meta.get("dtype", ...) is None:  # a number
        return True
    if operand.op == "placeholder":  # the backward's, of a value of the forward
        return "lies" in operand.meta and operand.meta["lies"] == order
    if order is not None:
        return operand.target is in_order and tuple(operand.args[1]) == order
    return (
        operand.target is aten.contiguous.default
        or is_packed(operand.target)
        or is_packed_result(operand)
    )


def is_packed_result(node: fx.Node) -> bool:
    """Return whether a node is a result of an operation whose results are all contiguous."""
    return node.target is operator.getitem and is_packed(node.args[0].target)


def verify_memory_order(graph: fx.Graph) -> None:
    """Raise AssertionError if an operand's order in memory matters, and is not known."""
    faults: list[str] = []
    for node in graph.nodes:
        if "order" in node.meta or declares_order(node.target):
            orders: Orders = node.meta.get("order", {})

            def check(name: str, x: fx.Node, node: fx.Node = node, orders: Orders = orders) -> None:
                if not _has_order(x, orders.get(name)):
                    want = f"in the order {orders[name]}" if name in orders else "contiguous"
                    faults.append(f"{name} of %{node} has to be {want}, and %{x} may be otherwise")

            map_ordered(node.target, node.args, node.kwargs, check)
    if faults:
        raise AssertionError(
            "operands in another order in memory than in the trace:\n  " + "\n  ".join(faults)
        )
