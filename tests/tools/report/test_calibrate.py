"""The fit of calibrate, and what it says without a process group."""

import dataclasses

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd.tools.calibrate import _fit


def test_the_fit_returns_what_the_times_follow_from():
    truth = (1e-5, 1e-3, 2e-11, 1e-10)
    rows = [(100, 1, 1e6, 1e5), (100, 1, 1e9, 1e7), (400, 1, 1e8, 1e9), (50, 1, 1e10, 1e8)]
    rows.append((1000, 1, 1e7, 1e6))
    seconds = [sum(a * b for a, b in zip(truth, row)) for row in rows]
    assert _fit(rows, seconds, truth) == pytest.approx(truth)
    other = _fit(rows, seconds, [2 * value for value in truth])  # what is measured alone is wrong
    for row, time in zip(rows, seconds):
        assert sum(a * b for a, b in zip(other, row)) == pytest.approx(time, rel=0.2)


def test_there_is_nothing_to_measure():
    with pytest.raises(gspmd.ShardingError, match="(?s)no process group.*torchrun"):
        gspmd.calibrate()


def test_attention_and_views_have_times_of_their_own():
    """An estimate takes the measured attention instead of products, and counts views."""
    mesh, q = gspmd.Mesh(data=2), torch.ones(2, 2, 8, 4)
    attend = torch.nn.functional.scaled_dot_product_attention
    plan = gspmd.plan(lambda q: attend(q, q, q).flatten(2), q, mesh=mesh, in_specs="data _ _ _")
    hardware = dataclasses.replace(
        gspmd.Hardware.of("cpu_gloo"), attention=(3.0, 1e6), view=0.5, launch=0.0
    )
    count = 4 * (2 * 2 * 8 * 4) // 2 * 8  # of the products of scores and of values, on one device
    seconds = {event.name: event.seconds for event in plan.estimate(hardware).events}
    assert 3.0 + count / 1e6 in seconds.values(), seconds
    assert 0.5 in seconds.values(), seconds
