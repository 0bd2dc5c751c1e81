"""Training steps on one card: numbers, no waiting, CUDA graphs, Inductor, memory of the plan."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from card_steps import DP, MESH, TP, Dropped, gpt, losses, tokens, wrapped

import torchgspmd as gspmd
from torchgspmd.runtime.call_comparison import EVERY


@pytest.mark.parametrize("check", ("always", "first", "never"))
@pytest.mark.parametrize("layout", (DP, TP), ids=("dp", "tp"))
def test_losses(layout: Any, check: str, one_process: str, device: torch.device) -> None:
    batch = tokens(device)
    got = losses(wrapped(device, layout, check=check), batch)
    assert got == pytest.approx(losses(gpt(device), batch), abs=1e-5)


@pytest.mark.parametrize("fused", (True, False))
@pytest.mark.parametrize("optimizer", (torch.optim.Adam, torch.optim.AdamW))
def test_train_step(optimizer: Any, fused: bool, one_process: str, device: torch.device) -> None:
    batch = tokens(device)
    plain = gpt(device)
    reference = optimizer(plain.parameters(), lr=1e-2, fused=fused)
    want = []
    for _ in range(3):
        reference.zero_grad()
        loss = plain(*batch)
        loss.backward()
        reference.step()
        want.append(float(loss))
    model = wrapped(device)
    step = gspmd.train_step(model, optimizer(model.parameters(), lr=1e-2, fused=fused))
    assert [float(step(*batch)) for _ in range(3)] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(dtype: torch.dtype, one_process: str, device: torch.device) -> None:
    batch, results = tokens(device), []
    for model in (gpt(device), wrapped(device)):
        with torch.autocast(device.type, dtype):
            loss = model(*batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        results.append((float(loss), float(norm)))
    assert results[1] == pytest.approx(results[0], rel=3e-2)


def test_param_dtype(one_process: str, device: torch.device) -> None:
    batch = tokens(device)
    model = wrapped(device, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert losses(model, batch) == pytest.approx(losses(gpt(device), batch), abs=5e-2)


@pytest.mark.parametrize("check", ("always", "never"))
def test_a_step_waits_for_nothing(
    check: str, one_process: str, device: torch.device, no_syncs: AbstractContextManager
) -> None:
    batch = tokens(device)
    model = wrapped(device, check=check)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    for _ in range(3):
        step()
    with no_syncs:
        for _ in range(EVERY + 1):  # one of them sends a comparison, and one reads another
            step()


def test_deterministic_steps(
    one_process: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs call PyTorch's operations, which obey the switch: two runs have the same bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (losses(wrapped(device), tokens(device)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert first == again


def test_dropout_waits_for_nothing(
    one_process: str, device: torch.device, no_syncs: AbstractContextManager
) -> None:
    torch.manual_seed(0)
    model = gspmd.parallelize(Dropped().to(device), MESH, in_specs="data _")
    x = torch.randn(8, 32, device=device)
    for _ in range(3):
        model(x).sum().backward()
    with no_syncs:
        model(x).sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a card")
@pytest.mark.parametrize("check", ("always", "first", "never"))
@pytest.mark.parametrize("dropout", (False, True))
def test_graph_of_a_step(dropout: bool, check: str, one_process: str, device: torch.device) -> None:
    """A replay computes new numbers from new inputs, and draws anew where the program draws."""
    torch.manual_seed(0)
    plain = Dropped().to(device).train(dropout)
    model = gspmd.parallelize(copy.deepcopy(plain), MESH, in_specs="data _", check=check)
    x = torch.randn(8, 32, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        out = model(x)
        out.sum().backward()
    first = out.clone()
    graph.replay()
    again = out.clone()
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(again, out)
    if dropout:
        assert not torch.equal(first, again), "each replay has the same mask"
    else:
        torch.testing.assert_close(out, plain(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Inductor on the CPU is another test")
@pytest.mark.parametrize("layout", (DP, TP), ids=("dp", "tp"))
def test_inductor(layout: Any, one_process: str, device: torch.device) -> None:
    batch = tokens(device)
    got = losses(wrapped(device, layout, backend="inductor"), batch)
    assert got == pytest.approx(losses(gpt(device), batch), abs=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU has no count of its memory")
def test_memory_is_that_of_the_plan() -> None:
    """In a process of its own: what other tests leave on the card is not the plan's."""
    script = Path(__file__).with_name("peak_memory.py")
    # A check of every program holds what the backward would free.
    env = {**os.environ, "TORCHGSPMD_CHECK": "0"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
