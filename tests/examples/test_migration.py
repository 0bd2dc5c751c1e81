"""The diffs of docs/from_other_libraries.md and nanogpt.md: few lines, and the numbers before."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("from_other_libraries", "nanogpt")]
DIFF = r"^<!-- test: (\w+) -->\n```diff\n(.*?)^```"
DIFFS = {name: diff for page in PAGES for name, diff in re.findall(DIFF, page, re.M | re.S)}
NANOGPT = (Path(__file__).parent / "nanogpt" / "model.py").read_text()
IMAGES = """
import torch
from torch import nn


def create_model(name, num_classes):
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, num_classes))


draw = torch.Generator().manual_seed(3)
images = torch.randn(32, 3, 8, 8, generator=draw)


def create_dataset(split):
    return [(image, i % 5) for i, image in enumerate(images)]
"""
WORDS = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

tokens = {split: torch.arange(400).mul(n).remainder(29) for split, n in (("train", 7), ("val", 5))}


@dataclass
class GPTConfig:
    block_size: int
    words: int = 29
    width: int = 16


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.places = nn.Embedding(config.block_size, config.width)
        self.mix = nn.Linear(config.width, 3 * config.width)
        self.head = nn.Linear(config.width, config.words)

    def forward(self, x, y):
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        q, k, v = self.mix(h).chunk(3, -1)
        logits = self.head(h + F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())
"""
# Words that it prints: for nanogpt 4 steps with 2 losses of validation, 2 steps after a resume.
MODELS = {
    "gpt": (WORDS, 2 * 5 + 8 * 4),
    "images": (IMAGES, 3 * 6),
    "nanogpt": (NANOGPT, 2 * 5 + 4 * 4 + 11 + 5 + 2 * 4 + 11),
}
RUN = """
import runpy, sys
import torchgspmd as gspmd


def run(file):
    runpy.run_path(file)


if __name__ == "__main__":
    gspmd.launch(run, int(sys.argv[2]), sys.argv[1], backend=None)
"""


def version(diff: str, sign: str) -> str:
    """Return the script before (-) or after (+) a diff."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(True) if line[0] in f"{sign} \n")


@pytest.mark.parametrize("processes", (2, 4))
@pytest.mark.parametrize("name", [*MODELS])
def test_the_loop_prints_the_same_on_processes(name, processes, tmp_path):
    diff, (model, count) = DIFFS[name], MODELS[name]
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 12
    (tmp_path / "model.py").write_text(model)
    (tmp_path / "run.py").write_text(RUN)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    found = []
    for sign, number in (("-", 1), ("+", processes)):
        (tmp_path / "train.py").write_text(version(diff, sign))
        command, lines = [sys.executable, "run.py", "train.py", str(number)], []
        for begin in ("scratch", "resume")[: 1 + (name == "nanogpt")]:
            done = subprocess.run(
                command,
                env={**env, "INIT_FROM": begin},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            lines += re.findall(r"^\[0\] ((?:step|iter|epoch|text) .*)", done.stdout, re.M)
        words = [word.strip(":,") for line in lines for word in line.split()]
        found.append([float(word) if "." in word else word for word in words])
    before, after = found
    assert len(before) == count
    for mine, theirs in zip(after, before, strict=True):
        assert mine == (pytest.approx(theirs, abs=3e-5) if isinstance(theirs, float) else theirs)
