"""The graph that the passes work on, and functions that read it.

It is a torch.fx.Graph of ATen operations at global shapes; stages.py lists its metadata.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ..rules import Call, FactorRule, rule_of


@dataclass(eq=False, slots=True)
class Op:
    """One operation: its node, rule, operands and results (None: a result nobody uses)."""

    node: fx.Node
    rule: FactorRule
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]
    key: int | None  # Equal for the same operation on the same shapes, which then share one rule.


def is_operation(node: fx.Node) -> bool:
    """Return True if a node computes with tensors, not with numbers alone."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return isinstance(node.meta["val"], (Tensor, tuple, list)) or bool(operands_of(node))


def is_number(node: fx.Node) -> bool:
    """Return True if a value is a Python number, computed when the program runs."""
    return isinstance(node.meta.get("val"), (int, float))


def tensors_of(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the results of a node as a flat tuple of tensors."""
    val = node.meta["val"]
    return tuple(
        v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, Tensor)
    )


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensor arguments of a node in order, with repetitions."""
    inputs: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), lambda n: inputs.append(n))
    return tuple(n for n in inputs if not is_number(n))


def results_of(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Return the results of a node: itself, or the getitem nodes of its tuple (None: unused)."""
    if not isinstance(node.meta["val"], (tuple, list)):
        return () if is_number(node) else (node,)
    indices = [i for i, v in enumerate(node.meta["val"]) if isinstance(v, Tensor)]
    getitems = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return tuple(getitems.get(i) for i in indices)


def call_of(node: fx.Node) -> Call:
    """Return the argument of a rule: the operation with its fake arguments and results."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return Call(
        node.target,
        args,
        kwargs,
        tuple(n.meta["val"] for n in operands_of(node)),
        tensors_of(node),
        node.meta.get("dynamic", False),
    )


def signature(node: fx.Node) -> tuple:
    """Return what determines a node's rule, equal for the same operation of repeated layers."""
    tensors: list[Any] = []

    def show(n: fx.Node) -> str:
        if is_number(n):
            return "#"
        tensors.append((tuple(n.meta["val"].shape), n.meta["val"].dtype))
        return "%"

    return (
        node.target,
        repr(fx.map_arg((node.args, dict(node.kwargs)), show)),
        tuple(tensors),
        node.meta.get("dynamic", False),
    )


class Rules:
    """The rule of every node, looked up once for equal signatures."""

    def __init__(self, lookup: Callable[[Call], FactorRule] = rule_of) -> None:
        self.lookup = lookup
        self.cache: dict[tuple, tuple[FactorRule, int]] = {}  # signature -> rule, key

    def op(self, node: fx.Node) -> Op:
        """Return the operation of a node."""
        cache_key = signature(node)
        if cache_key not in self.cache:
            self.cache[cache_key] = (self.lookup(call_of(node)), len(self.cache))
        rule, key = self.cache[cache_key]
        return Op(node, rule, operands_of(node), results_of(node), key)

    def ops(self, graph: fx.Graph) -> Iterator[Op]:
        """Return the operations of a graph, in its order."""
        return (self.op(node) for node in graph.nodes if is_operation(node))


def values(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every node whose value is one tensor."""
    for node in graph.nodes:
        if node.op != "output" and isinstance(node.meta.get("val"), Tensor):
            yield node
