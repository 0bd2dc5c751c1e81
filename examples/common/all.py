"""Runs all examples that train, some steps on one process and in several layouts on four, and
compares their losses.

python all.py                                       float32, 20 steps
python all.py --only bert --dtype float64 --steps 4 --tolerance 1e-8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

EXAMPLES = Path(__file__).resolve().parent.parent


class Example(NamedTuple):
    """options: for a small model. runs: a layout and a mesh of four processes each, and options
    that the run on one process has too.

    more: of which only the bytes are counted, by benchmarks/counted_bytes.py.
    """

    options: str
    runs: tuple[str, ...]
    more: tuple[str, ...] = ()


ALL = {
    "gpt": Example(
        "--text pydoc --layers 2 --width 32 --context 32 --batch 12 --sample 0",
        ("tp data=2,model=2", "fsdp data=4", "cp seq=4"),
        ("dp data=4", "tp model=4", "sp data=2,model=2", "cp data=2,seq=2", "fsdp data=2,model=2")
        + ("2d data=2,model=2", "pp stage=4", "pp_tp stage=2,model=2 --schedule circular")
        + ("tp data=2,model=2 --stack",),
    ),
    "moe": Example(
        "--text pydoc --layers 2 --width 32 --context 32 --batch 12",
        ("ep expert=4", "dp_ep data=2,expert=2", "ep_tp expert=2,model=2")
        + ("ep_tp expert=2,model=2 --router dropless",),
        ("ep expert=4 --router dropless", "dp_ep data=2,expert=2 --router dropless"),
    ),
    "vit": Example(
        "--data digits --layers 2 --width 32 --patch 2 --batch 30",
        ("dp data=4", "dp_tp data=2,model=2", "spatial data=2,model=2"),
        ("tp model=4", "spatial model=4"),
    ),
    "unet3d": Example(
        "--volume synthetic --mm 13 --width 4 --levels 2 --batch 2",
        ("spatial data=2,space=2", "spatial2d space=2,rows=2", "spatial space=4"),
        ("dp data=4", "dp data=2,space=2"),
    ),
    "bert": Example(
        "--text pydoc --vocabulary 199 --layers 2 --width 32 --context 24 --batch 12 --blanks 0",
        ("dp data=4", "tp data=2,model=2", "zero data=2,model=2", "dp_zero data=4"),
    ),
    "conformer": Example(
        "--speech tones --layers 1 --width 24 --window 6 --batch 6",
        ("dp data=4", "tp data=2,model=2", "time time=4", "time_tp time=2,model=2"),
    ),
    "weather": Example(
        "--data waves --width 8 --batch 4",
        ("dp data=4", "rows rows=4", "grid rows=2,columns=2", "rows data=2,rows=2"),
    ),
    "multimodal": Example(
        "--data digits --channels 4 --layers 1 --width 16 --batch 12",
        ("dp data=4", "tp data=2,model=2", "space model=4", "space_tp data=2,model=2"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="*", choices=list(ALL), default=list(ALL))
    add("--steps", type=int, default=20)
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--tolerance", type=float, default=1e-4, help="largest relative difference of a loss")
    add("--score-tolerance", type=float, default=1e-2, help="and of what is evaluated at the end")
    args = parser.parse_args()
    console, failed = Console(highlight=False), False
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            alone: dict[str, tuple] = {}  # losses and scores, by the options of the run
            for run in ALL[name].runs:
                layout, mesh, *options = run.split()
                if (key := " ".join((name, *options))) not in alone:
                    alone[key] = results(name, Path(folder), args, options)
                    first, *_, last = alone[key][0]
                    text = "".join(f", {metric} {s:.4f}" for metric, s in alone[key][1].items())
                    console.print(f"{key}: one process, loss {first:.4f} to {last:.4f}{text}")
                one, scores = alone[key]
                four, found = results(name, Path(folder), args, options, layout, mesh)
                worst = max(abs(b - a) / abs(a) for a, b in zip(one, four, strict=True))
                equal = worst <= args.tolerance  # NaN is not
                equal &= all(
                    abs(found[metric] - score) <= args.score_tolerance * abs(score)
                    for metric, score in scores.items()
                )
                failed |= not equal
                text = "".join(f" {score:.4f}" for score in found.values())
                console.print(f"    {run:40} {worst:.1e}{text} {'equal' if equal else 'DIFFERENT'}")
    raise SystemExit(failed)


def results(
    name: str,
    folder: Path,
    args: argparse.Namespace,
    options: list[str],
    layout: str = "",
    mesh: str = "",
) -> tuple[list[float], dict[str, float]]:
    """The losses of a run, and its scores: on one process, or on as many as the mesh has."""
    count = 1
    for axis in mesh.split(",") if mesh else ():
        count *= int(axis.split("=")[1])
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {count}".split()
    script, path = EXAMPLES / name / "train.py", folder / "losses.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, *(launcher if mesh else ()), str(script)]
    command += [
        *ALL[name].options.split(),
        *options,
        "--steps",
        str(args.steps),
        "--dtype",
        args.dtype,
    ]
    command += ["--warmup", "1", "--losses", str(path), "--plot", str(folder / "loss.png")]
    command += ["--layout", layout, "--mesh", mesh] if mesh else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if not path.exists():
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    found = json.loads(path.read_text())
    return found["losses"], found["scores"]


if __name__ == "__main__":
    main()
