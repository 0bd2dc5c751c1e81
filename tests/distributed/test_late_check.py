"""Ranks on GPUs compare calls by a message that nobody waits for (runtime/call_comparison.py).

Programs are those for CUDA while values are on the CPU (TORCHGSPMD_ASSUME_CUDA=1). In late groups a
result that is read too early is poison.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import distributed
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.comm.rank_check import RankCheck
from torchgspmd.runtime import call_comparison

EVERY = call_comparison.EVERY
for_cuda = patch.dict(os.environ, TORCHGSPMD_ASSUME_CUDA="1")
often = patch.object(call_comparison, "EVERY", 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        inner = nn.functional.dropout(self.inner(x), 0.5, self.training)
        return (inner * tokens[:, None]).square().mean()


def wrapped(mesh: gspmd.Mesh, **options: Any) -> nn.Module:
    axes = "+".join(mesh.names)
    return gspmd.parallelize(Model().eval(), mesh, in_specs=(f"{axes} _", axes), **options)


def batch(rows: int = 4, value: float = 1.0, token: int = 1) -> list[Tensor]:
    return [torch.full((rows, 3), value), torch.full((rows,), token)]


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """Note comparisons: those that are waited for, and the bytes of late ones."""
    noted, reduce, check_ranks = [], dist.all_reduce, RankCheck.check

    def noting(x: Tensor, *args: Any, **options: Any) -> Any:
        noted.append(f"{x.nbytes} bytes")
        return reduce(x, *args, **options)

    def waiting(check: RankCheck) -> None:
        if check.is_sent:
            noted.append("waits")
        check_ranks(check)

    with patch.object(dist, "all_reduce", noting), patch.object(RankCheck, "check", waiting):
        yield noted


@distributed("data=2", group="late")
@for_cuda
def test_each_eighth_call_sends_32_bytes(mesh):
    """The first call of a program is waited for; check="never" sends nothing later."""
    for check, late in (("always", 3), ("first", 3), ("never", 0)):
        model, x = wrapped(mesh, check=check), batch()
        with messages() as sent:
            model(*x)
        assert "waits" in sent, sent
        with messages() as sent:
            for step in range(2 * EVERY + 1):
                x[0].fill_(step)
                model(*x)
        assert sent == ["32 bytes"] * late, sent
        model._groups.late_checks = None


@distributed("data=2", group="late")
@for_cuda
def test_no_value_passes_through_the_host(mesh):
    """Between two answers: neither tolist nor item, of arguments or messages."""
    model, x = wrapped(mesh), batch()
    model(*x), model(*x)

    def refuse(tensor: Tensor) -> None:
        raise AssertionError("the host reads a value")

    with patch.object(Tensor, "tolist", refuse), patch.object(Tensor, "item", refuse):
        for _ in range(EVERY - 1):
            model(*x)
        call_comparison.late_checks(model._groups).sent = None  # whose answer the host would read
        model(*x)


@distributed("data=2", timeout=60)
@for_cuda
def test_a_capture_compares_nothing(mesh):
    model = wrapped(mesh)
    model(*batch())
    with patch.object(call_comparison, "_is_capturing", lambda: True), messages() as sent:
        for _ in range(2 * EVERY):
            model(*batch())
    assert not sent and not call_comparison.late_checks(model._groups).calls


def fails(run: Callable[[], object], text: str) -> None:
    """Expect a RankError within the calls of two messages, on every rank."""
    try:
        for _ in range(5):
            run()
    except gspmd.ShardingError as error:
        assert str(error).startswith(text), error
        assert "test_late_check.py" in str(error) and "calls later" in str(error), error
    else:
        raise AssertionError("no error")


@distributed("data=2", "data=2,model=2")
@for_cuda
@often
def test_what_differs_is_named(mesh):
    """Values, shapes, or the random state of the last rank; the call after the error runs."""
    last = dist.get_rank() == mesh.size - 1
    model = wrapped(mesh)
    for rows in (4, 8):
        model(*batch(rows)), model(*batch(rows))
    other = f"has other values on rank {mesh.size - 1} than on rank 0"
    fails(lambda: model(*batch(value=1.0 + last)), f"argument 'x' {other}")
    fails(lambda: model(*batch(token=1 + last)), f"argument 'tokens' {other}")
    for _ in range(5):
        model(*batch(value=1 + 1e-6 * last))  # rounding is no difference
    fails(lambda: model(*batch(8 if last else 4)), "the arguments differ between ranks")
    drawing = wrapped(mesh).train()
    drawing(*batch())
    torch.manual_seed(int(last))
    fails(lambda: drawing(*batch()), "the ranks would draw different random numbers")
    torch.manual_seed(0)
    torch.testing.assert_close(model(*batch()), model._model(*batch()))


@distributed("data=2", alone=True)
@for_cuda
def test_a_new_program_of_one_rank_ends(mesh):
    """Rank 1 compares it while rank 0 runs another: both raise soon, not at the time limit."""
    model = wrapped(mesh, timeout=60)
    model(*batch()), model(*batch())
    try:
        for _ in range(3):
            model(*batch(4 if dist.get_rank() == 0 else 6)).backward()
    except gspmd.ShardingError as error:
        first = str(error).partition("\n")[0]
        assert (
            first
            == "rank 0 has not come to the planning of a call of the module, where rank 1 waits"
        )
    else:
        raise AssertionError("no error")
