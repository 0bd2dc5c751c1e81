"""Shapes, dtypes and orders in memory for the nodes that localize adds, on meta tensors.

So memory and time count every local operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...comm.local_ops import in_order
from ...compat.operators import OPERATOR_ERRORS, aten
from ...rules.registry import Orders, declares_order, is_packed, map_ordered

# Bring operands into the order in memory that they had in the trace.
#
#     %lu = _linalg_slogdet(%a)
#
#     %c = contiguous(%a);  %lu = _linalg_slogdet(%c)          where the matrix was contiguous
#     %c = in_order(%a, [1, 0]);  %lu = _linalg_slogdet(%c)    where its columns were
#
# Nothing is copied if the operand has that order. rules/registry.py says for which operands it
# matters.


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


META = torch.device("meta")


def infer_shapes(graph: fx.Graph) -> None:
    """Add shape and dtype to a device program's tensors that lack them."""
    examples = _Examples()
    for node in graph.nodes:
        if _lacks_shape(node) and isinstance(value := examples.of(node), Tensor):
            node.meta |= {"shape": tuple(value.shape), "dtype": value.dtype, "unknown": None}


def _lacks_shape(node: fx.Node) -> bool:
    """Return whether a node may be a tensor without a shape; one with several results is none."""
    if node.op != "call_function" or node.meta.get("shape") is not None:
        return False
    if node.meta.get("dynamic") and not all(map(_has_known_shape, node.all_input_nodes)):
        return False
    return not all(
        user.target is operator.getitem and user.meta.get("shape") is not None
        for user in node.users
    )


def _has_known_shape(node: fx.Node) -> bool:
    """Return whether a node is a tensor whose shape is the same in every run."""
    shape = node.meta.get("shape")
    return shape is not None and (node.meta.get("unknown") or shape) == shape


class _Examples:
    """Values like the nodes' own: meta tensors, numbers (for coordinates: 0), and None."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.results: dict[Any, Any] = {}  # of like calls

    def of(self, node: fx.Node) -> Any:
        """Return a value like a node's; None if it is unknown."""
        if node not in self.values:
            self.values[node] = self._value(node)
        return self.values[node]

    def _value(self, node: fx.Node) -> Any:
        shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
        if shape is not None and dtype is not None:
            # On meta nothing is computed and no memory is needed: only shapes matter.
            return torch.empty(tuple(shape), dtype=dtype, device=META)
        if "size" in node.meta:
            return node.meta["size"][1]
        if node.op != "call_function":
            return 0 if node.op == "placeholder" else None
        operands = [self.of(operand) for operand in node.all_input_nodes]
        if any(operand is None for operand in operands):
            return None
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._argument)
        return self._call(node.target, args, kwargs)

    def _argument(self, value: object) -> Any:
        if isinstance(value, fx.Node):
            return self.of(value)
        return META if isinstance(value, torch.device) else value

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Layers repeat: a call with like arguments runs once.
        key = (target, _key(args), _key(kwargs))
        if key not in self.results:
            self.results[key] = _run(target, args, kwargs)
        return self.results[key]


def _run(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return a call's result; None where tensor values decide it."""
    try:
        return target(*args, **kwargs)
    except OPERATOR_ERRORS:
        return None


def _key(value: object) -> Any:
    """Return a key that is equal for arguments that lead to equal results."""
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    # With the type: 1, 1.0 and True are equal keys, but other arguments.
    return type(value).__name__, value
