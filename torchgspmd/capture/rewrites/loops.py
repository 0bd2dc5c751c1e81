"""torch.cond, scan, map and while_loop, as the operations that they stand for.

scan and map stay loops (loop_trace.py). Of a branch both sides are computed, and torch.where
chooses: the predicate may depend on values. A while_loop becomes its iterations. It needs a
condition that is known during the trace, such as one of a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.private_apis import _pytree as pytree
from ...rules.rewrites import rewrite
from .loop_trace import run_loop

_LOOPS = torch.ops.higher_order


def _body(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what computes an operator that takes functions, if this torch has it."""
    return rewrite("body", getattr(_LOOPS, name, f"torch.ops.higher_order.{name}"))


@_body("cond")
def _cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any],
    **_: Any,
) -> Any:
    if not isinstance(pred, Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    sides = true_fn(*operands), false_fn(*operands)
    return pytree.tree_map(lambda yes, no: torch.where(pred, yes, no), *sides)


@_body("scan")
def _scan(
    combine_fn: Callable[..., Any],
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    additional_inputs: Sequence[Any] = (),
    **_: Any,
) -> tuple[Tensor, ...]:
    def body(*inputs: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        result = _as_tuple(combine_fn(*inputs, *additional_inputs))
        return result[: len(init)], result[len(init) :]

    carry, rows = run_loop(body, init, xs, len(xs[0]))
    return (*carry, *rows)


@_body("map_impl")
def _map(
    function: Callable[..., Any], xs: Sequence[Tensor], others: Sequence[Any], **options: Any
) -> Any:
    trees = []

    def body(*row: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        leaves, tree = pytree.tree_flatten(function(*row, *others))
        trees.append(tree)
        return (), leaves

    _, rows = run_loop(body, (), xs, len(xs[0]))
    return pytree.tree_unflatten(rows, trees[-1])


@_body("while_loop")
def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
    others: Sequence[Any] = (),
    **_: Any,
) -> tuple[Any, ...]:
    carry = tuple(carried)
    while bool(cond_fn(*carry, *others)):
        carry = _as_tuple(body_fn(*carry, *others))
    return carry


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
