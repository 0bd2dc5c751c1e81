"""Sum parameter gradients over devices in another dtype than they are computed in.

before   %dw   : bf16[64, 32] = einsum(%x, %dy);  %dw_f : f32[64, 32] = _to_copy(%dw, f32)
after    %dw   : f32[64, 32]  = einsum(%x, %dy) in bf16
needs    a propagated graph
ensures  the operation that sums a gradient over rows has its result in the dtype at once: a device
         casts its term, and no reduction comes before the cast. Later steps up to the gradient,
         such as additions and views, compute in that dtype too. A parameter of another dtype
         gets `to(%dw, ...)`, which takes a sum and no terms.
source   reduce_dtype in PyTorch's FSDP2

If the dtype is narrower than the gradient's, only the last operation has its result in it. One
value on the way may have other users, as in the gradient of a product of two parameters; these
get it in its own dtype. Gradients are not traced back past a second such value: it may be one of
activations.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from ...capture import GRADIENT, PARAMETER
from ...compat.fx_nodes import origin_of
from ...compat.operators import OPERATOR_ERRORS, aten
from ...compat.private_apis import OpOverload
from ...rules.ops.pointwise import is_float_cast
from ..ir import Op, Rules, operands_of
from ..program import Program

Chain = dict[fx.Node, frozenset[int]]  # value -> operands that are summed in the dtype too


def reduce_dtype(p: Program) -> fx.Graph | None:
    """Sum parameter gradients in the requested dtype; None if that changes nothing."""
    graph, dtype, captured = p.graph, p.request.reduce_dtype, p.captured
    assert dtype is not None, "the pipeline asks before"
    output, changed = graph.output_node(), False
    gradients = [
        i
        for i, out in enumerate(captured.outputs)
        if out.kind == GRADIENT and captured.inputs[out.input].kind == PARAMETER
        if _is_computed(output.args[0][i])
    ]
    dtypes = [_dtype(output.args[0][i]) for i in gradients]
    chain = _chain(graph, frozenset(gradients), dtype, p.rules)
    # In program order: a value is retyped after its operands, from which its dtype follows.
    for value in [node for node in graph.nodes if node in chain]:
        before = _dtype(value)
        others = [u for u in value.users if u.op != "output" and not _continues(value, u, chain)]
        wide = _retype(value, chain[value], dtype)
        changed |= wide is not value or _dtype(wide) != before
        if others and _dtype(wide) != before:
            narrow = _cast(wide, before)
            for user in others:
                user.replace_input_with(wide, narrow)
    results, casts = list(output.args[0]), {}
    for i, stored in zip(gradients, dtypes):
        # `to` last: it casts the finished sum to the parameter's dtype, behind the reduction.
        for op, target in ((aten._to_copy.default, dtype), (aten.to.dtype, stored)):
            if _dtype(results[i]) != target:
                key = results[i], target
                casts[key] = results[i] = casts.get(key) or _cast(results[i], target, op)
    output.args = (tuple(results),)
    return graph if changed or casts else None


def _is_computed(value: object) -> bool:
    return (
        isinstance(value, fx.Node)
        and value.op == "call_function"
        and isinstance(value.meta["val"], Tensor)
        and value.meta["val"].is_floating_point()
    )


def _dtype(value: fx.Node) -> torch.dtype:
    return value.meta["val"].dtype


def _chain(graph: fx.Graph, gradients: frozenset[int], dtype: torch.dtype, rules: Rules) -> Chain:
    """Return the values that gradients are computed from by operations that pass on their sums."""
    output = graph.output_node()
    others = {v for i, v in enumerate(output.args[0]) if i not in gradients}
    chain: Chain = {}
    shared: set[fx.Node] = set()  # values of the chain that have other users, or are behind one
    # Backwards, so that a value's users are known to be in the chain before it is asked.
    for op in reversed([*rules.ops(graph)]):
        for value in filter(None, op.results):
            followers = [u for u in value.users if u is output or _continues(value, u, chain)]
            splits = len(followers) < len(value.users)
            behind = not shared.isdisjoint(followers)
            if not followers or splits and behind or value in others or not _is_computed(value):
                continue
            if splits or behind:
                shared.add(value)
            # Whether the dtype has every number in the value's dtype.
            if output not in followers or torch.promote_types(_dtype(value), dtype) == dtype:
                chain[value] = _summed_operands(op, dtype)
            elif not splits and followers == [output]:
                chain[value] = frozenset()
    return chain


def _continues(value: fx.Node, user: fx.Node, chain: Chain) -> bool:
    """Return whether everything a user takes from a value ends in gradients."""
    return user in chain and all(
        i in chain[user] for i, operand in enumerate(operands_of(user)) if operand is value
    )


def _summed_operands(op: Op, dtype: torch.dtype) -> frozenset[int]:
    """Return the operands whose pending sum an operation passes on, in another dtype too."""
    if op.rule.reduce or op.results != (op.node,) or op.node.meta.get("dynamic"):
        return frozenset()
    if is_float_cast(op.node) or "mark" in op.node.meta:
        return frozenset([0])
    summed = frozenset(
        i
        for group in op.rule.linear
        if any(op.operands[k].meta.get("backward") for k in group)
        for i in group
    )
    # Tried, not derived: torch alone knows which dtypes an operation mixes.
    try:
        result = _computed_with(op.node, {op.operands[i] for i in summed}, dtype)
    except OPERATOR_ERRORS:
        return frozenset()  # it takes tensors of equal dtypes only
    return summed if result.dtype == dtype else frozenset()


def _computed_with(node: fx.Node, operands: Collection[fx.Node], dtype: torch.dtype) -> Tensor:
    """Return an operation's fake result with operands in another dtype."""
    args, kwargs = fx.map_arg(
        (node.args, dict(node.kwargs)),
        lambda n: n.meta["val"].to(dtype) if n in operands else n.meta["val"],
    )
    return node.target(*args, **kwargs)


def _retype(value: fx.Node, summed: Collection[int], dtype: torch.dtype) -> fx.Node:
    """Give a value the dtype; return its successor. summed: see Chain."""
    operands = operands_of(value)
    for operand in {operands[i]: None for i in summed}:
        if _dtype(operand) != dtype:
            value.replace_input_with(operand, _cast(operand, dtype))
    if summed and is_float_cast(value):
        (operand,) = value.all_input_nodes
        value.replace_all_uses_with(operand)
        value.graph.erase_node(value)
        return operand
    if summed:
        value.meta["val"] = _computed_with(value, (), dtype)
    elif _dtype(value) != dtype:
        value.meta |= {"computed": _dtype(value), "val": value.meta["val"].to(dtype)}
    return value


def _cast(value: fx.Node, dtype: torch.dtype, op: OpOverload = aten._to_copy.default) -> fx.Node:
    with value.graph.inserting_after(value):
        if op is aten._to_copy.default:
            cast = value.graph.call_function(op, (value,), {"dtype": dtype})
        else:
            cast = value.graph.call_function(op, (value, dtype))
    cast.meta = {
        "source": None,
        "backward": False,
        **origin_of(value),
        "val": value.meta["val"].to(dtype),
    }
    return cast
