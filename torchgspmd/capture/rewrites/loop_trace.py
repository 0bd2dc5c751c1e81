"""Tracing a loop: its body runs once, between entries and exits (custom_ops/loops.py).

    carry, rows = scan(body, h0, xs)    ->    h, x = entries(h0, xs);  exits(*body(h, x))

Autograd differentiates the one iteration. The loop that runs backwards has an entry for an exit's
gradient, and an exit for an entry's. The pairs are next and carry, stack and row, total and const.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...compat.patches import setting
from ...compat.private_apis import _pytree as pytree
from ...rules.custom_ops.loops import (
    Loop,
    Nest,
    loop_carry,
    loop_const,
    loop_next,
    loop_row,
    loop_stack,
    loop_total,
    nest_text,
)
from ..traced_values import Draws, Record, forget_constants, is_transforming

Body = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]

_is_unrolling: ContextVar[bool] = ContextVar("unrolling", default=False)
_numbers = count()  # normalize renumbers a program's loops
_around: ContextVar[tuple[TracedLoop, ...]] = ContextVar("loops", default=())
_replaced: ContextVar[tuple[dict[int, Tensor], ...]] = ContextVar("replaced", default=())
_records: ContextVar[tuple[Record, ...]] = ContextVar("records", default=())
_Repeats = Callable[["TracedLoop"], "TracedLoop"]
# maps a new loop to the one that it repeats
_repeats: ContextVar[_Repeats | None] = ContextVar("repeats", default=None)


class TracedLoop:
    """A loop during its trace. backward: the loop that runs backwards, while that is traced.

    ends: as in Loop. goes: the first carry's beginning, if a value ends it.
    """

    def __init__(self, length: int, reverse: bool = False, ends: str = "") -> None:
        repeats = _repeats.get()
        self.first = repeats(self) if repeats else self  # other than this one if recomputed
        if self.first is self:
            self.loop = Loop(next(_numbers), 0, length, reverse, ends)
        else:
            self.loop = self.first.next_visit(reverse)
        self.around, self.visits = _around.get(), 0
        self.backward: Loop | None = None
        self.carries: list[Tensor] = []  # the forward's entries
        self.gradients: list[Tensor | None] = []  # the backward's entries
        self.goes: Tensor | None = None
        self.count: Tensor | None = None  # a while_loop's iterations
        self.control: list[Tensor] = []  # backward entries that decide its end

    def text(self, loop: Loop) -> str:
        """Return a loop with its outer loops, which may themselves run backwards by now."""
        nest: Nest = tuple(each.backward or each.loop for each in self.around)
        return nest_text((*nest, loop))

    def row(self, xs: Tensor) -> Tensor:
        return loop_row(xs, self.text(self.loop))

    def carry(self, x: Tensor) -> Tensor:
        """Return an iteration's carry; x is the first one's."""
        return loop_carry(x, self.text(self.loop))

    def end(self, x: Tensor, carry: Tensor) -> Tensor:
        """Return the last iteration's x, which is each next iteration's carry."""
        return loop_next(x, x, carry, self.text(self.loop))

    def stack(self, x: Tensor) -> Tensor:
        return loop_stack(x, self.text(self.loop))

    def total(self, x: Tensor) -> Tensor:
        return loop_total(x, self.text(self.loop))

    def next_visit(self, reverse: bool) -> Loop:
        """Return a loop that walks the rows again."""
        self.visits += 1
        return replace(self.loop, visit=self.visits, reverse=reverse)

    def start_backward(self) -> str:
        """Return the text for the loop that runs backwards, which begins here."""
        self.backward = self.first.next_visit(not self.loop.reverse)
        text = self.text(self.backward)
        if self.loop.ends:
            counts = [] if self.count is None else [self.count]
            goes = self.goes if self.count is None else self.count > 0
            self.control = [loop_carry(x, text) for x in (goes, *counts)]
        return text

    def end_backward(self, text: str) -> None:
        """Add the end of the loop that runs backwards: a branch has run, or a count is zero."""
        if not self.control:
            return
        goes, *counts = self.control
        counts = [count - 1 for count in counts]
        after = [counts[0] > 0 if counts else torch.zeros_like(goes), *counts]
        for entry, x in zip(self.control, after):
            loop_next(x, x, entry, text)


def is_unrolling() -> bool:
    """Return whether the trace is for a backend without loops."""
    return _is_unrolling.get()


def unrolling() -> AbstractContextManager[bool]:
    """Trace loops as their iterations, for a backend that has none."""
    return setting(_is_unrolling, True)


def run_loop(
    body: Body, carry: Sequence[Tensor], rows: Sequence[Tensor], length: int, reverse: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Trace a loop; return the last carry, and the stacked results.

    It becomes its iterations if these draw random numbers from PyTorch's own generator, and under
    torch.func's transforms.

    body: (*carry, *an iteration's rows) -> next carry, the iteration's results.
    """
    use_in_bodies_around((*carry, *rows))
    carry, rows = of_loops_around(carry), of_loops_around(rows)
    # The body runs once before, to find the outside tensors that need a gradient.
    record = outer_tensors(body, carry, rows)
    if record.draws or is_unrolling() or is_transforming():
        return _unrolled(body, carry, rows, length, reverse)
    # Only a backward needs entries for outside tensors: their gradients leave there.
    consts = list(record.outer.values()) if torch.is_grad_enabled() else []
    return trace_body(TracedLoop(length, reverse), body, carry, rows, consts)


