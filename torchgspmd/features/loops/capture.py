"""torch.cond, scan, map and while_loop, as the operations that they stand for.

scan and map stay loops (loop_trace.py), branches and while_loop too (branch_trace.py). Backends
without loops compute both sides of a branch, and torch.where chooses. They unroll a while_loop, so
its condition has to be known during the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...capture.rewrites.loop_trace import is_unrolling, run_loop
from ...capture.traced_values import is_transforming
from ...compat.private_apis import _pytree as pytree
from ...rules.rewrites import rewrite
from .branch_trace import both_sides, run_branch, run_while

_LOOPS = torch.ops.higher_order


def _body(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register an implementation for an operator that takes functions, if this torch has it."""
    return rewrite("body", getattr(_LOOPS, name, f"torch.ops.higher_order.{name}"))


@_body("cond")
def _cond(
    pred: object,
    true_fn: Callable[..., object],
    false_fn: Callable[..., object],
    operands: Sequence[object],
    **_: object,
) -> object:
    if not isinstance(pred, Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    run = both_sides if is_unrolling() or is_transforming() else run_branch
    return run(pred, lambda: true_fn(*operands), lambda: false_fn(*operands))


@_body("scan")
def _scan(
    combine_fn: Callable[..., object],
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    additional_inputs: Sequence[object] = (),
    **_: object,
) -> tuple[Tensor, ...]:
    def body(*inputs: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        result = _as_tuple(combine_fn(*inputs, *additional_inputs))
        return result[: len(init)], result[len(init) :]

    carry, rows = run_loop(body, init, xs, len(xs[0]))
    return (*carry, *rows)


@_body("map_impl")
def _map(
    function: Callable[..., object],
    xs: Sequence[Tensor],
    others: Sequence[object],
    **options: object,
) -> Any:
    trees = []

    def body(*row: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        leaves, tree = pytree.tree_flatten(function(*row, *others))
        trees.append(tree)
        return (), leaves

    _, rows = run_loop(body, (), xs, len(xs[0]))
    # The body runs once to be recorded and once to be traced, with equal trees.
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
    # A traced loop carries tensors alone; with other values it is unrolled.
    is_known = not all(isinstance(x, Tensor) for x in (*carry, cond_fn(*carry, *others)))
    if not (is_known or is_unrolling() or is_transforming()):
        return tuple(
            run_while(
                lambda *carry: cond_fn(*carry, *others),
                lambda *carry: _as_tuple(body_fn(*carry, *others)),
                carry,
            )
        )
    while bool(cond_fn(*carry, *others)):
        carry = _as_tuple(body_fn(*carry, *others))
    return carry


def _as_tuple(result: object) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
