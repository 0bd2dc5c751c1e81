"""Normal form for a traced graph.

Names are readable, cotangents are inputs, and identities and dead code are removed.
"""

from __future__ import annotations

import itertools
import keyword
import operator
import re
from typing import Any

import torch
from torch import fx

from ..compat.fx_nodes import copy_node, drop_unused
from ..compat.operators import aten, draws
from ..compat.private_apis import OpOverload
from ..compat.private_apis import _pytree as pytree
from ..rules.custom_ops.loops import ENTRIES
from .captured import TANGENT, UNKNOWN, Input
from .draws import REGION, number_draws, recompute_regions
from .loop_form import loop_form
from .prints import name_values
from .stand_in_sizes import StandInSizes
from .trace_context import SITE, current_sites

_IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}


def normalize(
    traced: fx.Graph, inputs: list[Input], tangents: list[tuple[int, Any]]
) -> tuple[fx.Graph, list[Input], list[int]]:
    """Return a normalized copy of the graph, its inputs, and the units for arguments' sizes.

    The inputs are the given ones, then the tangents. tangents: (output index, the seed that stood
    for its cotangent).
    """
    old_nodes = list(traced.nodes)
    placeholders = [n for n in old_nodes if n.op == "placeholder"]
    # None keeps its place among the results.
    results = list(pytree.tree_leaves(old_nodes[-1].args, is_leaf=lambda x: x is None))
    inputs, graph, new = list(inputs), fx.Graph(), {}
    sizes = StandInSizes(traced)
    names = _identifiers([each.name for each in inputs])
    for node, name in zip(placeholders, names):
        new[node] = graph.placeholder(name)
        _copy_meta(node, new[node], sizes, bool(tangents))
    # The backward starts with a ones_like for each tangent.
    of_backward = itertools.dropwhile(lambda n: not _is_of_backward(n, True), old_nodes)
    seeds = (n for n in of_backward if n.target is aten.ones_like.default)
    for (output, seed), node in zip(tangents, seeds):
        new[node] = graph.placeholder(f"tangent_{output}")
        _copy_meta(node, new[node], sizes, bool(tangents))
        val, other = new[node].meta["val"], new[node].meta.get("other", new[node].meta["val"])
        shape = tuple(n if n == m else UNKNOWN for n, m in zip(val.shape, other.shape))
        inputs.append(Input(TANGENT, f"tangent_{output}", shape, seed.dtype, output=output))
    for node in old_nodes:
        if node.target in _IDENTITIES:
            new[node] = new[node.args[0]]
        elif (constant := sizes.constant(node.meta.get("val"))) is not None:
            new[node] = constant
        elif node.target is aten._to_copy.default and not isinstance(node.args[0], fx.Node):
            # vmap turns numbers into tensors
            new[node] = graph.call_function(
                aten.scalar_tensor.default, node.args, {"dtype": node.meta["val"].dtype}
            )
            _copy_meta(node, new[node], sizes, bool(tangents))
        elif (
            node.op in ("call_function", "get_attr")
            and node not in new
            # An optimizer's step is inside torch.profiler.record_function.
            and getattr(node.target, "namespace", "") != "profiler"
        ):
            new[node] = copy_node(graph, node, new.__getitem__)
            _copy_meta(node, new[node], sizes, bool(tangents))
    graph.output(tuple(new[r] if isinstance(r, fx.Node) else r for r in results))
    # What the rewrites below look for.
    marks, targets = set[str](), set[Any]()
    for node in graph.nodes:
        marks.update(node.meta)
        targets.add(node.target)
    if "draw" in marks:
        number_draws(graph)
    # Breakpoints name nodes that stay, so views are merged before.
    merged = _merge_equal_views(graph)
    name_values({node: merged.get(new[node], new[node]) for node in new})
    if REGION in marks:
        recompute_regions(graph)
    if not ENTRIES.isdisjoint(targets):
        loop_form(graph)
    drop_unused(graph)
    return graph, inputs, sizes.units


def _identifier(name: str) -> str:
    """Return a qualified name as a Python identifier: `0.weight` as `_0_weight`."""
    word = re.sub(r"\W", "_", name)
    return word if word.isidentifier() and not keyword.iskeyword(word) else f"_{word}"


def _identifiers(names: list[str]) -> list[str]:
    """Return distinct identifiers for the names: the second `h` is `h_1`."""
    identifiers: dict[str, None] = {}
    for name in map(_identifier, names):
        identifiers[
            next(
                each
                for each in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
                if each not in identifiers
            )
        ] = None
    return list(identifiers)


def _is_of_backward(node: fx.Node, differentiated: bool) -> bool:
    """Return whether a node belongs to the backward.

    differentiated: whether the program has an outer backward, so that inner ones do not count.
    """
    custom = _custom(node)
    return bool(custom.get("backward")) and not (differentiated and custom.get("inner"))


def _custom(node: fx.Node) -> dict[str, object]:
    return node.meta.get("custom") or {}


def _copy_meta(source: fx.Node, target: fx.Node, sizes: StandInSizes, differentiated: bool) -> None:
    """Copy a node's metadata, and mark operations with dynamic sizes."""
    custom = _custom(source)
    val, other = sizes.values(source.meta.get("val"))
    target.meta = {
        "val": val,
        "source": custom.get("source"),
        "backward": _is_of_backward(source, differentiated),
        "captured": target.name,
    }
    if custom.get("module"):
        target.meta["module"] = custom["module"]
    if REGION in source.meta:
        target.meta[REGION] = source.meta[REGION]
    if (sites := current_sites()) is not None and custom.get(SITE) in sites.rewritten:
        target.meta[SITE] = custom[SITE]
    if "draw" in custom and draws(source.target):
        target.meta["draw"] = custom["draw"]
    if other is not val:
        target.meta["other"] = other
    # A pointwise operation takes such a number as a value; its shapes do not depend on it.
    pointwise = isinstance(source.target, OpOverload) and torch.Tag.pointwise in source.target.tags
    if any(
        "other" in node.meta and not (pointwise and isinstance(node.meta["val"], (int, float)))
        for node in (target, *target.all_input_nodes)
    ):
        target.meta["dynamic"] = True


def _merge_equal_views(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Merge equal views of a value, and equal results of an operation; return node by node.

    A weight's view that a loop takes in every step is then resharded once.
    """
    first: dict[Any, fx.Node] = {}
    merged: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not (node.target is operator.getitem or _is_view(node.target)) or node.meta.get(
            "dynamic"
        ):
            continue
        same = first.setdefault((node.target, repr((node.args, node.kwargs))), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            merged[node] = same
    return merged


def _is_view(target: object) -> bool:
    """Return whether an operator's result shares its operand's memory."""
    return isinstance(target, OpOverload) and target.is_view