def trace_body(
    traced: TracedLoop,
    body: Body,
    carry: Sequence[Tensor],
    rows: Sequence[Tensor],
    consts: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Trace a loop body; return the last carry, and the stacked results.

    consts: outside tensors that enter the body.
    """
    if traced.loop.ends:
        traced.goes = carry[0]
    entries = _Entries.apply(traced, len(carry), len(rows), *carry, *rows, *of_loops_around(consts))
    at, inner = len(carry), len(carry) + len(rows)
    note_results(entries)
    forget_constants(entries[:at])
    replaced = dict(zip(map(id, consts), entries[inner:]))
    with _inside(traced, replaced), _Replace(replaced):
        carried, results = body(*entries[:at], *entries[at:inner])
    traced.carries = list(entries[:at])
    leaving = [replaced.get(id(x), x) for x in (*carried, *results)]
    note_results(leaving)  # no mode sees torch.vmap's results
    passing = traced.carries if traced.loop.ends == "?" else []
    exits = _Exits.apply(traced, len(carry), len(leaving), *leaving, *passing)
    note_results(exits)
    return list(exits[:at]), list(exits[at:])


def _unrolled(
    body: Body, carry: Sequence[Tensor], rows: Sequence[Tensor], length: int, reverse: bool
) -> tuple[list[Tensor], list[Tensor]]:
    carried, results = list(carry), []
    for i in reversed(range(length)) if reverse else range(length):
        after, made = body(*carried, *(x[i] for x in rows))
        carried = list(after)
        results.append(made)
    columns = zip(*(results[::-1] if reverse else results))
    return carried, [torch.stack(column) for column in columns]


def use_in_bodies_around(operands: Sequence[Tensor]) -> None:
    """Tell the bodies around that they use these."""
    for record in _records.get():
        record.use(operands)


@contextmanager
def recording() -> Iterator[None]:
    """Show the operations of the block to the bodies around: a mode is off while it has a call."""
    with ExitStack() as stack:
        for record in _records.get():
            stack.enter_context(record)
        yield


@contextmanager
def open_loop(length: int) -> Iterator[TracedLoop]:
    """Trace a loop body in the block, which writes its entries and exits itself."""
    traced = TracedLoop(length)
    with _inside(traced, {}):
        yield traced


class RecomputedRegion:
    """A checkpoint's function, whose loops the backward traces again.

    torch.utils.checkpoint runs its function a second time when the backward reads a saved value.
    By then the trace is in no loop, so the region notes the loops around it. A loop of the second
    time walks the rows of the same loop of the first: both share random seeds.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function, self.around, self.outer = function, _around.get(), _repeats.get()
        self.loops: list[TracedLoop] = []  # of the first time

    @contextmanager
    def first_time(self) -> Iterator[None]:
        """Note the loops that the block traces."""
        with setting(_around, self.around), setting(_repeats, self._note):
            yield

    def again(self, *args: object, **kwargs: object) -> object:
        """Run the function a second time."""
        remaining = iter(self.loops)
        with setting(_around, self.around), setting(_repeats, lambda _: next(remaining)):
            return self.function(*args, **kwargs)

    def _note(self, loop: TracedLoop) -> TracedLoop:
        first = self.outer(loop) if self.outer else loop
        self.loops.append(first)
        return first


@contextmanager
def replaced(table: dict[int, Tensor]) -> Iterator[None]:
    """Replace tensors in the block. table: by the id of the old one."""
    with setting(_replaced, (*_replaced.get(), table)), _Replace(table):
        yield


def note_results(results: Sequence[Tensor]) -> None:
    """Tell the outer bodies that they compute these: no mode sees a Function's call."""
    for record in _records.get():
        record.add(results)


@contextmanager
def _inside(traced: TracedLoop, replaced: dict[int, Tensor]) -> Any:
    inner = (*_around.get(), traced)
    with setting(_around, inner), setting(_replaced, (*_replaced.get(), replaced)):
        yield


def of_loops_around(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as the outer loops have them: no mode sees a Function's call."""
    # The innermost loop's table comes first.
    tables = _replaced.get()[::-1]
    return [next((t[id(x)] for t in tables if id(x) in t), x) for x in tensors]


def outer_tensors(
    body: Body, carry: Sequence[Tensor], rows: Sequence[Tensor] = (), every: bool = False
) -> Record:
    """Run a body once; note the outside tensors that it uses and that need a gradient.

    every: note those that need none, too.
    """
    own = [*(x.detach() for x in carry), *(x[0].detach() for x in rows)]
    record = Record(own, every)
    with setting(_records, (*_records.get(), record)), record, Draws(record):
        record.results = [*itertools.chain(*body(*own))]
        record.use(record.results)
    return record


class _Replace(TorchFunctionMode):
    """Puts entries in place of outside tensors."""

    def __init__(self, entries: dict[int, Tensor]) -> None:
        super().__init__()
        self.entries = entries

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: self.entries.get(id(t), t), (args, kwargs or {})
        )
        return func(*args, **kwargs)


class _Entries(torch.autograd.Function):
    """(carries, stacked rows, outside values) -> their values in an iteration."""

    @staticmethod
    def forward(
        ctx: Any, traced: TracedLoop, carries: int, rows: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.traced, ctx.carries, ctx.rows = traced, carries, rows
        # None distinguishes a gradient that nobody computes from zeros.
        ctx.set_materialize_grads(False)
        text = traced.text(traced.loop)
        kinds = [loop_carry] * carries + [loop_row] * rows
        kinds += [loop_const] * (len(tensors) - len(kinds))
        results = tuple(kind(x, text) for kind, x in zip(kinds, tensors))
        # A carry may get a gradient in a later iteration, though its first value needs none.
        ctx.mark_non_differentiable(
            *(
                result
                for i, (x, result) in enumerate(zip(tensors, results))
                if not (x.is_floating_point() or x.is_complex())
                or i >= carries
                and not x.requires_grad
            )
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        traced: TracedLoop = ctx.traced
        assert traced.backward is not None, "the exits come first in a backward"
        text, at, inner = traced.text(traced.backward), ctx.carries, ctx.carries + ctx.rows
        results: list[Tensor | None] = []
        traced.end_backward(text)
        for grad, entry, carry in zip(grads, traced.gradients, traced.carries):
            if traced.loop.ends == "?":  # it passes by, and the side does not use it
                results.append(grad)
            elif entry is not None:
                grad = torch.zeros_like(carry) if grad is None else grad
                results.append(loop_next(grad, grad, entry, text))
            else:
                results.append(None)
        for i, grad in enumerate(grads[at:], at):
            kind = loop_stack if i < inner else loop_total
            results.append(None if grad is None else kind(grad, text))
        traced.backward = None
        return None, None, None, *results


class _Exits(torch.autograd.Function):
    """An iteration's (next carries, results) -> the last carries, the stacked results.

    A branch's exits also take values that bypass a side, for their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, traced: TracedLoop, carries: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.traced, ctx.carries = traced, carries
        # The last value that a loop saves: a checkpoint that runs it again stops behind its end.
        ctx.save_for_backward(*tensors[:1])
        text, tensors = traced.text(traced.loop), tensors[:count]
        return (
            *(loop_next(x, x, carry, text) for x, carry in zip(tensors, traced.carries)),
            *(loop_stack(x, text) for x in tensors[carries:]),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        assert ctx.saved_tensors  # A checkpoint runs again now, before the loop's backward.
        traced, needed = ctx.traced, ctx.needs_input_grad[3:]
        text, at = traced.start_backward(), ctx.carries
        is_branch = traced.loop.ends == "?"
        enter = loop_const if is_branch else loop_carry
        traced.gradients = [
            enter(grad, text) if carry.requires_grad else None
            for carry, grad in zip(traced.carries, grads)
        ]
        rows = [
            loop_row(grad, text) if need else None for grad, need in zip(grads[at:], needed[at:])
        ]
        passing = grads[:at] if is_branch else ()
        return None, None, None, *traced.gradients, *rows, *passing
