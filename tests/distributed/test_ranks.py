"""The harness itself: what a check on processes shows when it fails, and that the next one runs."""

import re

import failing
import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import distributed

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def failure(check) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        check("data=2")
    return re.sub(r'File "\S*/(\w+\.py)", line \d+', r'File "\1", line N', caught.value.msg)


def test_a_failure_shows_the_traceback_of_its_rank_and_where_the_others_wait(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 1.0)
    text, _, logs = failure(failing.fails_on_rank_1).partition("--- rank 0 wrote\n")
    assert text.splitlines() == [
        "fails_on_rank_1: ranks 0, 1 of 2 failed",
        "--- rank 1",
        "Traceback (most recent call last):",
        '  File "failing.py", line N, in fails_on_rank_1',
        '    raise ValueError("only here")',
        "ValueError: only here",
        "--- rank 0",
        "did not answer within 1 s of a failure",
    ]
    # The wrapper waits for all ranks before it, if a module was wrapped in this process before.
    assert re.search(r"in (barrier|with_meeting)\n.*in fails_on_rank_1", logs, re.S), logs


def test_a_rank_that_hangs_is_named_with_its_place():
    text = failure(failing.hangs_on_rank_1)
    assert text.startswith("hangs_on_rank_1: rank 1 of 2 failed\n--- rank 1\ndid not answer")
    assert re.search(r"within 5 s\n--- rank 1 wrote\n.*in hangs_on_rank_1", text, re.S), text


def test_after_a_rank_that_ends_the_processes_are_new():
    before = ranks.ranks_of(2)
    text = failure(failing.ends_on_rank_1)
    assert "--- rank 1\nended with exit code 3" in text and "wrote\na last word" in text
    for number in (1, 2):
        test_what_a_check_begins_with("data=2", number=number)
        assert ranks.ranks_of(2) is not before
        before = ranks.ranks_of(2) if number == 2 else before


@distributed("data=2")
@pytest.mark.parametrize("number", [1, 2])
def test_what_a_check_begins_with(mesh, number):
    assert dist.get_world_size() == mesh.size == 2 and number in (1, 2)
    assert torch.get_default_dtype() == torch.float32 and torch.initial_seed() == 0
    torch.set_default_dtype(torch.float64)


def test_tracebacks_that_are_alike_are_shown_once():
    assert ranks.alike({2: "a", 1: "b", 0: "a"}) == [("a", [2, 0]), ("b", [1])]
    assert ranks.numbered([2, 0]) == "ranks 0, 2" and ranks.numbered([1]) == "rank 1"
