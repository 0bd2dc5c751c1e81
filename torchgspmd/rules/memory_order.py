"""Operands whose order in memory an operation's results depend on.

    ordered(aten._linalg_slogdet.default, "A")     factors A, or A.mT if A is contiguous
    packed(aten.native_layer_norm.default)         all results are contiguous

PyTorch's formula for the gradient of a determinant asks whether the matrix is contiguous. The
trace asks once; the kernel asks in each run, and has to find the same answer. So each device
brings such an operand into the order that it had in the trace.

An operation without a rule depends on the order of all its operands, as far as anybody knows. The
rule of an operation says that it does not, or `ordered` says which do: tests/rules/
test_memory_order.py runs all samples in several orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import AbsentOperator
from ..compat.private_apis import OpOverload
from .registry import rule_function

# Argument -> the tensor's dimensions in memory, outermost first. The others are contiguous.
Orders = Mapping[str, tuple[int, ...]]

_ORDERED: dict[Any, frozenset[str] | None] = {}  # None: all tensor arguments
_PACKED: set[Any] = set()
# Their results do not depend on memory: views, and what PyTorch has in its core of operations.
_FREE = (torch.Tag.core, torch.Tag.pointwise)


def ordered(op: OpOverload | AbsentOperator | str, names: str | None = None) -> None:
    """Say on which arguments' order in memory an operation's results depend; by default on all."""
    _ORDERED[op] = None if names is None else frozenset(names.split())


def packed(op: OpOverload) -> None:
    """Say that an operation's results are contiguous, whatever its operands are."""
    _PACKED.add(op)


def is_packed(op: object) -> bool:
    """Return whether an operation's results are contiguous, whatever its operands are.

    Python functions say so: `packs`.
    """
    return op in _PACKED or getattr(op, "packs", False)


def declares_order(op: object) -> bool:
    """Return whether an operation says that its results depend on an order in memory."""
    return op in _ORDERED or isinstance(op, OpOverload) and op.name() in _ORDERED


def ordered_arguments(op: object) -> frozenset[str]:
    """Return the arguments on whose order in memory an operation's results may depend."""
    if not isinstance(op, OpOverload):
        return frozenset()
    if declares_order(op):
        names = _ORDERED[op] if op in _ORDERED else _ORDERED[op.name()]
    elif rule_function(op) or op.is_view or any(tag in op.tags for tag in _FREE):
        return frozenset()
    else:
        names = None
    tensors = {a.name for a in op._schema.arguments if "Tensor" in str(a.type)}
    return frozenset(tensors if names is None else tensors & names)


def map_ordered(
    op: Any, args: tuple, kwargs: Mapping[str, Any], function: Callable[[str, fx.Node], Any]
) -> tuple[tuple, dict[str, Any]]:
    """Apply a function to a call's operands whose order in memory matters.

    function: from an argument's name and a node. `name[i]` is number i of a list of tensors.
    """
    names = ordered_arguments(op)

    def mapped(name: str, value: Any) -> Any:
        if name not in names:
            return value
        if isinstance(value, (list, tuple)):
            return [
                function(f"{name}[{i}]", x) if isinstance(x, fx.Node) else x
                for i, x in enumerate(value)
            ]
        return function(name, value) if isinstance(value, fx.Node) else value

    positions = (a.name for a in op._schema.arguments) if names else ()
    new = tuple(mapped(name, value) for name, value in zip(positions, args))
    return new if names else args, {name: mapped(name, value) for name, value in kwargs.items()}


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions in memory, outermost first."""
    return tuple(sorted(range(x.dim()), key=lambda d: (-int(x.stride(d)), d)))


def order_text(x: Tensor) -> str:
    """Return a tensor's order in memory, for keys and messages."""
    return "contiguous" if x.is_contiguous() else f"a tensor with strides {list(x.stride())}"


def traced_orders(node: fx.Node) -> Orders | None:
    """Return the orders in which a trace had a call's operands; None if they do not matter."""
    if not ordered_arguments(node.target):
        return None
    orders: dict[str, tuple[int, ...]] = {}

    def note(name: str, operand: fx.Node) -> None:
        x = operand.meta["val"]
        if isinstance(x, Tensor) and not x.is_contiguous():
            orders[name] = memory_order(x)

    map_ordered(node.target, node.args, node.kwargs, note)
    return orders
