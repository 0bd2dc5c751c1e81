"""Two processes on one card, by gloo: NCCL refuses that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tests/distributed runs these on the CPU")
def test_two_processes_train_as_one() -> None:
    script = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run([*command, "2", str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """All branches of benchmarks/gpu.py in tiny sizes; no variant of ours fails."""
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
    options = ["--tiny", "--rounds", "1", "--backends", "torch", "--json", str(tmp_path / "rows")]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if "torchgspmd" in line]
    assert len(lines) >= 4 and not any("Error" in line for line in lines), done.stdout
