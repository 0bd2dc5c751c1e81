"""Tracing branches and while_loop: loops that a value ends (custom_ops/loops.py).

    y = cond(p, t, f)   ->   y = t() if p else zeros;  y = f() if not p else y
    while_loop          ->   a carry says whether it goes on, another counts for the backward

Each side of a branch is a loop that runs once or not at all. Values that it does not compute bypass
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...capture.rewrites.loop_trace import (
    TracedLoop,
    outer_tensors,
    trace_body,
    use_in_bodies_around,
)
from ...compat.private_apis import _pytree as pytree
from ...errors import user_error


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
        raise user_error(
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
        raise user_error(
            f"the sides of a branch, or the carry of a loop and the next one, differ: "
            f"{', '.join(one)} and {', '.join(other)}",
            why="what comes after is one program for both",
            fix="return tensors of the same shapes and dtypes",
        )


def _type(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}"
