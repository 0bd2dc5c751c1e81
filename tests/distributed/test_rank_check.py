"""On CPUs ranks compare what they are called with before they communicate.

GPUs do so in first calls alone: test_late_check.py.
"""

import copy
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import distributed, on_cpu
from tied_model import Model, batch, close, pair
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm import rank_check
from torchgspmd.comm.rank_check import RankCheck
from torchgspmd.comm.rank_failure import SOON
from torchgspmd.comm.roll_call import RollCall
from torchgspmd.fx_passes.lower.verify_in_flight import STARTS

MESHES = ("data=2", "model=3", "data=2,model=2")


@distributed(*MESHES)
@on_cpu
def test_errors(mesh):
    """Other shapes on one rank: an error on every rank, no hang."""
    model, _ = pair(mesh, dropout=0.0)
    model(*batch(0))
    for compiled in (False, True):  # each rank has a program for what it is given
        for rows in (6, 7) if compiled else ():
            model(*batch(0, rows))
        try:
            model(*batch(0, 7 if dist.get_rank() else 6))
        except gspmd.ShardingError as error:
            assert str(error).startswith("the arguments differ between ranks"), error
            assert "test_rank_check.py" in str(error), error
        else:
            raise AssertionError("no error")
        model(*batch(0)).backward()
    for program in model._all_programs():
        compared = program.carry if program.carries else program.settle
        sent = [
            n.target
            for n in program.forward.__self__.graph.nodes
            if n.target in STARTS or n.target == compared
        ]
        assert sent[0] == compared and sent.count(compared) == 1, sent
    model, _ = pair(mesh, dropout=0.5)
    for _ in range(2):  # when it is compiled, and later
        torch.manual_seed(dist.get_rank())
        try:
            model(*batch(0))
        except gspmd.ShardingError as error:
            assert str(error).startswith("the ranks would draw different random numbers"), error
        else:
            raise AssertionError("no error")
        torch.manual_seed(1)
        model(*batch(0))
    model, _ = pair(mesh, dropout=0.0)
    for _ in range(2):
        try:
            model(
                *batch(int(dist.get_rank() == mesh.size - 1))
            )  # each rank its own, as with DistributedDataParallel
        except gspmd.ShardingError as error:
            assert str(error).startswith(
                f"argument 'tokens' has other values on rank {mesh.size - 1} than on rank 0"
            ), error
            assert "made by shard_batch" in str(error), error
        else:
            raise AssertionError("no error")
    model(*batch(0))
    model = gspmd.parallelize(Distance(), mesh)
    model(torch.arange(6.0).view(2, 3) / (3 + 1e-6 * dist.get_rank()))  # rounding is no difference
    try:
        gspmd.parallelize(Model(), gspmd.Mesh(data=mesh.size + 1))
    except gspmd.ShardingError as error:
        assert f"there are {mesh.size} processes" in str(error), error
    else:
        raise AssertionError("no error")


@distributed("data=2,model=2")
@on_cpu
def test_errors_of_many_ranks(mesh):
    """More than FEW_RANKS compare the largest and the smallest of each word, and say the same."""
    with patch.object(rank_check, "FEW_RANKS", 1):
        test_errors.check(mesh)
        test_values_at_every_call.check(mesh)


@distributed("data=2")
@on_cpu
def test_never_sends_no_comparison(mesh):
    """Later calls of a program send what the program sends, and nothing else."""
    model = gspmd.parallelize(nn.Linear(4, 4), mesh, in_specs="data _", check="never")
    x, sent = torch.ones(4, 4), []
    model(x)
    with patch.object(RollCall, "begin", lambda *args: sent.append("row")):
        model(x)
    assert not sent


@distributed("data=2", "data=2,model=2")
@on_cpu
def test_values_at_every_call(mesh):
    """Other batches on one rank at the third call: an error on every rank, and the next runs."""
    last = dist.get_rank() == mesh.size - 1
    for check in ("always", "first", "never"):
        model = gspmd.parallelize(Distance(), mesh, in_specs="data _", check=check)
        for step in range(0 if check == "never" else 2):
            model(torch.full((4, 3), step + 1 + 1e-6 * last)).backward()
        try:
            model(torch.full((4, 3), 3.0 + last))
        except gspmd.ShardingError as error:
            assert check == "always"
            assert str(error).startswith(f"argument 'x' has other values on rank {mesh.size - 1}")
            assert "test_rank_check.py" in str(error), error
        else:
            assert check != "always"
        model(torch.ones(4, 3))


class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, x):
        return self.inner(x).square().mean()


@distributed(*MESHES)
@on_cpu
def test_a_sum_that_travels_with_the_comparison(mesh):
    torch.manual_seed(0)
    reference = Distance()
    everywhere = "+".join(mesh.names)
    model = gspmd.parallelize(copy.deepcopy(reference), mesh, in_specs=(f"{everywhere} _",))
    for rows in (12, 7, 12):
        x = torch.randn(rows, 3)
        losses = model(x), reference(x)
        close(*losses)
        for m, loss in zip((model, reference), losses):
            m.zero_grad()
            loss.backward()
        close(model.inner.weight.grad, reference.inner.weight.grad)
    try:
        model(torch.randn(12 if dist.get_rank() else 7, 3))
    except gspmd.ShardingError as error:
        assert str(error).startswith("the arguments differ between ranks"), error
    else:
        raise AssertionError("no error")
    close(model(x), reference(x))
    assert all(program.carries for program in model._all_programs())
    half = model.to(torch.bfloat16)
    close(half(x.bfloat16()), reference.to(torch.bfloat16)(x.bfloat16()), 2**-7)  # two roundings
    for forward in (p.forward.__self__.graph for p in model._all_programs()):
        assert not [n for n in forward.nodes if n.target in STARTS]


class TwoDistances(nn.Module):
    """Two sums of different types, the second of which begins before the first has ended."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).square().mean(), x.double().sin().mean()


@distributed(*MESHES)
@on_cpu
def test_nothing_is_sent_before_the_comparison_ends(mesh):
    reference = TwoDistances()
    model = gspmd.parallelize(
        copy.deepcopy(reference), mesh, in_specs=("+".join(mesh.names) + " _",)
    )
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for got, want in zip(model(x), reference(x), strict=True):
            close(got, want)
    (program,) = model._all_programs()
    ends = {program.settle, RankCheck.total}
    order = [n.target for n in program.forward.__self__.graph.nodes if n.target in STARTS | ends]
    assert order[0] in ends and len(order) > 1, order


@distributed("data=2", timeout=60)
@on_cpu
def test_a_rank_that_starts_its_comparison_late_is_no_other_program(mesh):
    """A loaded machine may stop a rank anywhere, here inside the call that sends the words."""
    model, _ = pair(mesh, dropout=0.0)
    model(*batch(0))
    sends, seconds = RollCall._send, 2 * SOON * dist.get_rank()

    def slowly(*args: Any) -> None:
        time.sleep(seconds)
        sends(*args)

    with patch.object(RollCall, "_send", slowly):
        model(*batch(0))
    model(*batch(0))
