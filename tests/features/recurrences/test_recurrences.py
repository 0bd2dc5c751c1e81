"""Recurrences along a sharded sequence: right, and a few states are sent, whatever the length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import recurrent
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes.pass_types import FEATURE_PASSES, FeaturePass

DOUBLE = torch.float64
BATCH, KEYS, VALUES, ROWS = 2, 3, 4, 8  # a state is [batch, keys, values]; rows of a part
STATE = BATCH * KEYS * VALUES * 8  # bytes

READS = {
    "split": lambda x, n: x.split(ROWS, 1),
    "slice": lambda x, n: [x[:, i * ROWS : (i + 1) * ROWS] for i in range(n)],
    "select": lambda x, n: [*map(x.reshape(BATCH, n, ROWS, -1).select, [1] * n, range(n))],
    "unbind": lambda x, n: x.unflatten(1, (n, ROWS)).unbind(1),
}
DECAYS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "none": lambda g: 0.9,
    "scalar": lambda g: g[:, :, 0].sum(1).exp()[:, None, None],
    "keys": lambda g: g.sum(1).exp()[:, :, None],
    "mixed": lambda g: (g.sum(1)[:, :, None] * torch.arange(1, VALUES + 1, dtype=DOUBLE)).exp(),
}
FIRST = ("zeros", "none", "given")


class Attention(nn.Module):
    """Linear attention with a decay, in a loop over parts of the sequence."""

    def __init__(self, reads: str, decay: str, first: str, last: bool, bend: bool = False) -> None:
        super().__init__()
        self.reads, self.decay, self.first, self.last, self.bend = reads, decay, first, last, bend
        self.w = nn.Parameter(torch.eye(KEYS, dtype=DOUBLE) + torch.rand(KEYS, KEYS).double() / 9)
        self.state = nn.Parameter(torch.rand(BATCH, KEYS, VALUES).double())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        y, state = self.attend(q @ self.w, k @ self.w, v, -(g @ self.w).square() / 9)
        loss = y.square().mean() + (self.state.sum() if self.first != "given" else 0)
        return loss + state.square().mean() if self.last else loss

    def attend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(*(READS[self.reads](x, len(q[0]) // ROWS) for x in (q, k, v, g)))
        state = self.state if self.first == "given" else None
        if self.first == "zeros":
            state = torch.zeros(BATCH, KEYS, VALUES, dtype=DOUBLE)
        results = []
        for q, k, v, g in parts:
            y = (q @ k.mT).tril() @ v
            if state is not None:
                y = y + q @ state
            new = k.mT @ v
            state = new if state is None else state * DECAYS[self.decay](g) + new
            state = state.tanh() if self.bend else state
            results.append(y)
        assert state is not None
        return torch.cat(results, 1), state


def inputs(rows: int) -> list[Tensor]:
    return [torch.rand(BATCH, rows, n).double() for n in (KEYS, KEYS, VALUES, KEYS)]


def sent(model: nn.Module, rows: int, mesh: Mesh) -> float:
    return recurrent.sent(model, inputs(rows), ("_ seq _",) * 4, mesh)


def most(shards: int) -> float:
    """Return the bytes of a step: scales and shifts of all devices, there and back, and sums."""
    states = 2 * 2 * (shards - 1) * STATE
    # The last state, the gradient of the first one, of the weight and of the loss.
    return states + 2 * (2 * STATE + KEYS * KEYS * 8 + 8)


CASES = [*itertools.product(READS, DECAYS, FIRST, (False, True))]
random.Random(0).shuffle(CASES)


@pytest.mark.parametrize("reads, decay, first, last", CASES[:8])
def test_a_loop_over_parts_sends_a_few_states(reads: str, decay: str, first: str, last: bool):
    torch.manual_seed(0)
    shards = 2 if last else 4
    mesh, model = Mesh(seq=shards), Attention(reads, decay, first, last)
    count = 8 * ROWS
    assert sent(model, count, mesh) <= most(shards)


@pytest.mark.parametrize("reads, decay, first", [("slice", "keys", "zeros")])
def test_the_bytes_do_not_grow_with_the_length(reads: str, decay: str, first: str):
    torch.manual_seed(0)
    mesh, model = Mesh(data=2, seq=2), Attention(reads, decay, first, False)
    assert sent(model, 8 * ROWS, mesh) == sent(model, 16 * ROWS, mesh) <= most(2)


@pytest.mark.parametrize("rows", (6 * ROWS, 7 * ROWS))
def test_parts_that_shards_do_not_divide(rows: int):
    torch.manual_seed(0)
    sent(Attention("slice", "keys", "none", True), rows, Mesh(seq=4))


def test_a_state_that_is_no_affine_function_of_the_one_before():
    torch.manual_seed(0)
    sent(Attention("slice", "keys", "zeros", False, bend=True), 4 * ROWS, Mesh(seq=2))


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda h: h.max(1, keepdim=True).values,  # an operation with several results
    "flip": lambda h: h.flip(-1),
    "roll": lambda h: h.roll(1, 1),
    "index": lambda h: h[:, [1, 2, 0]],
    "transpose": lambda h: h.transpose(0, 1),
    "cumsum": lambda h: h.cumsum(1),
    "sort": lambda h: h.sort(1).values,
    "chunk": lambda h: torch.cat(h.tanh().split((1, 2), 1)[::-1], 1),
    "norm": lambda h: torch.nn.functional.layer_norm(h, (3,)),
    "sum": lambda h: h.sum(1, keepdim=True),
    "affine": lambda h: h - 1,
    "product": lambda h: h * h,
}


@pytest.mark.parametrize("name", MIXED)
def test_states_whose_elements_are_mixed_are_right(name: str):
    torch.manual_seed(0)

    def run(x: Tensor) -> Tensor:
        state, states = torch.zeros(3, 3, dtype=DOUBLE), []
        for row in x.unbind(0):
            state = MIXED[name](state) * row / 3 + row
            states.append(state)
        return torch.stack(states)

    x = torch.rand(8, 3, 3).double()
    plan = gspmd.plan(run, x, mesh=Mesh(seq=2), in_specs="seq _ _", out_specs="seq _ _")
    torch.testing.assert_close(plan.simulate(x), run(x), rtol=1e-11, atol=1e-12)


class Tokens(nn.Module):
    """A moving average, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(KEYS).double())

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for row in x.unbind(1):
            state = state + self.rate * (row - state)
            states.append(state)
        return torch.stack(states, 1).square().mean()


