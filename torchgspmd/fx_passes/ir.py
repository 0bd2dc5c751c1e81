"""The graph that the passes work on, and reading it.

A torch.fx.Graph of ATen operations at global shapes. Metadata of a node:

    val        fake tensor (a tuple of them for an operation with several results, each taken by a getitem node); a number
               for what is computed from sizes and values that are known only when the program runs
    dynamic    whether it takes or makes such numbers, or tensors of such a size (1 in val): it runs replicated, as it stands
    source     file:line of the user's code, or None
    backward   whether it belongs to the backward
    captured   name of the node of the captured graph whose value it has, if it has one's
    spec       ShardSpec, from `propagate` on
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ..rules import Call, Rule, rule_of


@dataclass(eq=False, slots=True)
class Op:
    """One operation: its node, its rule, the values it takes and those it makes (None: unused)."""

    node: fx.Node
    rule: Rule
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]
    key: int  # equal keys: same operation on same shapes, so the same rule object


def is_operation(node: fx.Node) -> bool:
    """Whether it computes with tensors: not on numbers alone."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return isinstance(node.meta["val"], (Tensor, tuple, list)) or bool(operands_of(node))


def is_number(node: fx.Node) -> bool:
    """Whether a value is a Python number, which is known when the program runs."""
    return isinstance(node.meta.get("val"), (int, float))


def tensors_of(node: fx.Node) -> tuple[Tensor, ...]:
    """The results of a node as a flat tuple."""
    val = node.meta["val"]
    return tuple(
        v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, Tensor)
    )


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors that a node takes, as often as it takes them, in the order of its arguments."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), lambda n: found.append(n))
    return tuple(n for n in found if not is_number(n))


def results_of(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """The values that a node makes: itself, or the getitem nodes that take its results."""
    if not isinstance(node.meta["val"], (tuple, list)):
        return () if is_number(node) else (node,)
    places = [i for i, v in enumerate(node.meta["val"]) if isinstance(v, Tensor)]
    taken = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return tuple(taken.get(i) for i in places)


def call_of(node: fx.Node) -> Call:
    """What a rule is asked about: the operation with the (fake) tensors of its arguments and
    results.
    """
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
    """What determines the rule of a node: equal for the same operation in repeated layers."""
    shown: list[Any] = []

    def show(n: fx.Node) -> str:
        if is_number(n):
            return "#"
        shown.append((tuple(n.meta["val"].shape), n.meta["val"].dtype))
        return "%"

    return (
        node.target,
        repr(fx.map_arg((node.args, dict(node.kwargs)), show)),
        tuple(shown),
        node.meta.get("dynamic", False),
    )


class Rules:
    """The rule of every node, computed once for equal signatures."""

    def __init__(self, lookup: Callable[[Call], Rule] = rule_of):
        self.lookup, self.known = lookup, {}  # signature -> rule, number

    def op(self, node: fx.Node) -> Op:
        same = signature(node)
        if same not in self.known:
            self.known[same] = (self.lookup(call_of(node)), len(self.known))
        rule, key = self.known[same]
        return Op(node, rule, operands_of(node), results_of(node), key)

    def ops(self, graph: fx.Graph) -> Iterator[Op]:
        return (self.op(node) for node in graph.nodes if is_operation(node))


def values(graph: fx.Graph) -> Iterator[fx.Node]:
    """All nodes that hold one tensor."""
    for node in graph.nodes:
        if node.op != "output" and isinstance(node.meta.get("val"), Tensor):
            yield node
