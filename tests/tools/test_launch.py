"""launch runs functions on local processes. The script runs apart: pytest's process has threads."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import os, time, torch, torch.distributed as dist, torchgspmd as gspmd
def attempt(fn, *args, **options):
    try:
        print(gspmd.launch(fn, 2, *args, **options))
    except gspmd.ShardingError as error:
        print(type(error).__name__, error)
"""


def run(script: str) -> str:
    """Return what a script prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_output_and_failures():
    text = run(
        """
def step(scale):
    model = torch.nn.Linear(4, 4, bias=False)
    module = gspmd.parallelize(model, gspmd.Mesh(data=2), in_specs="data _")
    module(torch.ones(4, 4)).sum().backward()
    print(f"rank {dist.get_rank()} of {os.environ['WORLD_SIZE']}")
    return module.weight.grad.full_tensor()[0, 0].item() * scale
def fails():
    if dist.get_rank() == 1:
        raise ValueError("of rank 1")
    dist.barrier()
def dies():
    if dist.get_rank() == 0:
        os._exit(3)
    time.sleep(100)
def without_group():
    return dist.is_initialized()
attempt(step, 10)
attempt(lambda: None)
attempt(fails)
attempt(dies)
attempt(without_group, backend=None)
print(gspmd.launch(lambda: torch.get_num_threads(), 1, threads=2))
"""
    )
    assert "[40.0, 40.0]" in text
    assert "[0] rank 0 of 2" in text and "[1] rank 1 of 2" in text
    assert "[None, None]" in text and "[False, False]" in text and "[2]" in text
    assert "RankError rank 1 of 2 failed" in text and "ValueError: of rank 1" in text
    assert "RankError rank 0 of 2 failed" in text and "exit code 3" in text


def test_a_backward_after_a_plan():
    """A CUDA build of torch without a GPU gives fake tensors one that does nothing."""
    text = run(
        """
def step():
    x = torch.ones(4, requires_grad=True)
    x.sum().backward()
    return x.grad.sum().item()
plan = gspmd.plan(torch.nn.Linear(4, 4), torch.ones(4, 4), mesh=gspmd.Mesh(m=2), grad=True)
attempt(step)
"""
    )
    assert "[4.0, 4.0]" in text


def test_a_group_that_is_there_is_an_error():
    text = run(
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "attempt(lambda: None)\n"
    )
    assert "part of a process group" in text


def test_ctrl_c_ends_all():
    script = HEAD + "print('go', flush=True)\ngspmd.launch(lambda: time.sleep(100), 2)\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGINT)
        start = time.monotonic()
        _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - start < 10 and b"KeyboardInterrupt" in stderr
    assert process.returncode != 0 and stderr.count(b"Traceback") == 1, stderr.decode()
