"""Ranks that are killed, raise, leave, hang or are slow, by the errors of all others.

The cases run on processes of their own, several at a time: 25 s on two cores. All of the table:

    DEATHS=all python -m pytest tests/distributed/test_deaths.py
"""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("deaths")]
SCRIPT = Path(__file__).with_name("deaths.py")
HOST = socket.gethostname()
WITHIN = 10.0  # seconds from a death to the errors of all others


@dataclass(frozen=True)
class Case:
    """A case of deaths.py. first: a pattern of the first line of the error on the other ranks."""

    name: str
    ranks: int
    who: tuple[int, ...]
    first: str
    besides: str = ""  # a pattern in the rest of it

    @property
    def argument(self) -> str:
        return f"{self.name}:{self.ranks}:{','.join(map(str, self.who))}"


def died(rank: int, step: str) -> str:
    return rf"rank {rank} on host {re.escape(HOST)} has died in {step}"


def raised(rank: int, error: str, step: str) -> str:
    host = re.escape(HOST)
    return rf"rank {rank} on host {host} has raised {error} at .*deaths.py:\d+, in {step}"


CASES = [
    Case("all_reduce", 3, (1,), died(1, "step 3, forward")),
    Case("all_gather", 2, (1,), died(1, "step 3, forward")),
    Case("reduce_scatter", 2, (1,), died(1, "step 3, forward")),
    Case("plain_all_gather", 2, (1,), died(1, "step 3, forward")),
    Case("plain_reduce_scatter", 2, (1,), died(1, "step 3, backward")),
    Case("all_to_all", 3, (2,), died(2, "step 3, forward")),
    Case("permute", 3, (1,), died(1, "step 3, forward")),
    Case("pipeline", 3, (1,), died(1, "step 3, forward")),
    Case("after_forward", 2, (1,), died(1, "step 3, forward")),
    Case("backward", 3, (1,), died(1, "step 3, backward")),
    Case("optimizer", 3, (1,), died(1, "step 3, backward")),
    Case("optimizer_step", 2, (1,), died(1, "step 3, backward")),
    Case("before_step", 3, (2,), died(2, "step 2, backward")),
    Case("planning", 2, (1,), died(1, "step 0, planning")),
    Case("two", 4, (1, 2), f"{died(1, 'step 3')}.*; {died(2, 'step 3')}"),
    Case("rank_0", 3, (0,), died(0, "step 3, backward")),
    Case("computing", 2, (1,), died(1, "step 3, backward")),
    *(
        Case(name, 2, (1,), died(1, "step 2, backward"))
        for name in "full_tensor item softmax redistribute redistribute_async "
        "backward_of_dtensors setitem qr".split()
    ),
    Case("raised", 3, (1,), raised(1, "LookupError: no such batch", "step 2, backward")),
    Case("raised_in_child", 2, (1,), raised(1, "LookupError: no such batch", "step 2, backward")),
    Case("raised_in_call", 3, (1,), raised(1, "MemoryError: out of memory", "step 3, forward")),
    Case(
        "left",
        3,
        (1,),
        rf"rank 1 on host {re.escape(HOST)} has left: its program has ended after step 2",
    ),
    Case(
        "stuck",
        3,
        (1,),
        r"rank [02] has waited 3 s for rank 1$",
        rf"rank 1 on host {re.escape(HOST)} is in no collective, but at \S*deaths.py:\d+: "
        r"time.sleep\(60\) \(step 2, backward(.|\n)*in read_a_batch: time.sleep\(60\)",
    ),
    Case(
        "stopped",
        2,
        (1,),
        "rank 0 has waited 3 s for rank 1$",
        rf"rank 1 on host {re.escape(HOST)} does not answer: it was stopped.*\(step \d, ",
    ),
]
# One of each kind; all of the table if asked.
OFTEN = (
    "plain_all_gather plain_reduce_scatter pipeline backward optimizer_step planning two "
    "redistribute raised_in_call left stuck"
).split()
ALL = os.environ.get("DEATHS") == "all"
if not ALL:
    CASES = [case for case in CASES if case.name in OFTEN]
SLOW = Case("slow", 3, (1,), "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of what each rank wrote in each case."""
    path = tmp_path_factory.mktemp("deaths")
    arguments = [case.argument for case in [SLOW, *reversed(CASES)]]
    subprocess.run(
        [sys.executable, str(SCRIPT), str(path), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHGSPMD_CACHE": ""},
        check=True,
        timeout=600,
    )
    return path


def rows(folder: Path, case: Case, rank: int) -> list[dict]:
    lines = (folder / f"{case.name}.{rank}.out").open()  # gloo of torch 2.9 prints here, too
    return [json.loads(line) for line in lines if line.startswith("{")]


def survivors(case: Case) -> list[int]:
    return [rank for rank in range(case.ranks) if rank not in case.who]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_others_name_it(folder, case):
    deaths = [row for rank in case.who for row in rows(folder, case, rank)]
    texts = []
    for rank in survivors(case):
        said = (folder / f"{case.name}.{rank}.err").read_text()[-2000:]
        (row,) = rows(folder, case, rank) or pytest.fail(f"rank {rank} has not ended\n{said}")
        assert row.get("error") == "RankError", row
        assert re.match(case.first, row["text"].partition("\n")[0]), row["text"]
        late = row["time"] - deaths[-1]["time"] if deaths else row["seconds"] - 3.0
        assert late < WITHIN, (rank, late)
        texts.append(row["text"])
    assert any(re.search(case.besides, text) for text in texts), texts


# Collectives of CPU processes, as they are lowered: small ones become exchanges.
PLACES = {
    **dict.fromkeys(
        ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"], "all_to_all_single"
    ),
    "plain_all_gather": "all_gather_into_tensor",
    "plain_reduce_scatter": "reduce_scatter_tensor",
    "pipeline": "batch_isend_irecv",
    "backward": "all_reduce_",
}


@pytest.mark.parametrize("case", [c for c in CASES if c.name in PLACES], ids=lambda c: c.name)
def test_a_death_is_inside_of_a_collective(folder, case):
    assert rows(folder, case, case.who[0])[-1]["dies"] == PLACES[case.name]


def test_a_slow_rank_is_told_and_no_error(folder):
    assert all(rows(folder, SLOW, rank)[-1].get("done") for rank in range(SLOW.ranks))
    said = "".join((folder / f"slow.{rank}.err").read_text() for rank in range(SLOW.ranks))
    told = re.findall(r"rank 0 has waited \d\.\d s for rank 1 \(straggler\)\n", said)
    assert len(told) == 1, said
    assert re.search(rf"rank 1 on host {re.escape(HOST)} is in .*time.sleep\(4.5\) \(step 2", said)
    assert re.search(r"straggler: rank 1 came after [4-9]\.\d s", said), said


def under_torchrun(argument: str) -> str:
    """Return what a case writes under torchrun, which ends the others by SIGTERM at once."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, str(SCRIPT), argument],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHGSPMD_CACHE": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode
    return done.stdout + done.stderr


if ALL:  # three processes that import torch

    @pytest.mark.parametrize("name", ("before_step", "backward", "raised"))
    def test_the_other_names_it_under_torchrun(name):
        (case,) = [case for case in CASES if case.name == name]
        said = under_torchrun(f"{name}:2:1")
        first = case.first.replace(f"rank {case.who[0]} ", "rank 1 ")
        assert re.search(rf'"error": "RankError", "text": "{first}', said), said
