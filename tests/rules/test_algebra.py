"""Simplified graphs: nothing is sent for what is known, and the numbers stay."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=3)


def step(logits, labels):
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def test_a_loss_over_a_sharded_vocabulary_sends_two_numbers_a_token():
    """The largest logit and the sum; the label's logit only goes into the mean, and its gradient
    sums to what it was made of.
    """
    logits, labels = torch.randn(4, 5, 7, requires_grad=True), torch.randint(7, (4, 5))
    labels[1, 2] = -100
    plan = gspmd.plan(
        step,
        logits,
        labels,
        mesh=MESH,
        in_specs=("data _ model", "data _"),
        out_specs=("", "data _ model"),
    )
    assert [(c.kind, c.axes, c.payload_bytes) for c in plan.collectives if c.payload_bytes > 8] == [
        ("all_reduce", ("model",), 10 * 4)
    ] * 2
    assert_same(plan.simulate(logits, labels, _poison=True), step(logits, labels))


def twice(x, index):
    """An index of two entries a row: one may be written twice, so that the sum is not that of the
    entries.
    """
    return torch.zeros(4, 6).scatter(1, index, x).sum(1, keepdim=True)


def test_entries_that_may_meet_are_summed():
    x, index = torch.randn(4, 2), torch.tensor([[0, 1], [2, 2], [5, 0], [3, 3]])
    plan = gspmd.plan(twice, x, index, mesh=MESH, in_specs=("data _", "data _"))
    assert_same(plan.simulate(x, index), twice(x, index))


def shifted(x):
    """What a pipeline does with its first state, of zeros: its rows move, and nothing has to be
    sent for that.
    """
    state = gspmd.mark_sharding(x.new_full((6, 4), 0.5), MESH, "model _")
    moved = torch.cat([x[:1], state[:-1]]) + state.roll(1, 0) + state.flip(0)
    return gspmd.mark_sharding(moved, MESH, "model _") * x


def test_rows_of_one_number_are_not_moved():
    x = torch.randn(6, 4)
    plan = gspmd.plan(shifted, x, mesh=MESH, in_specs="model _", out_specs="model _")
    assert plan.sent_bytes <= 4 * 4 * 4  # the rows that x[:1] and the cut push over a border
    assert_same(plan.simulate(x, _poison=True), shifted(x))


def padded(x, state):
    """A shift as GSPMD writes it: rows put before, and as many cut off behind; and the other way
    around.
    """
    return (
        F.pad(state, (0, 0, 1, 0))[:6] + x,
        F.pad(state, (0, 0, 0, 2), value=3.0)[2:],
        F.pad(state.sin()[1:], (0, 0, 1, 0)),
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_rows_put_before_and_cut_off_behind_are_one_move(count):
    """One row of four numbers to the next device, two to the former; what was cut off first is
    padded as it stands.
    """
    mesh, x, state = gspmd.Mesh(s=count), torch.randn(6, 4), torch.randn(6, 4)
    plan = gspmd.plan(padded, x, state, mesh=mesh, in_specs=("s _", "s _"), out_specs=("s _",) * 3)
    assert_same(plan.simulate(x, state, _poison=True), padded(x, state))
    plan = gspmd.plan(
        lambda x, state: padded(x, state)[:2],
        x,
        state,
        mesh=mesh,
        in_specs=("s _", "s _"),
        out_specs=("s _",) * 2,
    )
    assert [(c.kind, c.sent_bytes) for c in plan.collectives] == [("permute", 16), ("permute", 32)]


@pytest.mark.parametrize(
    "function",
    [lambda x: F.pad(x, (0, 0, 1, 2), value=3.0)[7:], lambda x: F.pad(x[5:], (0, 0, 2, 2))[:2]],
)
def test_rows_of_padding_only(function):
    x = torch.randn(5, 4)
    assert_same(
        gspmd.plan(function, x, mesh=MESH, in_specs="model _").simulate(x, _poison=True),
        function(x),
    )


def test_a_step_of_padding_backward():
    def step(x, state):
        return torch.autograd.grad((F.pad(state, (0, 0, 1, 0))[:6] * x).sum(), state)

    x, state = torch.randn(6, 4), torch.randn(6, 4, requires_grad=True)
    plan = gspmd.plan(
        step, x, state, mesh=gspmd.Mesh(s=3), in_specs=("s _", "s _"), out_specs=("s _",)
    )
    assert [(c.kind, c.sent_bytes) for c in plan.collectives] == [("permute", 16)]
    assert_same(plan.simulate(x, state, _poison=True), step(x, state))


def test_what_a_loop_takes_of_a_weight_is_gathered_once():
    def layers(x, w):
        for _ in range(3):
            x = torch.tanh(x @ w[1].t())
        return x

    x, w = torch.randn(64, 4), torch.randn(2, 4, 4)
    plan = gspmd.plan(
        layers, x, w, mesh=gspmd.Mesh(s=2), in_specs=("s _", "_ s _"), out_specs="s _"
    )
    assert [(c.kind, c.sent_bytes) for c in plan.collectives] == [("all_gather", 32)]
    assert_same(plan.simulate(x, w, _poison=True), layers(x, w))


@pytest.mark.parametrize("size", [12, 13])
@pytest.mark.parametrize(
    "scan",
    [
        lambda x: x.cumsum(1),
        lambda x: x.logcumsumexp(1),
        lambda x: x.flip(1).cumsum(1).flip(1),
    ],
)
def test_the_gradient_of_a_scan_sends_results_of_blocks(scan, size):
    def step(x, dy):
        return torch.autograd.grad(scan(x), x, dy)

    x, dy = torch.randn(2, size, requires_grad=True), torch.randn(2, size)
    plan = gspmd.plan(
        step, x, dy, mesh=gspmd.Mesh(s=4), in_specs=("_ s", "_ s"), out_specs=("_ s",)
    )
    assert_same(plan.simulate(x, dy, _poison=True), step(x, dy))
    assert size % 4 or plan.sent_bytes <= 3 * 2 * 4 * 4  # four numbers a row, in three scans


@pytest.mark.parametrize("size", [12, 13])
@pytest.mark.parametrize("scan", [torch.cummax, torch.cummin])
def test_the_gradient_of_a_running_extreme_sends_one_sum_a_block(scan, size):
    """Few different numbers: extremes tie, and lie several blocks before their rows."""

    def step(x, dy):
        leaf = x.detach().requires_grad_()
        values, places = scan(leaf, 1)
        return values.detach(), places, *torch.autograd.grad(values, leaf, dy)

    x, dy = torch.randint(0, 4, (8, size)) / 1.0, torch.randn(8, size)
    x[3, 5] = math.nan
    specs = ("_ s",) * 3
    plan = gspmd.plan(step, x, dy, mesh=gspmd.Mesh(s=4), in_specs=specs[:2], out_specs=specs)
    got, want = plan.simulate(x, dy, _poison=True), step(x, dy)
    torch.testing.assert_close(got, want, equal_nan=True)
    # Of a row: the extreme, its place and the sum, there and back, and whether a block changed it.
    assert size % 4 or plan.sent_bytes == (6 * 4 + 1) * 8 * 3 / 4


def collected(x, weight, mesh, first, how):
    """A pipeline whose state takes in rows of x, then of zeros, and whose first outputs are thrown
    away, as users write it.
    """
    state, outputs, stages = x.new_zeros(4, x.shape[1]), [], weight.shape[0]
    for row in torch.cat([x, x.new_zeros(stages - 1, x.shape[1])]):
        shifted = F.pad(state[:-1], (0, 0, 1, 0)) + F.pad(row[None], (0, 0, 0, stages - 1))
        state = gspmd.mark_sharding(
            torch.einsum("lm,lmn->ln", gspmd.mark_sharding(shifted, mesh, "s _"), weight).tanh(),
            mesh,
            "s _",
        )
        outputs.append(state[-1])
    return how(outputs)[first:]


@pytest.mark.parametrize("how", [torch.stack, lambda rows: torch.cat([row[None] for row in rows])])
def test_outputs_that_are_thrown_away_are_not_collected(how):
    """Of six states the first three go to nobody: a row shifts five times, and five times back,
    three rows are collected, and three of gradients.
    """
    mesh = gspmd.Mesh(s=4)

    def step(x, weight, dy):
        y = collected(x, weight, mesh, 3, how)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    x, weight, dy = (
        torch.randn(3, 8, requires_grad=True),
        torch.randn(4, 8, 8, requires_grad=True) * 0.3,
        torch.randn(3, 8),
    )
    plan = gspmd.plan(
        step,
        x,
        weight,
        dy,
        mesh=mesh,
        in_specs=("_ _", "s _ _", "_ _"),
        out_specs=("_ _", "_ _", "s _ _"),
    )
    row = x[0].numel() * x.element_size()
    assert plan.sent_bytes <= 2 * 5 * row + 2 * (2 * 3 / 4) * 3 * row
    assert_same(plan.simulate(x, weight, dy, _poison=True), step(x, weight, dy))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_rows_cut_off_in_front_and_put_behind_are_one_move(count):
    def function(x):
        return F.pad(x[1:], (0, 0, 0, 1), value=2.0), F.pad(x[:, :-2], (2, 0))

    x = torch.randn(6, 4)
    plan = gspmd.plan(
        function, x, mesh=gspmd.Mesh(s=count), in_specs="s _", out_specs=("s _", "s _")
    )
    assert [(c.kind, c.sent_bytes) for c in plan.collectives] == [("permute", 16)]
    assert_same(plan.simulate(x, _poison=True), function(x))


def taken(x, y):
    """Rows and parts of what is joined, padded or of one number, and sums with zeros, of several
    types.
    """
    both, rows, whole = (
        torch.cat([x, y, x]),
        torch.stack([x[0], y[1], x[2]], 1),
        torch.cat([x, (x > 0).long()]),
    )
    edges, zeros = F.pad(x, (0, 0, 2, 1), value=5.0), torch.zeros_like(x)
    return (
        both[4],
        both[-1],
        both[3:8],
        both[:5],
        rows[:, 1],
        rows[..., 1:],
        whole[3:],
        edges[0],
        edges[2],
        edges[-1],
        edges[1:-1][0],
        torch.add(zeros, x, alpha=2),
        torch.add(x, zeros),
        x.int() + zeros,
        zeros + y[:1],
        torch.cat([x, zeros])[2:][1:],
        torch.cat([x.new_zeros(0), x])[1],
        torch.ones(2, 3, 4)[1].t()[2:],
    )


@pytest.mark.parametrize("spec", ["m _", "_ m", "_ _"])
def test_rows_of_what_is_joined(spec):
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    plan = gspmd.plan(taken, x, y, mesh=gspmd.Mesh(m=3), in_specs=(spec, spec))
    assert_same(plan.simulate(x, y, _poison=True), taken(x, y))


def test_a_result_is_no_argument():
    """Whoever writes into it does not write into the argument, as in eager mode."""

    def copies(x):
        return torch.stack([x, x])[0], x + torch.zeros_like(x), torch.cat([x, x])[:3]

    x = torch.randn(3, 4)
    plan = gspmd.plan(copies, x, mesh=gspmd.Mesh(m=3), in_specs="m _")
    assert {value.op for value in plan.sharded.output_node().args[0]} == {"call_function"}
    assert_same(plan.simulate(x), copies(x))


WRITES = {
    "rows": [(1, i, i + 1) for i in range(6)],
    "backwards": [(1, i, i + 2) for i in (4, 2, 0)],
    "hidden": [(1, i, i + 1) for i in (0, 1, 2, 2, 3, 4, 5)],
    "one is missing": [(1, i, i + 1) for i in (1, 2, 3, 4, 5)],
    "two are missing": [(1, i, i + 1) for i in (2, 3, 4, 5)],
    "overlapping": [(1, i, i + 2) for i in range(5)],
    "unequal": [(1, 0, 1), (1, 1, 3), (1, 3, 4), (1, 4, 6)],
    "two dimensions": [(0, 0, 1), (1, 0, 2), (1, 2, 4), (0, 3, 4), (1, 4, 6)],
}


@pytest.mark.parametrize("reads", (False, True))
@pytest.mark.parametrize("name", WRITES)
def test_parts_that_are_written_into_a_tensor(name: str, reads: bool):
    def run(x, y):
        out, before = y * 1, y.sum(0).sum()
        for i, (d, start, end) in enumerate(WRITES[name]):
            part = x.narrow(d, start, end - start) * (i + 1)
            if reads:  # rows from before, between and behind the writes
                before = out.narrow(d, max(start - 1, 0), 1).select(d, 0).clone().sin().sum()
                part = part + before + out[:, 5].sum()
            out[(slice(None),) * d + (slice(start, end) if end - start > 1 else start,)] = (
                part if end - start > 1 else part.select(d, 0)
            )
        return (out * y).sum() + before

    x, y = torch.randn(2, 4, 6, dtype=torch.float64).requires_grad_()
    plan = gspmd.plan(
        lambda x, y: torch.autograd.grad(run(x, y), (x, y)),
        x,
        y,
        mesh=MESH,
        in_specs=("_ data", "_ data"),
    )
    for one, other in zip(
        plan.simulate(x, y, _poison=True), torch.autograd.grad(run(x, y), (x, y))
    ):
        torch.testing.assert_close(one, other)
