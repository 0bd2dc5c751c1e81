"""Ranks that wait say for whom, before the time limit and in the error after it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed]
SCRIPT = Path(__file__).with_name("waiting.py")
CASES = (
    "first_call third_step backward whole_tensor redistributed gathered_operand "
    "whole_tensor_and_step ended"
).split()


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what each rank printed in each case, on stdout and stderr."""
    folder = str(tmp_path_factory.mktemp("stores"))
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), folder, *CASES],
            env=os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=120) for process in processes]
    return [
        [dict(re.findall(r"=== (\w+)\n(.*?)(?==== |\Z)", stream, re.S)) for stream in streams]
        for streams in texts
    ]


def line(code: str) -> str:
    """Return the file and line of a statement of waiting.py."""
    rows = SCRIPT.read_text().splitlines()
    return f"waiting.py:{next(i for i, row in enumerate(rows, 1) if code in row)}"


SLEEPS, STEP, MODEL = "time.sleep(0.1)", "model(x).backward()", "return self.down"


@pytest.mark.parametrize(
    "case, rank_0, rank_1",
    [
        ("first_call", ("the comparison of the ranks", "lambda: model(x)", "step 0"), "step 0"),
        (
            "third_step",
            ("the comparison of the ranks", STEP, "step 3, forward"),
            "step 2, backward",
        ),
        ("backward", ("", MODEL, "step 1, backward"), "step 1, forward"),
        ("whole_tensor", ("the comparison of the ranks", "full_tensor())", "step 1"), "step 1"),
        ("redistributed", ("the comparison of the ranks", "redistribute(", "step 1"), "step 1"),
        ("gathered_operand", ("the comparison of the ranks", "softmax(0)", "step 1"), "step 1"),
    ],
)
def test_a_rank_that_sleeps(said, case, rank_0, rank_1):
    (errors, notices), _ = said
    collective, code, step = rank_0
    assert errors[case].startswith("rank 0 has waited 2 s for rank 1\n")
    (why,) = (row for row in errors[case].splitlines() if row.startswith("  why"))
    own, other = why.split("; rank 1 ")
    assert f"rank 0 is in {collective}" in own and line(code) in own and f"({step}" in own, own
    assert line(SLEEPS) in other and f"({rank_1}" in other, other
    if case != "first_call":
        assert re.search(rf"its last collective \w+ at \S*{line(MODEL)}", other), other
    assert re.search(r"torchgspmd: rank 0 has waited \d", notices[case]), notices[case]
    assert line(SLEEPS) in notices[case]
    assert "the wait ends after 2 s" in notices[case]


def test_ranks_that_do_different_things_do_not_wait(said):
    for rank in range(2):
        text = said[rank][0]["whole_tensor_and_step"]
        assert text.startswith("rank 1 has not come to the read of a DTensor (full_tensor), where")
        assert "rank 0 is in the read of a DTensor" in text and "rank 1 is in a call of" in text


def test_a_rank_that_has_ended(said):
    text = said[0][0]["ended"]
    assert re.match(r"rank 1 on host \S+ has left: its program has ended after step 1", text), text
