"""backend="cudagraphs": replays of both halves have the numbers of the program without graphs.

RecordedGraphs stand for the card. tests/gpu/test_graphs.py has the same on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import message
from recorded_graphs import RecordedGraphs
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.errors import ShardingError
from torchgspmd.runtime import sharded_module
from torchgspmd.runtime.compile_graph import CompiledPiece
from torchgspmd.runtime.step_graphs import MOST, WARM_UPS

MESH = gspmd.Mesh(data=1)
GRAPHS: Any = {"backend": "cudagraphs"}


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def graphs() -> Iterator[RecordedGraphs]:
    recorded = RecordedGraphs()
    with patch.object(sharded_module, "graphs_for", lambda device, backend: recorded):
        yield recorded


class Net(nn.Module):
    """Draws, changes buffers, and keeps a value for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.norm(self.up(x)).relu(), 0.5, self.training)
        loss = self.down(y).square().mean() + 0.1 * self.last
        self.last.copy_(loss.detach())
        return loss


def net(wrap: Callable = lambda model: model, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return gspmd.parallelize(wrap(Net()), MESH, in_specs="data _", **options)


def trained(model: nn.Module, steps: int = 4, rows: int = 5) -> list[Tensor]:
    """Return each step's loss, then parameters and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(rows, 6))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(t.full_tensor() for t in [*model.parameters(), *model.buffers()])]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    """Bit by bit: the operations are the same."""
    assert len(got) == len(want) and all(map(torch.equal, got, want)), (got, want)


def test_steps(graphs):
    want = trained(net())
    assert_equal(trained(net(**GRAPHS)), want)
    assert (graphs.warm_ups, graphs.captures, graphs.replays) == (WARM_UPS, 2, 8)
    assert graphs.freed, "the backward frees nothing that the forward has left"


def test_a_train_step_is_one_graph(graphs):
    def losses(**options: Any) -> list[Tensor]:
        def wrap(model: nn.Module) -> nn.Module:
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.1))
            return gspmd.train_step(model, optimizers[-1])

        optimizers: list = []
        step, found = net(wrap, **options), []
        for i in range(12):
            found.append(step(torch.randn(5, 6)))
            if i == 5:  # A number that changes becomes an argument of a second program.
                optimizers[0].param_groups[0]["lr"] = 0.02
            elif i > 5:
                optimizers[0].param_groups[0]["lr"] /= 2
        return [*found, *(t.full_tensor() for t in step.buffers())]

    want = losses()
    assert_equal(losses(**GRAPHS), want)
    assert (graphs.warm_ups, graphs.captures, graphs.replays) == (2 * WARM_UPS, 2, 6)


def test_calls_that_wait_for_their_backward(graphs):
    """Each has memory of its own, which later calls use again."""

    def gradients(**options: Any) -> list[Tensor]:
        model, found = net(**options), []
        for _ in range(2):
            model.zero_grad()
            losses = [model(torch.randn(5, 6)) for _ in range(3)]
            (losses[0] + 2 * losses[1]).backward()
            losses[2].backward()
            found += [p.grad.full_tensor() for p in model.parameters()]
            found += [loss.detach() for loss in losses]  # as they were, after later replays
        return found

    want = gradients()
    assert_equal(gradients(**GRAPHS), want)
    assert (graphs.warm_ups, graphs.captures, graphs.replays) == (WARM_UPS, 6, 12)


def test_too_many_calls_wait(graphs):
    model = net(**GRAPHS)
    losses = [model(torch.randn(5, 6)) for _ in range(MOST)]
    text = message(lambda: model(torch.randn(5, 6)))
    assert f"{MOST} calls" in text and "loss.detach()" in text, text
    losses.pop().backward()
    model(torch.randn(5, 6))


def test_gradients_accumulate(graphs):
    def gradients(**options: Any) -> list[Tensor]:
        model = net(**options)
        for _ in range(3):
            model(torch.randn(5, 6)).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    want = gradients()
    assert_equal(gradients(**GRAPHS), want)


def test_parameters_that_have_moved(graphs):
    def losses(**options: Any) -> list[Tensor]:
        model = net(**options)
        found = [*trained(model)]
        for p in model.parameters():
            p.data = p.data * 2
        return [*found, *trained(model)]

    want = losses()
    assert_equal(losses(**GRAPHS), want)
    assert (graphs.warm_ups, graphs.captures) == (WARM_UPS, 4)


def test_each_size_has_graphs(graphs):
    def losses(**options: Any) -> list[Tensor]:
        model = net(**options)
        return [loss for rows in (5, 3, 5, 3) for loss in trained(model, 2, rows)]

    want = losses(dynamic=False)
    assert_equal(losses(**GRAPHS), want)
    assert (graphs.warm_ups, graphs.captures, graphs.replays) == (2 * WARM_UPS, 4, 16)


def test_modes_without_gradients(graphs):
    model, plain = net(**GRAPHS).eval(), net().eval()
    for mode in (torch.inference_mode, torch.no_grad):
        for _ in range(WARM_UPS + 2):
            x = torch.randn(5, 6)
            with mode():
                got, want = model(x), plain(x)
            assert_equal([got], [want])
    assert graphs.replays > 2


def test_a_backward_runs_once(graphs):
    loss = net(**GRAPHS)(torch.randn(5, 6))
    loss.backward(retain_graph=True)
    text = message(loss.backward)
    assert "a backward runs twice" in text and "retain_graph=True" in text, text


class Two(nn.Module):
    """Two results, none of which needs the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).relu().sum(), self.other(x).relu().sum()


