"""gspmd.elastic: processes and hosts are killed, and the job goes on with the losses of one device.

ELASTIC=all also shrinks a job from 4 hosts to 3, lets it grow, and shrinks it again: 60 s.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from elastic_job import TOTAL, batch, net

import torchgspmd as gspmd
from torchgspmd.tools.elastic import Job

SCRIPT = Path(__file__).with_name("elastic_job.py")
WITHIN = 10.0  # seconds from a death to the next step, on two free cores
SLOWER = 4.0  # how much slower the machine of a test may be
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def losses_of_one_device(total: int) -> list[float]:
    model = net()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(total):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def rows_of(folder: Path) -> list[list]:
    log = folder / "log"
    return [*map(json.loads, log.read_text().splitlines())] if log.exists() else []


def steps_of(folder: Path) -> list[list]:
    return [row for row in rows_of(folder) if isinstance(row[1], int)]


def check_losses(steps: list[list], total: int = TOTAL) -> None:
    want = losses_of_one_device(total)
    assert {row[1] for row in steps} == {*range(total)}
    for _, step, loss, _ in steps:
        assert loss == pytest.approx(want[step], rel=1e-5), step


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_a_job_outlives_its_processes(tmp_path):
    environment = {**os.environ, **ENVIRONMENT, "TORCHGSPMD_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    check_losses(steps_of(tmp_path))
    rows = [row for row in rows_of(tmp_path) if row[1] != "planned"]
    deaths = [i for i, row in enumerate(rows) if row[1] == "killed"]
    assert [rows[i][2] for i in deaths] == ["in planning", "in a save", "in a step"]
    for i, first in zip(deaths, (0, 10, 15)):
        after = next(row for row in rows[i + 1 :] if row[1] != "killed" and row[1] <= first)
        assert after[1] == first, rows  # of the copy in memory: a checkpoint is of each 12th step
        assert after[0] - rows[i][0] < WITHIN * SLOWER, rows
    assert "goes on behind step 15, from copies in memory, on 4 processes" in run.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step-12", "step-24"}
    assert not [*Path("/dev/shm").glob(f"torchgspmd-*-{tmp_path.name}")]


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_ctrl_c_ends_all_processes(tmp_path):
    environment = {**os.environ, **ENVIRONMENT, "PAUSE": "5"}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    environment["TORCHGSPMD_CACHE"] = str(tmp_path / "cache")
    for where in ("in planning", "in a save", "in a step"):
        (tmp_path / f"killed {where}").touch()  # not in this test
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 100
    while not steps_of(tmp_path):
        assert time.monotonic() < until and run.poll() is None
        time.sleep(0.1)
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=60)
    assert time.monotonic() - start < 5 * SLOWER
    assert run.returncode == -signal.SIGINT and error.rstrip().endswith("KeyboardInterrupt"), error
    assert error.count("Traceback") == 1, error
    # One of torch's that is in C++ when Python ends aborts the process.
    assert (tmp_path / "threads").read_text() == "MainThread"


def test_mistakes():
    assert Job(0, 4, 0, Path("a"), 10, 1, 2).processes == 4
    with pytest.raises(gspmd.ShardingError, match="elastic gets 0 processes"):
        gspmd.elastic(print, 0, folder="a")
    with pytest.raises(gspmd.ShardingError, match="copies is 0"):
        gspmd.elastic(print, 1, folder="a", copies=0)


if os.environ.get("ELASTIC") == "all":

    @pytest.mark.distributed
    @pytest.mark.xdist_group("ranks")
    def test_a_job_shrinks_and_grows(tmp_path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            command = [sys.executable, str(SCRIPT), str(tmp_path), str(free.getsockname()[1])]
        environment = {**os.environ, **ENVIRONMENT, "PAUSE": "0.5", "TOTAL": "80"}
        environment["TORCHGSPMD_CACHE"] = str(tmp_path / "cache")

        def host() -> subprocess.Popen:
            return subprocess.Popen(command, env=environment)

        def reach(processes: int) -> None:
            until = time.monotonic() + 100
            while not (rows := steps_of(tmp_path)) or rows[-1][3] != processes:
                assert time.monotonic() < until, rows
                time.sleep(0.2)

        hosts = [host()]
        time.sleep(3)
        hosts += [host() for _ in range(3)]
        try:
            reach(4)
            time.sleep(2)
            hosts[2].kill()
            reach(3)
            hosts[2] = host()
            reach(4)
            hosts.pop().kill()
            reach(3)
            assert [each.wait(200) for each in hosts] == [0] * 3
        finally:
            for each in hosts:
                each.kill()
        rows = steps_of(tmp_path)
        check_losses(rows, 80)  # of the same batch, which neither 4 nor 3 divide
        changes = [(a, b) for a, b in zip(rows, rows[1:]) if a[3] != b[3]]
        assert [(a[3], b[3]) for a, b in changes] == [(4, 3), (3, 4), (4, 3)]
        assert all(b[1] > 0 for _, b in changes)  # there is no checkpoint yet: these are copies
        planned = [row[3] for row in rows_of(tmp_path) if row[1] == "planned"]
        assert planned == [4, 3]  # then both plans come from the cache
