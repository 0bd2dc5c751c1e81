"""backend="cudagraphs" on a card: numbers, memory, host time. tests/runtime has the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from card_steps import DP, MESH, TP, Dropped, gpt, losses, tokens, wrapped
from torch import nn

import torchgspmd as gspmd
from torchgspmd.runtime.step_graphs import WARM_UPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a card")
BACKENDS = ("cudagraphs", "inductor+cudagraphs")
SAME = {"cudagraphs": "torch", "inductor+cudagraphs": "inductor"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", ("always", "never"))
@pytest.mark.parametrize("layout", (DP, TP), ids=("dp", "tp"))
def test_losses(
    layout: Any, check: str, backend: Any, one_process: str, device: torch.device
) -> None:
    batch = tokens(device)
    got = losses(wrapped(device, layout, backend=backend, check=check), batch, 6)
    assert got == pytest.approx(losses(gpt(device), batch, 6), abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fused", (True, False))
def test_train_step(fused: bool, backend: Any, one_process: str, device: torch.device) -> None:
    batch, found = tokens(device), []
    for chosen in (SAME[backend], backend):
        model = gpt(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        step = gspmd.train_step(model, optimizer)
        step = gspmd.parallelize(step, MESH, in_specs=("data _", "data _"), backend=chosen)
        found.append([])
        for i in range(3 * WARM_UPS):
            found[-1].append(float(step(*batch)))
            if i >= WARM_UPS:  # the rate becomes an argument
                optimizer.param_groups[0]["lr"] *= 0.9
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_draws_the_same_numbers(
    backend: Any, one_process: str, device: torch.device
) -> None:
    found = []
    for chosen in (SAME[backend], backend):
        torch.manual_seed(0)
        model = gspmd.parallelize(Dropped().to(device), MESH, in_specs="data _", backend=chosen)
        x = torch.ones(8, 32, device=device)
        outs = [model(x) for _ in range(3)]  # each waits for its backward
        sum(out.sum() for out in outs).backward()
        found.append([*outs, *(p.grad.to_local() for p in model.parameters())])
        assert not torch.equal(outs[1], outs[2])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_launches_few_kernels_from_the_host(
    backend: Any, one_process: str, device: torch.device
) -> None:
    """Two graphs, and copies of arguments, results and gradients."""
    model, batch = wrapped(device, backend=backend, check="never"), tokens(device)
    losses(model, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(*batch).backward()
    names = [event.name for event in profile.events()]
    assert names.count("aten::mm") + names.count("aten::addmm") == 0, names


def test_memory_of_the_backward_is_what_the_forward_leaves(
    one_process: str, device: torch.device
) -> None:
    """The graphs' pool is no larger than a step's peak without graphs, by more than a half."""
    peaks = []
    for backend in ("torch", "cudagraphs"):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(16)]
        model = nn.Sequential(*layers).to(device)
        model = gspmd.parallelize(model, MESH, in_specs="data _", backend=backend)
        x = torch.randn(8192, 512, device=device)
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        peaks.append(torch.cuda.max_memory_reserved())
        del model
    assert peaks[1] < 1.5 * peaks[0], peaks
