"""One operation on several values: a dimension more, by a copy of its node or by torch.vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import copy_node, inline, origin_of
from ...compat.operators import OPERATOR_ERRORS, draws
from ...compat.private_apis import _pytree as pytree
from ...layout.mark import mark_sharding_op
from ...rules import DECLINED, trace
from ...rules.custom_ops.loops import LOOP_MARKS
from ..ir import Op, is_number, operands_of, tensors_of

Traced = dict[tuple, fx.Graph | None]  # by what decides a graph of torch.vmap; None: it has no rule


def add_batched(
    graph: fx.Graph,
    op: Op,
    batched: Sequence[bool],
    inputs: Sequence[fx.Node],
    lead: int = 0,
    traced: Traced | None = None,
) -> list[fx.Node] | None:
    """Add an operation on operands that have one more dimension, behind `lead` others.

    batched: for each operand, whether it has that dimension; others are the same for all. inputs:
    take the operands' places. traced: graphs to share among operations with one size of it.

    Returns:
        Its results; None if torch.vmap has no rule for it, as for random numbers.
    """
    if _is_elementwise(op) and op.results == (op.node,) and _keeps_dtype(op, batched):
        copy = copy_node(graph, op.node, dict(zip(operands_of(op.node), inputs)).__getitem__)
        first = next(v for v, is_batched in zip(inputs, batched) if is_batched)
        val = with_dim(op.node.meta["val"], first.meta["val"].shape[lead], lead)
        copy.meta = {**origin_of(op.node), "val": val}
        return [copy]
    key, traced = (op.key, *batched, lead), {} if traced is None else traced
    if key not in traced:
        traced[key] = _vmapped(op, batched, inputs, lead)
    if (inner := traced[key]) is None:
        return None
    out = inline(graph, inner, inputs, origin_of(op.node))
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    # A number beside tensors decides no dtype, a row of numbers does.
    same = all(r.meta["val"].dtype == t.dtype for r, t in zip(results, tensors_of(op.node)))
    return results if same else None


def _vmapped(
    op: Op, batched: Sequence[bool], inputs: Sequence[fx.Node], lead: int
) -> fx.Graph | None:
    """Return the graph of torch.vmap over an operation; None if there is none without writes."""
    leaves, tree = pytree.tree_flatten((op.node.args, dict(op.node.kwargs)))

    def call(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], tree
        )
        target: Any = op.node.target
        return target(*args, **kwargs)

    dims = tuple(lead if each else None for each in batched)
    try:
        inner = trace(
            torch.vmap(call, in_dims=dims, out_dims=lead),
            tuple(v.meta["val"] for v in inputs),
            {},
        )
    except OPERATOR_ERRORS:
        return None
    if inner is DECLINED or any(_writes(n) or _has_number(n) for n in inner.nodes):
        return None
    return inner


def may_batch(op: Op) -> bool:
    """Return whether an operation may be computed on several values at once."""
    node = op.node
    return (
        op.rule.described
        and bool(op.results)
        and not any(key in node.meta for key in ("dynamic", "runs", "loop", "draw", "other"))
        and node.target not in LOOP_MARKS
        and node.target is not mark_sharding_op._opoverload
        and not draws(node.target)
        and not any(map(is_number, node.all_input_nodes))
    )


def with_dim(val: Tensor, size: int, lead: int) -> Tensor:
    """Return a value like another one with one more dimension behind `lead` others."""
    return val.new_empty([*val.shape[:lead], size, *val.shape[lead:]])


def _is_elementwise(op: Op) -> bool:
    """Return whether all operands and results have the same dimensions and sizes, or none.

    Operations that name dimensions or sizes, as a softmax, do not count.
    """
    tensors = [*zip(op.rule.operands, op.operands), *zip(op.rule.results, op.results)]
    whole = {(dims, v.meta["val"].shape) for dims, v in tensors if dims and v is not None}
    return len(whole) <= 1 and torch.Tag.pointwise in getattr(op.node.target, "tags", ())


def _keeps_dtype(op: Op, batched: Sequence[bool]) -> bool:
    """Return whether operands broadcast as before, and decide the dtype, with a dimension more.

    A number beside tensors is broadcast from its end, and decides no dtype; a row of them does.
    """
    numbers = [each for v, each in zip(op.operands, batched) if not v.meta["val"].dim()]
    return not any(numbers) or all(batched) and len(numbers) == len(batched)


def _writes(node: fx.Node) -> bool:
    """Return whether a node changes an operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _has_number(node: fx.Node) -> bool:
    """Return whether a number has the place of a tensor, as where torch.vmap promotes it."""
    schema = getattr(node.target, "_schema", None)
    takes = schema is not None and any(str(a.type) == "Tensor" for a in schema.arguments)
    return takes and not node.all_input_nodes
