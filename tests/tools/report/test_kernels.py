"""Estimates with a framework's kernels: what is fused, quantized, sent once, and kept."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Hardware, Mesh, Plan, annotate, plan
from torchgspmd.fx_passes.schedule.arithmetic import flops
from torchgspmd.tools.decoders.run_kernels import Routed, RunKernels
from torchgspmd.tools.report.estimate import COMMUNICATION, COMPUTE, estimate
from torchgspmd.tools.report.kernels import Kernels, KernelTimes

H100 = Hardware.of("h100")


class Feed(nn.Module):
    """Two products with a gate between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 8192, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return (x + self.down(F.silu(gate) * up)).square().mean()


@pytest.fixture(scope="module")
def trained() -> Plan:
    mesh = Mesh(data=2, model=2)
    with torch.device("meta"):
        model, x = Feed(), torch.empty(8192, 1024)
    annotate(model, mesh, {"up.weight": "model _", "down.weight": "_ model"})
    return plan(model.bfloat16(), x.bfloat16(), mesh=mesh, in_specs=("data _",), grad=True)


def events(trained: Plan, kernels: Kernels | None) -> list:
    program, model = trained.program_graph, trained.captured.graph
    return list(estimate(program, model, trained.mesh, H100, kernels).events)


def busy(trained: Plan, kernels: Kernels | None) -> float:
    return sum(e.seconds for e in events(trained, kernels) if e.stream == COMPUTE)


def test_narrow_products_are_faster_and_wide_modules_are_not(trained: Plan) -> None:
    wide, narrow = busy(trained, Kernels()), busy(trained, Kernels("fp8"))
    assert 0.5 * wide < narrow < wide
    assert busy(trained, Kernels("fp8", wide=("*",))) == wide


class Projections(nn.Module):
    """A layer's four products, at the sizes of TransformerEngine's examples/gemm_profiling."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
        self.parts = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [part(x) for part, x in zip(self.parts, inputs)]


@pytest.fixture(scope="module")
def projections() -> Plan:
    with torch.device("meta"):
        model = Projections()
        inputs = [torch.empty(15872, k, requires_grad=True) for k in (4096, 4096, 4096, 16384)]
    inputs = [x.bfloat16() for x in inputs]
    return plan(model.bfloat16(), *inputs, mesh=Mesh(data=1), grad=True)


@pytest.mark.parametrize(
    ("products", "milliseconds"),
    [("bf16", 13.102), ("fp8", 6.812), ("mxfp8", 7.161), ("nvfp4", 3.764)],
)
def test_products_take_as_long_as_transformer_engine_measured(
    projections: Plan, products: str, milliseconds: float
) -> None:
    """Forward and backward on a B300, without quantization; a format may be off by 5 %."""
    kernels, graph = Kernels(products, gap=0.0), projections.program_graph
    times = KernelTimes(graph, projections.mesh, Hardware.of("b300"), kernels)
    times.quantized.update(graph.nodes)
    found = sum(times(node) for node in graph.nodes if flops(node, projections.mesh))
    assert found * 1e3 == pytest.approx(milliseconds, rel=0.05)


def test_a_module_is_fused(trained: Plan) -> None:
    assert busy(trained, Kernels()) < busy(trained, Kernels(is_fused=False))


def test_only_returned_sums_come_later(trained: Plan) -> None:
    """Values that the backward needs are summed in each microbatch."""

    def axes(accumulates: bool) -> list[tuple[str, ...]]:
        found = events(trained, Kernels(accumulates=accumulates))
        return [step.axes for e in found if e.stream == COMMUNICATION for step in e.steps]

    assert ("data",) in axes(False) and ("model",) in axes(False)
    assert axes(True) == [each for each in axes(False) if "data" not in each]


def test_quantized_operands_are_kept_in_their_format(trained: Plan) -> None:
    def kept(products: str) -> float:
        graph, mesh = trained.program_graph, trained.mesh
        return sum(RunKernels(graph, mesh, H100, Kernels(products)).saved().values())

    assert kept("nvfp4") < kept("fp8") < kept("bf16")


def test_rows_that_a_token_sends() -> None:
    one, many = Routed(8, 256), Routed(8, 256, in_order=True)
    assert one.reached(1) == many.reached(1) == pytest.approx(1.0, abs=0.03)
    assert 7 < one.reached(64) < 8
    assert many.reached(64) == 1 + 7 * 64 / 256
    assert Routed(8, 256).reached(10**6) == pytest.approx(8, rel=1e-3)
    # One that sends a token once for each of its experts never sends less.
    repeated = replace(one, repeats=True)
    assert all(repeated.reached(n) >= one.reached(n) for n in (2, 8, 64))
    # Within a host links are nine times as fast.
    seconds = [one(1e9, H100, devices) for devices in (8, 64)]
    assert seconds[1] > 3 * seconds[0]
