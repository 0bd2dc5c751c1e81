"""Decompositions with sizes that only a run knows.

    div(sum(%x, [0]), 496)      the mean of [u0, 8] over dim 0, for one size
    div(sum(%x, [0]), 1616)     for another size
    div(sum(%x, [0]), %n)       for all: %n = sym_size(%x, 0)
    div(sum(%x), %m)            the mean of all elements: %m = mul(%n, 8)
    div(mul(%g, 0.25), %n)      mul(%g, 2 / 3968) and mul(%g, 2 / 12928)

Both graphs decompose one operation, for two sizes. Numbers in which they differ are operand sizes,
numbers among its arguments, products of these, or factors with such a size below; otherwise the
operation stays as it is.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ..ir import is_number

_Size = tuple[int, int]  # in the decompositions for both sizes


def with_sizes(inner: fx.Graph, other: fx.Graph, node: fx.Node) -> fx.Graph | None:
    """Return the graph `inner` with nodes for numbers that differ in `other`, else None.

    It has a placeholder for each number among the node's arguments, too.
    """
    pairs = list(zip(inner.nodes, other.nodes))
    same = len(inner.nodes) == len(other.nodes) and all(
        (one.op, one.target) == (two.op, two.target) or one.op == "placeholder" == two.op
        for one, two in pairs
    )
    if not same:
        return None
    sizes = _add_inputs(inner, node)
    numbers = [*sizes.values()]
    for one, two in pairs:
        if "val" in one.meta and not _equal(one.meta["val"], two.meta["val"]):
            one.meta["other"] = two.meta["val"]
        if one.op == "placeholder":
            for d, size in enumerate(one.meta["val"].shape):
                sizes.setdefault((size, two.meta["val"].shape[d]), (one, d))
    twin, ready = dict(pairs), {}

    def merged(one: Any, two: Any, before: fx.Node) -> Any:
        """Return an argument of `before`, with a node if it differs in the other graph."""
        if isinstance(one, (tuple, list)) and isinstance(two, (tuple, list)):
            if len(one) != len(two):
                raise _DifferError
            return type(one)(merged(a, b, before) for a, b in zip(one, two))
        if isinstance(one, fx.Node):
            if twin.get(one) is not two:
                raise _DifferError
            return one
        if one == two:
            return one
        # bool is an int, too, but never a size.
        if type(one) is not int or (factors := _factors(one, two, [*sizes])) is None:
            raise _DifferError
        product = None
        for size in factors:
            if size not in ready:
                ready[size] = _size_node(inner, sizes[size], *size)
            product = _times(inner, before, product, ready[size])
        rest = one // math.prod(size for size, _ in factors)
        return product if rest == 1 else _times(inner, before, product, rest)

    try:
        for one, two in pairs:
            if one.op in ("call_function", "output"):
                size = _size_below(one, two, [*sizes])
                one.args = merged(one.args, two.args, one)
                one.kwargs = {k: merged(v, two.kwargs[k], one) for k, v in one.kwargs.items()}
                if is_dynamic(one):
                    one.meta["dynamic"] = True
                if size is not None:
                    if size not in ready:
                        ready[size] = _size_node(inner, sizes[size], *size)
                    twin[_divided(one, ready[size])] = two
    except (_DifferError, KeyError):
        return None
    # A number that is used nowhere has decided on something: 10 and 16 are both 4 modulo 6.
    differ = [n for n in numbers if n.meta.get("other", n.meta["val"]) != n.meta["val"]]
    return inner if all(n.users for n in differ) else None


class _DifferError(Exception):
    """Two decompositions differ by more than their operands' sizes."""


def _add_inputs(inner: fx.Graph, node: fx.Node) -> dict[tuple, Any]:
    """Add placeholders for the numbers among a node's arguments; return them by value."""
    arguments: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), lambda n: arguments.append(n))
    tensors = iter([n for n in inner.nodes if n.op == "placeholder"])
    after, numbers = None, {}
    for argument in arguments:
        if not is_number(argument):
            after = next(tensors)
            continue
        first = next(iter(inner.nodes))
        # In the order of the arguments, from which placeholders are filled.
        with inner.inserting_after(after) if after else inner.inserting_before(first):
            after = inner.placeholder("number")
        after.meta = {key: argument.meta[key] for key in ("val", "other") if key in argument.meta}
        numbers[after.meta["val"], after.meta.get("other", after.meta["val"])] = after
    return numbers


def _factors(one: int, two: int, sizes: Sequence[_Size]) -> list[_Size] | None:
    """Return sizes whose product, times a number, is a number in both graphs; None if none is.

    one, two: the number in both. sizes: each in both.
    """
    if one == two:
        return []
    for size in sizes:
        s, t = size
        # s > 1: a size of 1 divides everything, and would be taken for ever.
        if s != t and s > 1 and one % s == 0 and two % t == 0:
            rest = _factors(one // s, two // t, sizes)
            if rest is not None:
                return [size, *rest]
    return None


def _size_below(one: fx.Node, two: fx.Node, sizes: Sequence[_Size]) -> _Size | None:
    """Return the size by which a constant factor was divided, and multiply the factor by it.

    A division by no rows is then one of tensors, as in the operation; Python's would raise.
    """
    if one.target is not aten.mul.Tensor:
        return None
    a, b = (node.args[1] for node in (one, two))
    if type(a) is not float or type(b) is not float or a == b:
        return None
    for s, t in sizes:
        if s != t and math.isclose(a * s, b * t, rel_tol=4 * sys.float_info.epsilon):
            one.args, two.args = (one.args[0], a * s), (two.args[0], a * s)
            return s, t
    return None


def _divided(x: fx.Node, size: fx.Node) -> fx.Node:
    """Insert a division by a size behind an operation, for all that read its result."""
    with x.graph.inserting_after(x):
        quotient = x.graph.call_function(aten.div.Tensor, (x, size))
    x.replace_all_uses_with(quotient, lambda user: user is not quotient)
    quotient.meta = dict(x.meta)
    return quotient


def _times(inner: fx.Graph, before: fx.Node, a: fx.Node | None, b: fx.Node | int) -> Any:
    """Return the node for a product of two numbers; None stands for 1."""
    if a is None:
        return b
    with inner.inserting_before(before):
        product = inner.call_function(operator.mul, (a, b))
    pairs = [_pair(x) for x in (a, b)]
    one, two = map(math.prod, zip(*pairs))
    product.meta = {"val": one, "other": two, "dynamic": True}
    return product


def _pair(number: fx.Node | int) -> _Size:
    if isinstance(number, int):
        return number, number
    return number.meta["val"], number.meta.get("other", number.meta["val"])


def _size_node(inner: fx.Graph, source: Any, one: int, two: int) -> fx.Node:
    """Return a node for a number: an argument, or a dimension's size."""
    if isinstance(source, fx.Node):
        return source
    placeholder, _ = source
    with inner.inserting_after(placeholder):
        size = inner.call_function(aten.sym_size.int, source)
    size.meta = {"val": one, "other": two, "dynamic": True}
    return size


def is_dynamic(node: fx.Node) -> bool:
    """Return whether an operation has sizes that only a run knows, or such numbers."""
    # A pointwise operation takes a number as it is: its result's shape does not depend on it.
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return any(
        "other" in each.meta and not (pointwise and is_number(each))
        for each in (node, *node.all_input_nodes)
    )


def _equal(one: Any, two: Any) -> bool:
    """Return whether results have the same shapes."""
    if isinstance(one, (tuple, list)):
        return all(map(_equal, one, two))
    return one.shape == two.shape if isinstance(one, Tensor) else one == two
