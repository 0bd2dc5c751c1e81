"""A plan's memory of its function: the call that `plan` was given, and plans for other sizes.

`Plan.verify` runs the call again in eager PyTorch. Sizes 0 and 1 broadcast, and programs branch on
them:

p = plan(fn, x, mesh=mesh, dynamic={"x": {0}})      a program for 2 rows and more
p.simulate(x[:1])                                   another one, planned by the first such call

p = plan(fn, x, mask, mesh=mesh)                    fn has `if len(x[mask]) == 0`
p.simulate(x, mask & False)                         another one, once a run has no rows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..capture import ARGUMENT, Captured, opened
from ..capture.assumed_sizes import SIDES
from ..compat.private_apis import _pytree as pytree

Again = Callable[[Any, tuple, dict], Any]  # ArgumentSizes, args, kwargs -> the plan


class PlannedCall(NamedTuple):
    """A function and its arguments. changes: an option by which its plan computes otherwise."""

    fn: Callable
    args: tuple
    kwargs: dict
    changes: str
    modes: tuple[object, ...]

    @staticmethod
    def modes_now() -> tuple[object, ...]:
        """Return the modes of torch that decide what a function computes."""
        cast = (torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        return (torch.is_grad_enabled(), *cast, torch.get_default_dtype())


class OtherSizes:
    """One function's plans for sizes that its plan is not made for, keyed by these sizes."""

    def __init__(self, captured: Captured, again: Again) -> None:
        self.captured, self.again = captured, again
        self.plans: dict[object, Any] = {}

    def plan_of_side(self, args: tuple, kwargs: dict) -> Any:
        """Return the plan for a run with another outcome of a branch on a size."""
        few = SIDES.get().few
        if few not in self.plans:
            self.plans[few] = self.again(self.captured.dynamic, args, kwargs)
        return self.plans[few]

    def plan_for(self, args: tuple, kwargs: dict) -> Any:
        """Return the plan for a call with small sizes; None for others, and for bad arguments."""
        sizes = self.captured.dynamic
        if not sizes.dims:
            return None
        leaves = pytree.tree_leaves(opened((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        planned = [i for i in self.captured.inputs if i.kind == ARGUMENT]
        count = len(planned) - len(self.captured.state_inputs)
        # Bad arguments are not ours to report: the plan itself raises the error that fits.
        if len(tensors) != count or not all(
            sizes.fits(i, t.shape, inp.shape) and t.dtype == inp.dtype
            for i, (t, inp) in enumerate(zip(tensors, planned))
        ):
            return None
        shapes = [t.shape for t in tensors]
        if (symbols := sizes.without_small(shapes)) is None:
            return None
        key = tuple((at, shapes[at[0]][at[1]]) for at in sizes.dims if at not in symbols.dims)
        if key not in self.plans:
            self.plans[key] = self.again(symbols, args, kwargs)
        return self.plans[key]