def test_results_with_a_backward_each(graphs):
    def gradients(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = gspmd.parallelize(Two(), MESH, in_specs="data _", **options)
        for _ in range(2):
            one, other = model(torch.randn(5, 6))
            one.backward()
            other.backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    want = gradients()
    assert_equal(gradients(**GRAPHS), want)


def test_saved_tensors_of_hooks_are_not_kept(graphs):
    model = net(**GRAPHS)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda x: x):
        first, _ = model(torch.randn(5, 6)), model(torch.randn(5, 6))
    text = message(first.backward)
    assert "after its module's next call" in text, text


def test_a_step_that_the_user_captures(graphs):
    """The program is part of that graph: no capture begins in another."""
    torch.manual_seed(0)
    model = gspmd.parallelize(Two(), MESH, in_specs="data _", **GRAPHS)
    x = torch.randn(5, 6)
    want = [loss.detach() for loss in model(x)]
    captures, replays = graphs.captures, graphs.replays
    step = graphs.capture(lambda: model(x), [])
    step.replay()
    assert (graphs.captures, graphs.replays) == (captures + 1, replays + 1)
    assert_equal([*step.results], want)


def test_inductor_compiles_before_a_capture(graphs):
    """Operands have the same strides in all runs, also of a batch that is not dense."""

    def compile(piece: CompiledPiece, inputs: Any) -> Callable[[list], Any]:
        assert not graphs.is_capturing(), "Inductor compiles in a capture"
        return lambda boxed: piece.program(*boxed)

    def losses(**options: Any) -> list[Tensor]:
        model, step = net(**options), net(train_step, **options)
        rows, found = torch.randn(5, 12), []
        batches = rows[:, :6].t().contiguous().t(), rows[:, ::2], rows[:, :1].expand(5, 6)
        for x in batches * 2:
            found += [model(x), step(x)]
            found[-2].backward()
        return [*found, *(p.grad.full_tensor() for p in model.parameters())]

    def train_step(model: nn.Module) -> nn.Module:
        return gspmd.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with patch.object(CompiledPiece, "_compile", compile):
        want = losses(backend="inductor")
        got = losses(backend="inductor+cudagraphs")
    torch.testing.assert_close(got, want)  # a copy has other strides: products round otherwise
    assert graphs.replays == 12 + 3


# ------------------------------------------------------------------------------------ errors


def test_a_program_that_no_graph_can_compute(graphs):
    model = gspmd.parallelize(Picks(), MESH, in_specs="data _", **GRAPHS)
    text = message(lambda: model(torch.ones(4, 6)))
    assert "a CUDA graph cannot compute %" in text and "its size is known only in a run" in text
    assert "backend='torch'" in text and "test_step_graphs.py" in text, text
    assert not graphs.warm_ups + graphs.captures


def test_an_operation_that_cuda_does_not_capture(graphs):
    @torch.library.custom_op("step_graphs::waits", mutates_args=())
    def waits(x: Tensor) -> Tensor:
        if graphs.is_capturing():
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return x.clone()

    waits.register_fake(torch.empty_like)

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return waits(x).sum()

    model = gspmd.parallelize(Waits(), MESH, in_specs="data _", **GRAPHS)
    for _ in range(WARM_UPS):
        model(torch.ones(4, 6))
    text = message(lambda: model(torch.ones(4, 6)))
    assert "cannot be captured" in text and "why   operation not permitted" in text, text


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sort().values.sum()


@pytest.mark.parametrize("backend, other", (("cudagraphs", "torch"), ("inductor+cudagraphs",) * 2))
def test_a_graph_needs_a_card(backend, other):
    model = Net()
    text = message(lambda: gspmd.parallelize(model, MESH, backend=backend))
    other = other.partition("+")[0]
    assert f"backend '{backend}' needs a CUDA device" in text and f"backend='{other}'" in text
    assert type(model.up.weight) is nn.Parameter, "the model is changed"


def test_debug_sees_no_graph(graphs):
    text = message(gspmd.debug(net(**GRAPHS)).__enter__)
    assert "debug cannot show operations of a CUDA graph" in text and "backend='torch'" in text


def test_sizes_cannot_be_symbols(graphs):
    with pytest.raises(ShardingError, match="no option dynamic"):
        net(dynamic={"x": {0}}, **GRAPHS)
