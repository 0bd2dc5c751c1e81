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
import torch.nn.functional as F
from torch import Tensor

from ...capture.rewrites.loop_trace import (
    TracedLoop,
    is_unrolling,
    outer_tensors,
    run_loop,
    trace_body,
    use_in_bodies_around,
)
from ...capture.traced_values import is_transforming
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from ...rules.rewrites import DECLINED, rewrite

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
) -> Any:
    trees = []

    def body(*inputs: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        leaves, tree = pytree.tree_flatten(combine_fn(*inputs, *additional_inputs))
        trees.append(tree)
        return leaves[: len(init)], leaves[len(init) :]

    carry, rows = run_loop(body, init, xs, len(xs[0]))
    # The body runs once to be recorded and once to be traced, with equal trees.
    return pytree.tree_unflatten([*carry, *rows], trees[-1])


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


# LSTM, GRU and RNN as loops, with batch, gate and hidden unit as dimensions of their own.
#
# PyTorch computes a layer as one kernel, or flattens [position, batch]. Here the steps are a loop,
# so the program does not grow with the sequence. A backend without loops gets each step.
# Formulas: https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html


# A cell: (the input's part of the gates [n, gate, unit], the hidden state's part, the state)
# -> the next state, hidden first.


def _lstm(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, f, g, o = (x + h).unbind(1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (xr, xz, xn), (hr, hz, hn) = x.unbind(1), h.unbind(1)
    new = (xn + (xr + hr).sigmoid() * hn).tanh()
    return ((state[0] - new) * (xz + hz).sigmoid() + new,)


def _simple(
    function: Callable, x: Tensor, h: Tensor, state: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    return (function((x + h).squeeze(1)),)


def _recurrent(cell: Callable, gates: int) -> Callable:
    """Return the body for torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu."""

    def body(input: Tensor, hx: Any, params: Any, *options: Any) -> Any:
        if isinstance(hx, Tensor) and not hx.is_floating_point():
            return DECLINED  # a packed sequence: these are its batch sizes
        has_biases, layers, dropout, train, bidirectional, batch_first = options
        # [layers * directions, n, unit] each
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        x, directions = (input.transpose(0, 1) if batch_first else input), 2 if bidirectional else 1
        each = len(params) // (layers * directions)
        last: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            outs = []
            for way in range(directions):
                place = layer * directions + way
                weights = _weights(params[place * each : (place + 1) * each], has_biases)
                out, state = _direction(
                    cell, gates, x, [s[place] for s in states], weights, backwards=way == 1
                )
                outs.append(out)
                last.append(state)
            x = torch.cat(outs, -1) if directions > 1 else outs[0]
            # PyTorch drops nothing behind the last layer.
            if dropout and train and layer < layers - 1:
                x = F.dropout(x, dropout)
        return (
            x.transpose(0, 1) if batch_first else x,
            *(torch.stack(kind) for kind in zip(*last)),
        )

    return body


def _weights(params: Sequence[Tensor], has_biases: bool) -> Sequence[Tensor | None]:
    """Return the weights for input and hidden state, their biases, and the projection's weight."""
    biases = params[2:4] if has_biases else (None, None)
    projection = params[4 if has_biases else 2 :]
    return params[0], params[1], *biases, projection[0] if len(projection) else None


def _direction(
    cell: Callable,
    gates: int,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Any],
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run x [l, n, i] through the cell; return the states [l, n, unit], and the last one."""
    of_input, of_hidden, bias, hidden_bias, projection = weights

    def step(*entries: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        *state, input_gates = entries
        hidden_gates = _gates("ni,kui->nku", state[0], of_hidden, hidden_bias, gates)
        following = cell(input_gates, hidden_gates, state)
        if projection is not None:
            following = (F.linear(following[0], projection), *following[1:])
        return following, following[:1]

    # The inputs' products are one for all steps.
    input_gates = _gates("lni,kui->lnku", x, of_input, bias, gates)
    last, (outs,) = run_loop(step, state, [input_gates], len(x), backwards)
    return outs, tuple(last)


def _gates(equation: str, x: Tensor, weight: Tensor, bias: Tensor | None, gates: int) -> Tensor:
    """Return an input's contribution [..., gate, unit] to the gates."""
    y = torch.einsum(equation, x, weight.view(gates, -1, weight.shape[-1]))
    return y if bias is None else y + bias.view(gates, -1).to(y.dtype)


rewrite("body", torch.lstm)(_recurrent(_lstm, 4))
rewrite("body", torch.gru)(_recurrent(_gru, 3))
rewrite("body", torch.rnn_tanh)(_recurrent(partial(_simple, torch.tanh), 1))
rewrite("body", torch.rnn_relu)(_recurrent(partial(_simple, torch.relu), 1))
