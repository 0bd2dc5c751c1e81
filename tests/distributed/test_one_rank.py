"""A call on one rank alone: all ranks raise at once the error that names it; nothing aborts."""

import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from one_rank import ALL, CALLS

from torchgspmd.comm.rank_failure import listed

pytestmark = [pytest.mark.distributed]
SCRIPT = Path(__file__).with_name("one_rank.py")
WITHIN = 6.0  # Seconds: 3 where nothing else runs.
DRAWN = random.Random(os.environ.get("ONE_RANK_SEED", "0"))


def draw() -> list[str]:
    """Return cases: each call by one rank alone, or left out by one, on two or four ranks."""
    names = [name for name in CALLS if name not in ALL]
    if os.environ.get("ONE_RANK") != "all":
        names = ["backward", "save", *DRAWN.sample(sorted({*names} - {"backward", "save"}), 4)]
    cases = []
    for name in names:
        ranks = DRAWN.choice((2, 4))
        is_left = name != "backward" and DRAWN.random() < 0.5
        cases.append(f"{name}{'-left' * is_left}:{ranks}:{DRAWN.randrange(ranks)}")
    return cases


CASES = draw()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of what each rank wrote in each case."""
    path = tmp_path_factory.mktemp("one_rank")
    subprocess.run(
        [sys.executable, str(SCRIPT), str(path), *CASES, "killed:2:1", "async_save:2:0"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHGSPMD_CACHE": ""},
        check=True,
        timeout=600,
    )
    return path


def rows(folder: Path, case: str) -> dict[int, dict]:
    name, ranks, _ = case.split(":")
    texts = {r: (folder / f"{name}.{ranks}.{r}.out").read_text() for r in range(int(ranks))}
    return {rank: json.loads(text) for rank, text in texts.items() if text}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_name_the_call_and_who_has_not_made_it(folder, case):
    name, ranks, who = case.split(":")
    base, _, left = name.partition("-")
    without = [int(who)]  # the ranks that have not made the call
    if not left and base != "backward":
        without = [rank for rank in range(int(ranks)) if rank != int(who)]
    found = rows(folder, case)
    assert [*found] == [*range(int(ranks))], "a rank has ended without an error"
    for rank, row in found.items():
        assert row["error"] == "RankError", row
        assert row["late"] < WITHIN, (rank, row["late"])
        what, where, why, _ = row["text"].split("\n")
        assert re.search(r"one_rank\.py:\d+$", where), where
        if base != "forward":  # the other ranks' backward is as much a call that it has left out
            assert f"{listed(without)} ha" in what and CALLS[base][1] in what, what
        assert CALLS[base][1] in why and len(re.findall(r"\(step \d", why)) == 2, why
        assert len(re.findall(r"one_rank\.py:\d+", why)) >= 2, why


def test_an_error_is_printed_once(folder):
    name, ranks, _ = CASES[0].split(":")
    said = [(folder / f"{name}.{ranks}.{r}.err").read_text() for r in range(int(ranks))]
    assert sum("Traceback" in text for text in said) == 1, said
    lines = [row for text in said for row in text.splitlines() if "has raised the same" in row]
    assert len(lines) == int(ranks) - 1 and all("has not come to" in row for row in lines), said


def test_a_rank_that_is_killed_while_it_saves(folder):
    (row,) = rows(folder, "killed:2:1").values()
    first = row["text"].partition("\n")[0]
    assert row["error"] == "RankError", row
    assert first.startswith(f"rank 1 on host {socket.gethostname()} has died in step 3, forward")


def test_torchs_asynchronous_checkpoint_in_the_group_of_the_training(folder):
    for row in rows(folder, "async_save:2:0").values():
        assert row["error"] == "ShardingError", row
        assert "gspmd.save(folder, model, optimizer, asynchronous=True)" in row["text"]
