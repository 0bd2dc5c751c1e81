"""torch.cond, scan, map and while_loop, as the operations that they stand for.

scan and map stay loops (loop_trace.py), branches and while_loop too (below). Backends
without loops compute both sides of a branch, and torch.where chooses. They unroll a while_loop, so
its condition has to be known during the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...capture.rewrites.loop_trace import (
    TracedLoop,
    is_unrolling,
    outer_tensors,
    run_loop,
    trace_body,
    use_in_bodies_around,
)
from ...capture.transforms import is_transforming
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from ...rules.rewrites import rewrite

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
    **_: object,
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


# Tracing branches and while_loop: loops that a value ends (custom_ops/loops.py).
#
#     y = cond(p, t, f)   ->   y = t() if p else zeros;  y = f() if not p else y
#     while_loop          ->   a carry says whether it goes on, another counts for the backward
#
# Each side of a branch is a loop that runs once or not at all. Values that it does not compute
# bypass it.


def run_branch(goes: Tensor, true: Callable[[], object], false: Callable[[], object]) -> object:
    """Trace a branch; return its results.

    Both sides are computed if they draw random numbers from PyTorch's own generator.
    """
    trees: list[Any] = []

    def leaves(side: Callable[[], object]) -> tuple[list[Tensor], list[Tensor]]:
        flat, tree = pytree.tree_flatten(side())
        trees.append(tree)
        return flat, []

    sides = [partial(leaves, side) for side in (true, false)]
    records = [outer_tensors(side, (), every=True) for side in sides]
    _check([record.results for record in records])
    if any(record.draws for record in records):
        return both_sides(goes, true, false)
    # No gradient flows through a condition.
    goes = goes.detach().reshape(()).to(torch.bool)
    # A side that does not run passes its carry on: first zeros, then the other side's results.
    results = [x.new_zeros(()).expand(x.shape) for x in records[0].results]
    for runs, side, record in zip((goes, goes.logical_not()), sides, records):
        consts = [*record.outer.values()]
        use_in_bodies_around([runs, *results, *consts])
        # A side runs at most once, so it always says that it has ended.
        ended = torch.zeros_like(runs)

        def body(*_: Tensor, side: Any = side, ended: Tensor = ended) -> tuple[list[Tensor], list]:
            return [ended, *side()[0]], []

        traced = TracedLoop(1, ends="?")
        (_, *results), _ = trace_body(traced, body, [runs, *results], [], consts)
    return pytree.tree_unflatten(results, trees[0])


def both_sides(goes: Tensor, true: Callable[[], object], false: Callable[[], object]) -> object:
    """Compute both sides of a branch, and choose one result."""
    return pytree.tree_map(lambda yes, no: torch.where(goes, yes, no), true(), false())


def run_while(
    condition: Callable[..., Any], body: Callable[..., Sequence[Tensor]], carry: Sequence[Tensor]
) -> list[Tensor]:
    """Trace a while_loop; return its last carry."""

    def goes_on(*carry: Tensor) -> Tensor:
        with torch.no_grad():
            return condition(*carry).reshape(()).to(torch.bool)

    def iteration(*carry: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        after = [*body(*carry)]
        return [goes_on(*after), *after], []

    use_in_bodies_around(carry)
    record = outer_tensors(iteration, carry)
    _check([[*carry], record.results[1:]])
    if record.seeds:
        raise ShardingError.here(
            "the body of a while_loop draws random numbers",
            why="seeds are drawn before a loop, for as many iterations as it has",
            fix="draw outside and pass the numbers, or use scan",
        )
    goes, traced = goes_on(*carry), TracedLoop(1, ends="*")
    # Only a backward needs entries for outside tensors: their gradients leave there.
    consts = [*record.outer.values()] if torch.is_grad_enabled() else []
    (_, traced.count, *last), _ = trace_body(
        traced,
        lambda _, count, *carry: (_with_count(iteration(*carry)[0], count), []),
        [goes, torch.zeros_like(goes, dtype=torch.int64), *carry],
        [],
        consts,
    )
    return last


def _with_count(after: list[Tensor], count: Tensor) -> list[Tensor]:
    return [after[0], count + 1, *after[1:]]


def _check(alike: list[list[Tensor]]) -> None:
    """Raise unless both have as many tensors, with the same shapes and dtypes."""
    one, other = ([_type(x) for x in each] for each in alike)
    if one != other:
        raise ShardingError.here(
            f"the sides of a branch, or the carry of a loop and the next one, differ: "
            f"{', '.join(one)} and {', '.join(other)}",
            why="what comes after is one program for both",
            fix="return tensors of the same shapes and dtypes",
        )


def _type(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}"
