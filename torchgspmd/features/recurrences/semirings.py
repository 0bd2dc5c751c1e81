"""Running maxima, minima and sums of exponentials, as affine functions over another algebra.

    h1 = max(h + a, b)           h1 = logaddexp(h + a, b)           h1 = logsumexp(h + A, 0) + b

An operation passes on a sum, here a maximum, if f(max(x, y)) = max(f(x), f(y)). Forms that the
tables below lack are replaced by others: `relu` by a maximum with zeros, and `h + 1` by a sum of
two tensors. The operations that `logsumexp` was decomposed into become one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor, fx

from ...compat.fx_nodes import add_node, origin_of
from ...compat.operators import aten
from ...fx_passes.ir import Op
from ...rules.ops.pointwise import named
from .carry_dims import Groups, sums
from .recurrence import added_op, reading

_FIRST, _BOTH = (frozenset((0,)),), (frozenset((0, 1)),)
_VIEWS = named("view reshape _unsafe_view unsqueeze squeeze.dim squeeze.dims squeeze clone")
# Groups of operands, by operator, in which sums of every algebra below pass.
_PASSED: dict[Any, Sequence[frozenset[int]]] = {
    **dict.fromkeys((*_VIEWS, *named("permute transpose.int expand flip roll")), _FIRST),
    **dict.fromkeys(named("slice.Tensor select.int sub.Tensor"), _FIRST),
    aten.add.Tensor: (*_FIRST, frozenset((1,))),
    aten.where.self: (frozenset((1, 2)),),
}


class Semiring(NamedTuple):
    """Names of the algebras of elements and of matrices, and where an operation is linear.

    most_rows: of a matrix. A product of matrices has all terms in memory, but for sums.
    """

    elements: str
    matrices: str
    groups: Groups
    most_rows: int = 32


def _passes(sum_of_two: Any, *reductions: Any) -> Groups:
    table = {**_PASSED, sum_of_two: _BOTH, **dict.fromkeys(reductions, _FIRST)}
    return lambda op: (
        () if op.node.kwargs.keys() - {"memory_format"} else table.get(op.node.target, ())
    )


SUMS = Semiring("elements", "matrices", sums, most_rows=256)
SEMIRINGS = (
    SUMS,
    Semiring("maxima", "matrices of maxima", _passes(aten.maximum.default, aten.amax.default)),
    Semiring("minima", "matrices of minima", _passes(aten.minimum.default, aten.amin.default)),
    Semiring("logs", "matrices of logs", _passes(aten.logaddexp.default, aten.logsumexp.default)),
)


def normal_form(
    graph: fx.Graph, ring: Semiring, path: Sequence[Op], again: fx.Node
) -> tuple[Sequence[Op], fx.Node]:
    """Return a path in the operations of a semiring's table, and the next carry at its end."""
    makers = {v: op for op in path for v in op.results if v is not None}
    new, ops = dict[fx.Node, fx.Node](), list[Op]()
    for op in path:
        ops += (others := _others(graph, ring, op, makers, new))
        if others:
            new[next(v for v in op.results if v is not None)] = others[-1].node
        else:
            ops.append(reading(op, new))
    needed, result = {again := new.get(again, again)}, list[Op]()
    for op in reversed(ops):
        if needed.intersection(op.results):
            result.append(op)
            needed.update(op.operands)
    return result[::-1], again


def _others(
    graph: fx.Graph,
    ring: Semiring,
    op: Op,
    makers: dict[fx.Node, Op],
    new: dict[fx.Node, fx.Node],
) -> list[Op]:
    """Return operations of the table in an operation's place; none if it stays."""
    target, args = op.node.target, cast(Any, op.node.args)
    x, val = new.get(op.operands[0], op.operands[0]), op.operands[0].meta["val"]
    if ring is SUMS:
        return _sum_with_number(graph, op, x)
    if ring.elements == "logs":
        return _log_sum(graph, op, makers, new) if target is aten.add.Tensor else []
    bounds = _BOUNDS[ring.elements].get(target)
    number = bounds(*args[1:]) if bounds and not op.node.kwargs else None
    if number is not None:
        full = _full(graph, val, number, op)
        of_two = aten.maximum.default if ring.elements == "maxima" else aten.minimum.default
        return [added_op(graph, of_two, (x, full), val, op.node)]
    first, *indices = op.results
    if target in _WITH_INDICES[ring.elements] and first is not None and len(args) > 1:
        to = aten.amax.default if ring.elements == "maxima" else aten.amin.default
        args = (x, [args[1]], *args[2:])
        return [added_op(graph, to, args, first.meta["val"], first)]
    return []


