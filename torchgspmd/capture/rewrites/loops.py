"""torch.cond, scan, map and while_loop, as the operations that they stand for.

A loop becomes its iterations: the program grows with their number. Of a branch both sides are
computed, and torch.where chooses: the predicate may depend on values. A while_loop needs a
condition that is known during the trace, such as one of a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.private_apis import _pytree as pytree
from ...rules.rewrites import rewrite

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
    carry, rows = tuple(init), []
    for row in zip(*(x.unbind(0) for x in xs)):
        result = _as_tuple(combine_fn(*carry, *row, *additional_inputs))
        carry = result[: len(init)]
        rows.append(result[len(init) :])
    return (*carry, *(torch.stack(column) for column in zip(*rows)))


@_body("map_impl")
def _map(function: Callable[..., Any], xs: Sequence[Tensor], others: Sequence[Any]) -> Any:
    results = [function(*row, *others) for row in zip(*(x.unbind(0) for x in xs))]
    return pytree.tree_map(lambda *column: torch.stack(column), *results)


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
