"""LSTM, GRU and RNN as loops, with batch, gate and hidden unit as dimensions of their own.

PyTorch computes a layer as one kernel, or flattens [position, batch]. Here the steps are a loop, so
the program does not grow with the sequence. A backend without loops gets each step.

Formulas: https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...capture.rewrites.loop_trace import run_loop
from ...rules.rewrites import DECLINED, rewrite

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
