"""Long runs: memory, descriptors, threads, groups and objects level off. SOAK=180: seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "long_runs.py"
SECONDS = os.environ.get("SOAK", "6")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHGSPMD_CHECK": "0"}
LEVEL = {"descriptors": 0, "threads": 0, "groups": 0}  # growth from the second round to the last
MIB, OBJECTS = 24, 2000  # growth in caches that are not full yet; a leak grows with each call


def run(arguments: list[str], **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
        **options,
    )


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_a_long_run_levels_off():
    done = run([str(BENCHMARK), "--seconds", SECONDS])
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    for kind in ("steps", "shapes", "models"):
        _, second, _, last = [(count, found) for each, count, found in rows if each == kind]
        grown = {name: last[1][name] - second[1][name] for name in last[1]}
        assert {name: grown[name] for name in LEVEL} == LEVEL, (kind, rows)
        assert grown["MiB"] < MIB and grown["objects"] < OBJECTS + 100 * last[0], (kind, rows)
        if kind != "shapes":
            assert grown["objects"] < OBJECTS, (kind, rows)


ENDS = {
    "no destroy_process_group": """
        import torch, torch.distributed as dist, torchgspmd as gspmd
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = gspmd.parallelize(torch.nn.Linear(4, 4), gspmd.Mesh(data=1), check={"audit": 1})
        model(torch.ones(2, 4)).sum().backward()
        print("done")
    """,
    "imported in a thread": """
        import threading
        found = []
        def work():
            import torch, torchgspmd as gspmd
            plan = gspmd.plan(torch.sin, torch.ones(4), mesh=gspmd.Mesh(data=2), in_specs="data")
            found.append(plan.simulate(torch.ones(4)))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        import torchgspmd
        assert len(found) == 1
        print("done")
    """,
    "spawned": """
        import multiprocessing, torch
        import torchgspmd as gspmd
        if __name__ == "__main__":
            mesh = gspmd.Mesh(data=2)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.apply(repr, (mesh,)) == repr(mesh)
            with multiprocessing.get_context("fork").Pool(1) as pool:
                assert pool.apply(repr, (mesh,)) == repr(mesh)
            print("done")
    """,
}


@pytest.mark.parametrize("name", ENDS)
def test_a_process_ends_by_itself(name, tmp_path):
    lines = ENDS[name].strip("\n").splitlines()
    script = tmp_path / "script.py"
    script.write_text("\n".join(line[8:] for line in lines))
    done = run([str(script)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done
