"""README's snippets run as pasted, on 2 and 4 processes that torchrun's variables describe.

Those of docs/train.md are in test_first.py, those of docs/from_other_libraries.md in
test_migration.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)
MESHES = {1: "data=1, model=1", 2: "data=1, model=2", 4: "data=2, model=2"}
BEFORE = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens, targets):
        logits = self.head(self.blocks(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


words = torch.arange(16 * 9).remainder(13).view(16, 9)
loader = DataLoader(TensorDataset(words[:, :-1], words[:, 1:]), 8, shuffle=True)
"""
RUN = """
import runpy, sys
import torchgspmd as gspmd


def run(file):
    return runpy.run_path(file)["found"]


if __name__ == "__main__":
    for processes in sys.argv[1:]:
        print(gspmd.launch(run, int(processes), f"train{processes}.py", backend=None))
"""


def losses(scripts, folder):
    """Return the losses that each process finds in each script; parallelize starts the group.

    scripts: by the number of processes, which one that has imported torch forks.
    """
    for processes, script in scripts.items():
        if not torch.cuda.is_available():
            script = script.replace(".cuda()", "")
        script = script.replace("data=2, model=4", MESHES[processes])
        (folder / f"train{processes}.py").write_text(script)
    (folder / "run.py").write_text(RUN)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "run.py", *map(str, scripts)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    return [torch.tensor(eval(line)) for line in lines]


@pytest.mark.parametrize("processes", (2, 4))
def test_the_change_to_a_script(processes, tmp_path):
    diff = next(text for kind, text in BLOCKS if kind == "diff")
    scripts = {}
    for sign, count in (("+", processes), ("-", 1)):
        script = "".join(line[1:] for line in diff.splitlines(True) if line[0] in f"{sign} ")
        if sign == "-":
            script = "torch.manual_seed(0)\n" + script
        scripts[count] = f"{BEFORE}\nfound = []\n{script}    found.append(loss.item())\n"
    found = losses(scripts, tmp_path)
    # Sums of 64 float32 terms in another order, two steps of AdamW.
    torch.testing.assert_close(*[each.expand(processes, -1) for each in found])


@pytest.mark.parametrize("processes", (2, 4))
def test_the_example(processes, tmp_path):
    blocks = [text for kind, text in BLOCKS if kind == "python"]
    wrapped = re.findall(r"^    (model = gspmd\.parallelize.*\n)    (optimizer.*\n)", README, re.M)
    assert len(wrapped) == 1
    script = "\n".join(blocks) + "".join(wrapped[0])
    script += "x = torch.ones(8, 64)\nfound = [model(x).sum().item()]\n"
    (found,) = losses({processes: script}, tmp_path)
    assert found.isfinite().all() and (found == found[0]).all()