class Stabilized(nn.Module):
    """RWKV-4's attention and xLSTM's memory: exponentials beside a running maximum that decays."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(KEYS).double())
        self.w = nn.Parameter(torch.eye(KEYS, dtype=DOUBLE))

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        k, v = k @ self.w, v @ self.w
        y, above = torch.zeros_like(v), torch.zeros_like(v[:, 0])
        below, most = above, above - 1e38
        for i in range(v.shape[1]):
            largest = torch.maximum(most - self.rate, k[:, i])
            old, new = (most - self.rate - largest).exp(), (k[:, i] - largest).exp()
            above, below, most = old * above + new * v[:, i], old * below + new, largest
            y[:, i] = above / below
        return y.square().mean()


def test_a_running_maximum_that_decays():
    torch.manual_seed(0)
    k, v = torch.rand(2, BATCH, 48, KEYS).double() * 5
    model = Stabilized()
    plan = gspmd.plan(model, k, v, mesh=Mesh(seq=4), in_specs=("_ seq _",) * 2, grad=True)
    loss, gradients = plan.simulate(k, v)
    expected = model(k, v)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-13)
    # Three states and seven gradients, each with a scale and a shift; rows would be 6,912 bytes.
    assert plan.sent_bytes <= 10 * 2 * 3 * BATCH * KEYS * 8


class ScannedTokens(Tokens):
    """The same by `scan`."""

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = state + self.rate * (row - state)
            return state, state * 1

        return scan(step, torch.zeros_like(x[:, 0]), x, dim=1)[1].square().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scanned", (False, True))
def test_a_moving_average(scanned: bool):
    torch.manual_seed(0)
    model, x = Tokens(), torch.rand(BATCH, 16, KEYS).double()
    run: nn.Module = ScannedTokens() if scanned else model
    run.load_state_dict(model.state_dict())
    plan = gspmd.plan(run, x, mesh=Mesh(seq=4), in_specs="_ seq _", grad=True)
    loss, gradients = plan.simulate(x)
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(gradients["rate"], model.rate.grad, rtol=1e-11, atol=1e-14)
    assert plan.sent_bytes <= 2 * 2 * 3 * BATCH * KEYS * 8 + 2 * (KEYS * 8 + 8)


def affine(p: tuple, q: tuple) -> tuple:
    return p[0] * q[0], p[1] * q[0] + q[1]


def longest(p: tuple, q: tuple) -> tuple:
    """Max-plus: the best path so far, and its score."""
    return p[0] + q[0], torch.maximum(p[1] + q[0], q[1])


def matrices(p: tuple, q: tuple) -> tuple:
    """Products of matrices do not commute."""
    return q[0] @ p[0], q[0] @ p[1] + q[1]


SCANS = {f.__name__: f for f in (affine, longest, matrices)}


@pytest.mark.parametrize(
    "name, sizes, rows, reverse",
    [
        ("affine", {"seq": 4}, 64, False),
        ("longest", {"data": 2, "seq": 2}, 62, True),
        ("matrices", {"seq": 2}, 64, False),
        ("matrices", {"seq": 4}, 61, True),
    ],
)
def test_associative_scan(name: str, sizes: dict[str, int], rows: int, reverse: bool):
    torch.manual_seed(0)
    mesh = Mesh(**sizes)

    def run(a: Tensor, b: Tensor) -> Tensor:
        scan = associative_scan(SCANS[name], (a, b), 1, reverse=reverse, combine_mode="generic")
        return scan[1]

    a, b = torch.rand(2, rows, 3, 3).double() / 3 + 0.2, torch.rand(2, rows, 3, 3).double()
    plan = gspmd.plan(run, a, b, mesh=mesh, in_specs=("_ seq _ _",) * 2, out_specs="_ seq _ _")
    torch.testing.assert_close(plan.simulate(a, b), run(a, b), rtol=1e-11, atol=1e-11)
    # Both states of each device's last row; a scan of another direction flips the rows.
    if not reverse:
        assert plan.sent_bytes <= (mesh.size - 1) * 2 * 2 * 9 * 8


def test_a_program_without_parts_runs_no_file_of_recurrences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FEATURE_PASSES, "split_sequences", FeaturePass(pytest.fail, ()))
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))

    def run(x: Tensor) -> Tensor:
        q, k, v = model[0](x).chunk(3, -1)
        return model[2](torch.cat([q * k, v, q], -1))

    gspmd.plan(run, torch.rand(4, 8), mesh=Mesh(data=2), in_specs="data _")
