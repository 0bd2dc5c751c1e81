"""The path of a newcomer: train on 4 processes, kill them, go on on 2, evaluate, export, load."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from ranks import load

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "huggingface" / "train.py"
STEPS, EVERY = 12, 3


def start(mesh: str, count: int, folder: Path) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    options = ["--mesh", mesh, "--folder", str(folder), "--steps", str(STEPS)]
    return subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), *options, "--save-every", str(EVERY)],
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("w"),
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def numbers(lines: list[str]) -> dict[int, float]:
    found = [re.match(r"step (\d+) loss ([\d.]+)", line) for line in lines]
    return {int(each[1]): float(each[2]) for each in found if each}


def test_train_kill_resume_evaluate_export(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    script = load(str(SCRIPT), "newcomer")
    model = script.make_model()
    optimizer = script.make_optimizer(model)
    want = {step + 1: script.train_step(model, *optimizer, step) for step in range(STEPS)}
    first, lines = start("data=2,model=2", 4, tmp_path), []
    for line in first.stdout:
        lines.append(line)
        if line.startswith(f"step {EVERY + 1} "):  # behind a checkpoint, between two
            tree = psutil.Process(first.pid)
            for process in [tree, *tree.children(recursive=True)]:
                process.kill()
            break
    first.wait()
    first.stdout.close()
    found = numbers(lines)
    assert len(found) == EVERY + 1, (tmp_path / "stderr").read_text()[-3000:]
    second = start("model=2", 2, tmp_path)
    lines, _ = second.communicate(timeout=400)
    assert second.returncode == 0, (tmp_path / "stderr").read_text()[-3000:]
    resumed = numbers(lines.splitlines())
    assert min(resumed) in (EVERY + 1, 2 * EVERY + 1) and max(resumed) == STEPS
    assert {**found, **resumed} == pytest.approx(want, rel=1e-4)
    exported = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "export")
    evaluated = float(re.search(r"^evaluation (\S+)", lines, re.M)[1])
    assert evaluated == pytest.approx(script.evaluate(model), rel=1e-4)
    assert evaluated == pytest.approx(script.evaluate(exported), rel=1e-5)