def _sum_with_number(graph: fx.Graph, op: Op, x: fx.Node) -> list[Op]:
    """Return a sum of two tensors in place of x + n, x - n or n - x; else nothing."""
    target, args, val = op.node.target, op.node.args, op.node.meta["val"]
    if target not in _PLUS_NUMBER or op.node.kwargs or len(args) != 2 or len(op.operands) != 1:
        return []
    number = _full(graph, val.new_empty(()), cast(float, args[1]), op)
    operands = (number, x) if target is aten.rsub.Scalar else (x, number)
    return [added_op(graph, _PLUS_NUMBER[target], operands, val, op.node)]


_PLUS_NUMBER: dict[Any, Any] = {
    aten.add.Tensor: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.rsub.Scalar: aten.sub.Tensor,
}


def _full(graph: fx.Graph, val: Tensor, number: float, op: Op) -> fx.Node:
    """Add a constant. val: has its shape."""
    kwargs = {"dtype": val.dtype, "device": val.device}
    full = add_node(graph, "call_function", aten.full.default, ([*val.shape], number), kwargs)
    full.meta = {**origin_of(op.node), "val": val.new_empty(val.shape)}
    return full


_BOUNDS: dict[str, dict[Any, Callable[..., float | None]]] = {
    "maxima": {
        aten.relu.default: lambda: 0.0,
        aten.clamp_min.default: lambda least: least,
        aten.clamp.default: lambda least=None, most=None: least if most is None else None,
    },
    "minima": {
        aten.clamp_max.default: lambda most: most,
        aten.clamp.default: lambda least=None, most=None: most if least is None else None,
    },
}
_WITH_INDICES = {"maxima": {aten.max.dim}, "minima": {aten.min.dim}}


def _log_sum(
    graph: fx.Graph, op: Op, makers: dict[fx.Node, Op], new: dict[fx.Node, fx.Node]
) -> list[Op]:
    """Return logsumexp in place of log(sum(exp(x - top))) + top, whatever top is; else nothing."""
    if op.node.kwargs or len(op.operands) != 2:
        return []
    for log, top in (op.operands, op.operands[::-1]):
        ops = list[Op]()
        value = log
        for target in (aten.log.default, aten.sum.dim_IntList, aten.exp.default, aten.sub.Tensor):
            made = makers.get(_origin(value, makers) if len(ops) < 2 else value)
            if made is None or made.node.target is not target or made.node.kwargs:
                break
            ops.append(made)
            value = made.operands[0]
        if len(ops) < 4 or len(ops[3].operands) != 2:
            continue
        total, (x, less) = ops[1], ops[3].operands
        shape, val = [*less.meta["val"].shape], x.meta["val"]
        shape = [1] * (val.dim() - len(shape)) + shape
        given = cast(Any, total.node.args)
        dims = [d % val.dim() for d in given[1]] if len(given) > 1 else []
        if not dims or any(shape[d] != 1 for d in dims):
            continue
        if (
            _origin(less, makers) is _origin(top, makers)
            and top.meta["val"].numel() == less.meta["val"].numel()
        ):
            x = new.get(x, x)
            args = (x, dims, *given[2:])
            node = add_node(graph, "call_function", aten.logsumexp.default, args, {})
            node.meta = {**origin_of(op.node), "val": total.node.meta["val"]}
            made = replace(total, node=node, operands=(x,), results=(node,), key=id(node))
            shape = [*op.node.meta["val"].shape]
            if shape == [*node.meta["val"].shape]:
                return [made]
            val = op.node.meta["val"]
            return [made, added_op(graph, aten.view.default, (node, shape), val, op.node)]
    return []


def _origin(value: fx.Node, makers: dict[fx.Node, Op]) -> fx.Node:
    """Return the value whose elements a value has in the same order."""
    while (op := makers.get(value)) is not None and op.node.target in _VIEWS:
        value = op.operands[0]
    return value
