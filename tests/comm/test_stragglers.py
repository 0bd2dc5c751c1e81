"""Stragglers: which ranks are named, by the looks at one rank and the answers of the others."""

import pytest

from torchgspmd.comm import rank_failure
from torchgspmd.comm.rank_failure import Answer, Status, Stragglers
from torchgspmd.comm.watcher import Watcher

WAITS = Status(step=3, phase="forward", waits_in="all_reduce", at="model.py:1")


class Clock:
    """A clock that moves by a look."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rank_failure, "time", clock)
    return clock


def lines(clock, rank, own, other, share=0.0, seconds=200.0):
    """Return what a rank of two writes, that is in one status, while the other is in another."""
    looks, told = Stragglers(rank, [0, 1]), []
    for _ in range(int(seconds / rank_failure.TICK)):
        clock.now += rank_failure.TICK
        if looks.has_to_ask(own, own.place(), 1800.0):
            looks.take(Answer(1 - rank, "host", other, share))
        if text := looks.report(own, 1800.0):
            told.append(text)
    return told


def test_a_rank_that_plans_is_no_straggler(clock):
    plans = Status(step=3, phase="planning", at="train.py:1")
    for own in (WAITS, Status(3, "planning", "the plan of rank 0", "train.py:1")):
        assert lines(clock, 1, own, plans) == []


def test_the_first_rank_says_once_that_it_plans(clock):
    plans = Status(step=0, phase="planning", at="train.py:1")
    waits = Status(0, "planning", "the plan of rank 0", "train.py:1")
    assert lines(clock, 0, plans, waits) == ["torchgspmd: rank 0 plans (10 s so far)"]
    assert lines(clock, 1, plans, waits) == []  # not the other ranks, which plan too
    assert lines(clock, 0, plans, waits, seconds=rank_failure.LONG_PLAN - 1) == []


def test_other_ranks_are_named(clock):
    """Also a rank that is late for the first step, once the wait itself is long."""
    for late in (Status(3, "forward ended", at="train.py:1"), Status(0, "", at="train.py:1")):
        told = lines(clock, 0, WAITS, late)
        assert told and "for rank 1 (straggler)" in told[0]


def slow(clock, step, phase):
    """Return the lines of a rank that waits by turns, for a rank that never does."""
    looks, told = Stragglers(0, [0, 1]), []
    late = Status(step, phase, at="train.py:1")
    for look in range(80):
        clock.now += rank_failure.TICK
        own = WAITS if look % 4 else Status(3, "forward", at="model.py:1")
        if looks.has_to_ask(own, (own.place(), look), 1800.0):
            looks.take(Answer(1, "host", late, 0.0))
        told += [text] if (text := looks.report(own, 1800.0)) else []
    return told


@pytest.mark.parametrize("step, phase, named", [(3, "", 1), (0, "", 0), (3, "planning", 0)])
def test_a_rank_that_is_late_again_and_again(clock, step, phase, named):
    told = slow(clock, step, phase)
    assert bool(told) == bool(named), told
    assert all("straggler: rank 1" in text and f"(step {step})" in text for text in told)


@pytest.mark.parametrize("own_call_raised, told", [(False, ["raised"]), (True, [])])
def test_a_caught_exception_of_all_ranks_is_no_end(clock, own_call_raised, told):
    """Rank 0 raised in step 3 and does not come: it has ended, unless this rank raised, too."""
    watcher = Watcher.__new__(Watcher)
    watcher.step, watcher._raised_in = 3, 3 if own_call_raised else -1
    watcher._stragglers, fates = Stragglers(1, [0, 1]), []
    watcher._tell = fates.append
    raised = Status(3, "forward", raised="ValueError: no rows")
    watcher._stragglers.take(Answer(0, "a", raised))
    watcher._judge_raised(Status(3, "planning", waits_in="broadcast"))
    assert [fate.kind for fate in fates] == told
