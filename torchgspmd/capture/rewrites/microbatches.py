"""Gradient accumulation: forward and backward of one microbatch after the other, as one loop.

    loss = call(batch)      ->      %x = row(%batch, 1x8); loss, gradients of %x; their totals

A backward that begins before the last forward needs a microbatch's loss, so the forward computes
the gradients as well, and only one microbatch's activations are kept. Its backward multiplies the
gradients by the loss's gradient. A total stays a pending sum, so it is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from ..state.dependencies import with_tensors
from ..state.object_trees import closed, opened
from ..trace_context import is_capturing
from ..traced_values import unwrap, was_mutated
from .loop_trace import (
    is_unrolling,
    of_loops_around,
    open_loop,
    outer_tensors,
    replaced,
    use_in_bodies_around,
)


def check_count(count: int) -> None:
    """Raise ShardingError unless this is a number of microbatches."""
    # bool is a subclass of int.
    if type(count) is not int or count < 1:
        raise ShardingError.here(
            f"microbatches is {count!r}",
            fix="give a number of parts that divides the batch, such as microbatches=8",
        )


def divided(leaf: Tensor, count: int) -> Tensor:
    """Split [batch, ...] into [microbatches, rows, ...]; each has rows from all devices."""
    rows = leaf.shape[0]  # a run checks one that it alone knows
    if isinstance(rows, int) and rows % count:
        raise ShardingError.here(
            f"a batch of {rows} is divided into {count} microbatches",
            fix="use a batch that they divide",
        )
    # The minor part is split off, so a shard of the batch has rows of every microbatch.
    return leaf.unflatten(0, (-1, count)).transpose(0, 1)


def joined(leaf: Tensor) -> Tensor:
    """Return the batch whose microbatches are [microbatches, rows, ...]."""
    return leaf.transpose(0, 1).flatten(0, 1)


class Microbatches:
    """Calls a function with one microbatch after the other; the loss is the mean of their losses.

    call: the function. The first scalar that it returns is its loss. module: has the parameters and
    buffers that it uses.
    """

    def __init__(self, call: Callable[..., object], count: int, module: nn.Module) -> None:
        self.call, self.count, self.module = call, count, module

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the batch's results: rows of all microbatches, and scalars' means."""
        leaves, tree = pytree.tree_flatten(opened((args, kwargs)))
        sizes = [x.shape[0] if isinstance(x, Tensor) and x.dim() else None for x in leaves]
        batch = next((size for size in sizes if size is not None), None)
        if batch is None:
            raise ShardingError.here(
                f"a call without tensors is divided into {self.count} microbatches",
                fix="pass the batch as an argument, or leave out microbatches",
            )
        places = [i for i, size in enumerate(sizes) if size is not None and size == batch]
        run = _Run(self, leaves, tree, places)
        rows = [divided(leaves[i], self.count) for i in places]
        use_in_bodies_around(rows)
        rows = of_loops_around(rows)
        outer = of_loops_around(run.find_outer(rows))
        results = iter(_Accumulate.apply(run, len(rows), *rows, *outer))  # pyright: ignore
        values = [next(results) if isinstance(x, Tensor) else x for x in run.results]
        return closed(pytree.tree_unflatten(values, run.tree_of_results))


@dataclass
class _Step:
    """A microbatch's results, the gradients for rows and outside values, and buffers after it."""

    results: list[Tensor]
    gradients: list[Tensor | None]
    buffers: dict[str, Tensor]


