"""Schedules: bubbles and activations by the formulas of the papers; the printed form; a picture."""

import xml.etree.ElementTree as ET

import pytest
import torch
import torch.distributed.pipelining.schedules as schedules
from torch import nn

import torchgspmd as gspmd
from torchgspmd.features.pipelines.dual_pipe import dual_pipe
from torchgspmd.features.pipelines.list_scheduler import Order, curve, list_schedule
from torchgspmd.features.pipelines.schedule import Piece, Times, in_ticks, needed_by
from torchgspmd.fx_passes.loop_call import loop_calls

TIMES = (Times(), Times(10, 11, 9), Times(1, 1, 0.5))
SIZES = ((2, 2), (2, 6), (4, 8), (8, 24))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p, m", SIZES)
def test_bubbles_and_activations(p, m, times):
    whole = times.forward + times.backward + times.weights
    one = list_schedule(p, m, memory=p, times=times)  # 1F1B
    assert one.bubble == pytest.approx((p - 1) * whole) and max(one.kept) == p
    assert one.share == pytest.approx((p - 1) / (m + p - 1))
    assert in_ticks(p, m, times=times).share == pytest.approx(one.share)  # GPipe
    assert max(in_ticks(p, m, times=times).kept) == m
    if m >= 2 * p:
        h1 = list_schedule(p, m, split=True, memory=p, times=times)  # ZB-H1
        gap = times.forward + times.backward - times.weights
        assert h1.bubble == pytest.approx((p - 1) * gap) and max(h1.kept) == p
    if m >= 2 * p and times == Times():
        h2 = list_schedule(p, m, split=True, memory=2 * p - 1)  # ZB-H2
        assert h2.bubble == 0 and max(h2.kept) == 2 * p - 1


@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("memory", (1, 3, None))
def test_each_piece_once_and_after_what_it_needs(split, memory):
    p, m = 3, 5
    schedule = list_schedule(p, m, split=split, memory=memory, times=Times(2, 3, 1))
    slots = {slot.piece: slot for row in schedule.rows for slot in row}
    kinds = "FBW" if split else "FB"
    assert {*slots} == {Piece(k, s, i) for k in kinds for s in range(p) for i in range(m)}
    assert sum(map(len, schedule.rows)) == len(slots)
    for piece, slot in slots.items():
        assert all(slots[other].end <= slot.begin for other in needed_by(piece, p - 1))
    for row in schedule.rows:
        assert all(one.end <= two.begin for one, two in zip(row, row[1:]))
    assert memory is None or max(schedule.kept) <= memory


def test_less_time_is_lost_with_more_memory():
    points = curve(4, 12)
    assert points[3] == (4, 3.0) and points[-1] == (7, 0.0)
    assert all(a >= b for (_, a), (_, b) in zip(points, points[1:]))
    with pytest.raises(gspmd.ShardingError, match="keep only 0 activations"):
        list_schedule(2, 2, memory=0)


@pytest.mark.parametrize("p, m", ((2, 4), (4, 8), (4, 16)))
def test_two_rounds(p, m):
    """Interleaved 1F1B is at its formula; ZBV has no bubble where F=B=W."""
    one = Order.parse(f"1f1b {p}x{m} rounds 2").schedule
    assert one.idle == pytest.approx((p - 1) / (2 * m + p - 1))
    assert max(one.kept) <= 3 * p - 1
    vee = list_schedule(p, m, split=True, memory=3 * p - 1, rounds=2)
    assert vee.bubble == 0 and max(vee.kept) <= 3 * p - 1
    same = list_schedule(p, m, split=True, memory=2 * p, rounds=2)  # as much as 1F1B keeps
    assert same.bubble <= 3 and max(same.kept) == 2 * p
    assert curve(p, m, rounds=2)[p - 1] == (2 * p, same.bubble)
    for schedule in (one, vee, same):
        slots = {slot.piece: slot for row in schedule.rows for slot in row}
        assert len(slots) == sum(map(len, schedule.rows)) == (4 if schedule is one else 6) * p * m
        for piece, slot in slots.items():
            assert all(slots[n].end <= slot.begin for n in needed_by(piece, 2 * p - 1))


def order_of_torch(p: int, m: int) -> list[list[Piece]]:
    """The pieces of torch.distributed.pipelining's ScheduleDualPipeV, without its processes."""
    schedule = schedules.ScheduleDualPipeV.__new__(schedules.ScheduleDualPipeV)
    schedule.pp_group_size, schedule._n_microbatches = p, m
    kinds = {"FULL_BACKWARD": "BW", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    return [
        [
            Piece(kind, each.stage_index, each.microbatch_index)
            for action in schedule._calculate_single_rank_operations(rank)
            for each in (action.sub_actions or (action,))
            for kind in kinds.get(each.computation_type.name, "F")
        ]
        for rank in range(p)
    ]


@pytest.mark.parametrize("p", (2, 3, 4, 7))
@pytest.mark.parametrize("times", TIMES)
def test_dual_pipe(p, times):
    """The pieces are in torch's order; bubbles and activations are at their formulas."""
    for m in (2 * p, 2 * p + 1, 5 * p):
        pieces = dual_pipe(p, m)
        if hasattr(schedules, "ScheduleDualPipeV"):
            assert pieces == order_of_torch(p, m)
        assert len({x for row in pieces for x in row}) == sum(map(len, pieces)) == 6 * p * m
        schedule = Order.parse(f"dualpipev {p}x{m} rounds 2 vee").timed(times)
        gap = times.forward + times.backward - times.weights
        assert schedule.bubble == pytest.approx((p - 1) * gap)
        assert max(schedule.kept) == 2 * p + 1


@pytest.mark.parametrize(
    "text",
    (
        "1f1b 4x8",
        "dualpipev 2x4 rounds 2 vee",
        "zero_bubble 2x4 rounds 2 keeps 8 vee",
        "auto 4x8 within 4096 recompute",
    ),
)
def test_the_text_of_an_order(text):
    assert str(Order.parse(text)) == text


def test_text_and_picture():
    schedule = list_schedule(3, 4, split=True, memory=3)
    assert str(schedule).splitlines() == [
        "0  F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "1     F0 F1 F2 B0 W0 B1 W1 F3 B2 W2 B3 W3",
        "2        F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert schedule.table[2][:4] == ("2F0", "2I0", "2F1", "2I1")
    assert list_schedule(2, 1).table == (("0F0", "0B0"), ("1F0", "1B0"))
    boxes = ET.fromstring(schedule.svg()).iter("{http://www.w3.org/2000/svg}rect")
    assert len({(box.get("x"), box.get("y")) for box in boxes}) == 3 * 4 * 3


@pytest.mark.parametrize("p, m, v", ((4, 8, 1), (2, 3, 2)))
def test_the_program_has_the_ticks_of_its_schedule(p, m, v):
    """The loop of the program: a device works in m v of its ticks."""
    mesh = gspmd.Mesh(stage=p)
    blocks = gspmd.pipeline(
        [nn.Linear(4, 4) for _ in range(p * v)], mesh, microbatches=m, repeats=v
    )
    plan = gspmd.plan(blocks, torch.ones(2 * m, 4), mesh=mesh, grad=True)
    ticks = [call.loop.length for _, call in loop_calls(plan.program.graph)]
    assert ticks == [m * v + p - 1] * 2  # forward and backward
    assert 1 - m * v / ticks[0] == pytest.approx(blocks.schedule().share)
    assert blocks.schedule().share == pytest.approx((p - 1) / (v * m + p - 1))
