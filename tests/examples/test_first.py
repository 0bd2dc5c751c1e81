"""examples/first/train.py, which docs/train.md shows, goes on on another mesh as on one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "first" / "train.py"
# The ranks are forks of a process that has imported torch: launch does it.
RUN = """
import sys, torchgspmd as gspmd
sys.path.insert(0, {folder!r})
import train
def run(mesh, *options):
    sys.argv = ["train.py", "--mesh", mesh, "--batch", "8", *options]
    gspmd.launch(train.main, gspmd.Mesh.parse(mesh).size, backend=None)
run("data=2,model=2", "--steps", "4", "--save-every", "2", "--folder", {run!r})
print("again")
run("data=1,model=2", "--steps", "6", "--folder", {run!r})
print("alone")
run("data=1", "--steps", "4", "--folder", {alone!r})
run("data=1", "--steps", "6", "--folder", {alone!r})
"""


def test_a_run_goes_on_on_another_mesh(tmp_path):
    text = RUN.format(
        folder=str(SCRIPT.parent), run=str(tmp_path / "run"), alone=str(tmp_path / "alone")
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"step [46]/[46]  loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[:2] == losses[2:], done.stdout
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-4", "step-6"]


def test_the_page_shows_the_script():
    page = (ROOT / "docs" / "train.md").read_text()
    assert f"```python\n{SCRIPT.read_text()}```" in page
