"""Inductor keeps the plan's order of collectives and products, and frees what a backward has read.

The code is generated, and not compiled: torch's fake process group stands for the other ranks. On
a machine with a card it is Triton's.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_layer import Experts, batch
from torch import Tensor, fx, nn
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd.comm import hardware
from torchgspmd.fx_passes.schedule import bucket, collective_matmul
from torchgspmd.runtime import compile_graph
from torchgspmd.runtime.compile_graph import CompiledPiece

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt.model import GPT, LAYOUTS, Config  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AXES = {"dp": "data", "tp": "model", "sp": "model", "cp": "seq", "fsdp": "data"}
# The first and the last guard (--cases 2).
CASES = ("sp", "dp", "tp", "cp", "ring", "experts", "fsdp")
SIZE = Config(96, context=32, layers=1, heads=4, width=64)
MESSAGE = re.compile(r"_c10d_functional\.(\w+?)_?\.default\b")
PRODUCT = re.compile(
    r"(extern_kernels|aten)\.(mm|addmm|bmm|baddbmm)\b"
    r"|aten\._scaled_dot_product\w+\.default\(|torchgspmd\.(grouped_\w+|block_\w+)\.default"
)


class Stop(BaseException):
    """Code has been generated."""


class Orders:
    """What is called, in order: by programs as they are lowered, and by Inductor's code of each."""

    def __init__(self) -> None:
        self.planned: list[list[str]] = []
        self.written: list[list[str]] = []

    def compile(self, piece: CompiledPiece, inputs: list) -> Any:
        """Note both orders, and return a function that returns zeros."""
        real = _compile
        log = Log()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), log:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
            results = piece.program(*fakes)
        self.planned.append(log.calls)
        shapes = [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in results]
        with torch.no_grad(), pytest.raises(Stop):
            real(piece, inputs)([*inputs])
        return lambda boxed: tuple(
            s and torch.zeros(s[0], dtype=s[1], device=DEVICE) for s in shapes
        )

    def save(self, code: str) -> None:
        self.written.append(calls_of(code[code.index("def call(") :]))
        raise Stop


_compile = CompiledPiece._compile


class Log(TorchDispatchMode):
    """Notes collectives, waits and products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # For a CPU Inductor writes a product by one row or column as a sum.
        thin = [isinstance(x, Tensor) and x.dim() > 1 and 1 in x.shape[-2:] for x in args]
        is_thin = DEVICE == "cpu" and any(thin)
        self.calls += [c for c in calls_of(f"{func}(") if not (is_thin and c == "product")]
        return func(*args, **(kwargs or {}))


def calls_of(code: str) -> list[str]:
    """Return the collectives, waits and products that lines of code call."""
    found = []
    for line in code.splitlines():
        call = line.partition("#")[0].partition("assert_")[0]
        if message := MESSAGE.search(call):
            found.append(message[1])
        elif PRODUCT.search(call):
            found.append("product")
    return found


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    """Two ranks, whose messages go beside computation, in several buckets."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    orders = Orders()
    monkeypatch.setattr(hardware, "CPU", hardware.GPU)
    monkeypatch.setattr(bucket, "SMALL", 1000)
    monkeypatch.setattr(CompiledPiece, "_compile", lambda *args: orders.compile(*args))
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(orders.save))
    yield orders
    dist.destroy_process_group()


def hidden(order: list[str]) -> int:
    """Return how many products stand between starts and waits."""
    count, flying = 0, 0
    for call in order:
        if call == "product":
            count += flying > 0
        else:
            flying += -1 if call == "wait_tensor" else 1
    return count


class Sequence(nn.Module):
    """Its stream is laid out along the sequence; products travel round a ring."""

    def __init__(self, mesh: gspmd.Mesh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:  # [b, s, m]
        h = gspmd.mark_sharding(x.sin(), self.mesh, "_ model _")
        return gspmd.mark_sharding(self.down(self.up(h).relu()), self.mesh, "_ model _").sum()


def program(case: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, tuple]:
    """Return a wrapped module and its arguments."""
    mesh = gspmd.Mesh(**{AXES.get(case, "model"): 2})
    if case == "ring":
        monkeypatch.setattr(collective_matmul, "GAIN", float("inf"))
        marks = {"up.weight": "model _", "up.bias": "model", "down.weight": "_ model"}
        model = gspmd.annotate(Sequence(mesh).to(DEVICE), mesh, marks)
        return gspmd.parallelize(model, mesh, backend="inductor"), (torch.randn(2, 12, 48),)
    if case == "experts":
        model = gspmd.annotate(Experts(4, 16, 8).float().to(DEVICE), mesh, {"*": "model _ _"})
        specs = ("model _",) * 3
        wrapped = gspmd.parallelize(model, mesh, in_specs=specs, backend="inductor")
        x, chosen, weights = batch("uniform", 32, 16, 4)
        return wrapped, (x.detach().float(), chosen, weights.detach().float())
    model = gspmd.annotate(GPT(SIZE).to(DEVICE), LAYOUTS[case].on(mesh))
    specs = (gspmd.UNCONSTRAINED,) * 2
    wrapped = gspmd.parallelize(model, mesh, in_specs=specs, backend="inductor")
    return wrapped, tuple(torch.randint(96, (8, 32)) for _ in range(2))


@pytest.mark.parametrize("case", CASES)
def test_the_order_is_that_of_the_plan(
    case: str, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, arguments = program(case, monkeypatch)
    results = model(*(x.to(DEVICE) for x in arguments))
    results = results if isinstance(results, tuple) else (results,)
    results[0].sum().backward()
    assert len(orders.planned) == 2, "a forward and a backward"
    assert orders.written == orders.planned
    assert sum(map(hidden, orders.planned)) > 0, "no product hides a message"


@torch.library.custom_op("inductor_order::lives", mutates_args=())
def lives(x: Tensor) -> Tensor:
    """Return whether the first input of the program is still in memory."""
    return x.new_tensor(float(_INPUTS[0]() is not None))


lives.register_fake(lambda x: x.new_empty(()))
_INPUTS: list[weakref.ref[Tensor]] = []


def test_a_backward_frees_what_it_has_read() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    product = graph.call_function(torch.ops.aten.mm.default, (first, second))
    again = graph.call_function(torch.ops.aten.mm.default, (product, second))
    lives_on = graph.call_function(torch.ops.inductor_order.lives.default, (again,))
    graph.output((again, lives_on))
    run = compile_graph.compile_graph(nn.Module(), graph, "inductor", boxed=True)
    for scale in (1.0, 2.0):
        boxed = [torch.full((4, 4), scale, device=DEVICE), torch.eye(4, device=DEVICE)]
        _INPUTS[:] = [weakref.ref(boxed[0])]
        result, alive = run(boxed)
        assert result.tolist() == torch.full((4, 4), scale).tolist()
        assert not boxed and not alive


def test_a_piece_may_return_one_tensor() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    graph.output(graph.call_function(torch.ops.aten.mm.default, (first, second)))
    piece = CompiledPiece(fx.GraphModule(nn.Module(), graph))
    wide, tall = torch.randn(2, 3), torch.randn(3, 2)
    for a, b in ((wide, tall), (tall, wide), (tall.T, wide.T)):  # other shapes, other strides
        torch.testing.assert_close(piece(a, b), a @ b)