class _Run:
    """All microbatches, as a loop of the program or one by one.

    leaves, tree: the call's arguments. places: the leaves that have rows.
    """

    def __init__(
        self, owner: Microbatches, leaves: list[Any], tree: Any, places: Sequence[int]
    ) -> None:
        self.call, self.count, self.module = owner.call, owner.count, owner.module
        self.leaves, self.tree, self.places = leaves, tree, places
        self.is_loop = is_capturing() and not is_unrolling()
        self.names: list[Tensor] = []  # outside values, as the call names them
        self.changed: list[str] = []  # buffers that the call changes
        self.results: list[Any] = []
        self.tree_of_results: Any = None
        self.loss = 0  # its place among the tensors that the call returns

    def find_outer(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the outside values that need a gradient."""
        if not is_capturing():
            self.names = [p for p in self.module.parameters() if p.requires_grad]
            return self.names
        buffers = {name: b.clone() for name, b in self.module.named_buffers()}
        before = {name: unwrap(b) for name, b in buffers.items()}

        def body(*rows: Tensor) -> tuple[tuple, list[Tensor]]:
            results, after = self._call(rows, buffers)
            self.changed = [
                name for name, b in after.items() if was_mutated(b, before.get(name, b))
            ]
            return (), results

        record = outer_tensors(body, (), rows)
        # Numbers of PyTorch's own generator differ between iterations only if these are unrolled.
        self.is_loop &= not record.draws
        self.names = [*record.outer.values()]
        return self.names

    def _call(
        self, rows: Sequence[Tensor], buffers: dict[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Call with rows and other buffers; return its tensors, and the buffers after it."""
        leaves = list(self.leaves)
        for i, x in zip(self.places, rows):
            # Models call view(-1) on what they take.
            leaves[i] = x.contiguous() if leaves[i].is_contiguous() else x
        args, kwargs = closed(pytree.tree_unflatten(leaves, self.tree))

        def call() -> dict[str, Tensor]:
            results = opened(self.call(*args, **kwargs))
            self.results, self.tree_of_results = pytree.tree_flatten(results)
            return dict(self.module.named_buffers())

        after = with_tensors(self.module, buffers, call)
        return [x for x in self.results if isinstance(x, Tensor)], after

    def differentiate(
        self, rows: Sequence[Tensor], outer: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the results, and the gradients for rows and outside values."""
        leaves = [x.detach().requires_grad_() for x in outer]
        # A loop around has entries in the place of the values that the call names.
        table = {id(x): leaf for x, leaf in [*zip(outer, leaves), *zip(self.names, leaves)]}

        def step(rows: Sequence[Tensor], buffers: dict[str, Tensor]) -> _Step:
            taken = [x.detach().requires_grad_() if n else x for x, n in zip(rows, needed)]
            with torch.enable_grad(), replaced(table):
                results, after = self._call(taken, buffers)
                self.loss = _place_of_loss(results)
                _check_rows(results, taken[0].shape[0])
                inner = [x for x, need in zip([*taken, *leaves], needed) if need]
                found = iter(
                    torch.autograd.grad(results[self.loss] / self.count, inner, allow_unused=True)
                )
            gradients = [next(found) if need else None for need in needed]
            return _Step([x.detach() for x in results], gradients, after)

        return self._loop(step, rows) if self.is_loop else self._one_by_one(step, rows)

    def _loop(
        self, step: Callable[..., _Step], rows: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Trace one microbatch, between a loop's entries and exits."""
        buffers = dict(self.module.named_buffers())
        with open_loop(self.count) as traced:
            carries = {name: traced.carry(buffers[name]) for name in self.changed}
            own = {name: carry.clone() for name, carry in carries.items()}
            done = step([traced.row(x) for x in rows], own)
            for name, carry in carries.items():
                buffers[name].copy_(traced.end(done.buffers[name], carry))

            def total(x: Tensor) -> Tensor:
                return traced.total(_wide(x)).to(x.dtype)

            results = [
                joined(traced.stack(x)) if x.dim() else total(self._share(x)) for x in done.results
            ]
            exits = [*[traced.stack] * len(rows), *[total] * (len(done.gradients) - len(rows))]
            return results, [
                None if g is None else leave(g) for leave, g in zip(exits, done.gradients)
            ]

    def _one_by_one(
        self, step: Callable[..., _Step], rows: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        results: list[list[Tensor]] = []
        of_rows: list[list[Tensor | None]] = []
        totals: list[Tensor | None] = []
        for i in range(self.count):
            done = step([x[i] for x in rows], {})
            results.append(done.results)
            of_rows.append(done.gradients[: len(rows)])
            own = done.gradients[len(rows) :]
            totals = [_sum(*pair) for pair in zip(totals or [None] * len(own), own)]
        stacked = [torch.stack([*column]) for column in zip(*results)]
        gradients = [None if c[0] is None else torch.stack([*c]) for c in zip(*of_rows)]
        narrow = [t if t is None else t.to(x.dtype) for t, x in zip(totals, self.names)]
        return [joined(x) if x.dim() > 1 else self._share(x).sum(0) for x in stacked], [
            *gradients,
            *narrow,
        ]

    def _share(self, x: Tensor) -> Tensor:
        """Return a scalar's share in the mean; integers, such as counts, add up."""
        return x / self.count if x.is_floating_point() else x


class _Accumulate(torch.autograd.Function):
    """(microbatches' rows, outside values) -> results, whose loss has known gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        needed = ctx.needs_input_grad[2:]
        results, gradients = run.differentiate(tensors[:count], tensors[count:], needed)
        ctx.save_for_backward(*(g if need else None for g, need in zip(gradients, needed)))
        ctx.loss = run.loss
        ctx.mark_non_differentiable(*(x for i, x in enumerate(results) if i != ctx.loss))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        # The gradients are those for a seed of one; the loss is a scalar, so a product is enough.
        seed = grads[ctx.loss]
        return None, None, *(None if g is None else g * seed for g in ctx.saved_tensors)


def _place_of_loss(results: Sequence[Tensor]) -> int:
    """Return the number of the first scalar with a gradient."""
    for i, x in enumerate(results):
        if not x.dim() and x.is_floating_point() and x.requires_grad:
            return i
    raise ShardingError.here(
        "the module returns no scalar with a gradient, and its batch is divided into microbatches",
        why="a microbatch's backward begins with its loss",
        fix="return the mean loss, or leave out microbatches",
    )


def _check_rows(results: Sequence[Tensor], rows: int) -> None:
    """Raise ShardingError unless results are scalars, or have a microbatch's rows."""
    for x in results:
        if x.dim() and x.shape[0] != rows:
            raise ShardingError.here(
                f"the module returns a tensor {list(x.shape)} for a microbatch of {rows} rows",
                why="microbatches' results are scalars, or are joined by their rows",
                fix="return scalars and tensors with a row for each row of the batch, or leave out "
                "microbatches",
            )


def _wide(g: Tensor) -> Tensor:
    return g.float() if g.is_floating_point() and g.dtype.itemsize < 4 else g


def _sum(total: Tensor | None, g: Tensor | None) -> Tensor | None:
    if g is None:
        return total
    return _wide(g) if total is None else total + g
