"""The garbage collector while planning: off, and afterwards as it was."""

import gc

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd.capture import trace_context

MESH = gspmd.Mesh(data=2)


class Inside(Exception):
    pass


def tells(x):
    raise Inside(gc.isenabled())


@pytest.mark.parametrize("program", [torch.neg, tells])
@pytest.mark.parametrize("enabled", [True, False])
def test_planning_does_without_it_and_leaves_it_as_it_was(program, enabled):
    try:
        if not enabled:
            gc.disable()
        gspmd.plan(program, torch.randn(4), mesh=MESH)
    except Inside as inside:
        assert inside.args == (False,)
    else:
        assert program is torch.neg
    finally:
        after = gc.isenabled()
        gc.enable()
    assert after == enabled


@pytest.mark.parametrize("stay", [False, True])
def test_it_scans_the_process_only_if_objects_stay(stay, monkeypatch):
    scans, kept = [], []
    monkeypatch.setattr(trace_context, "MOST_UNSEEN", 20_000)
    monkeypatch.setattr(trace_context, "_Unseen", type("Unseen", (), {"count": 0, "alive": None}))
    monkeypatch.setattr(gc, "collect", lambda: scans.append(len(kept)))
    for _ in range(4):
        with trace_context.without_gc():
            made = [[] for _ in range(30_000)]
        if stay:
            kept += made
    assert bool(scans) == stay
