"""A plan that is wrong names the pass that has made it so."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import torchgspmd as gspmd
from certificate.faults import leave_out, other_operation
from certificate.models import planned
from torchgspmd import Mesh, ShardingError
from torchgspmd.fx_passes import pipeline
from torchgspmd.fx_passes.pass_types import Alternatives, Step
from torchgspmd.fx_passes.program import Program

Fault = Callable[[fx.Graph], object]


def another_operation(graph: fx.Graph) -> None:
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.gelu.default)
    assert other_operation(node, Random(0))


def exchanged_results(graph: fx.Graph) -> None:
    output = graph.output_node()
    first, second = output.args[0]
    output.args = ((second, first),)


def no_collective(graph: fx.Graph) -> None:
    assert any(leave_out(node, Random(0)) for node in graph.nodes)


@contextmanager
def with_fault(name: str, fault: Fault):
    """Put a fault into the result of a pass."""

    def changed(step: Step) -> Step:
        if isinstance(step, Alternatives):
            return replace(step, passes=tuple(map(changed, step.passes)))
        if step.name != name:
            return step

        def run(program: Program) -> fx.Graph | None:
            graph = step.run(program)
            fault(program.graph if graph is None else graph)
            return graph

        return replace(step, run=run)

    token = pipeline._current.set(tuple(map(changed, pipeline.PIPELINE)))
    try:
        yield
    finally:
        pipeline._current.reset(token)


FAULTS = (
    *((name, another_operation, "gelu") for name in ("decompose_ops", "partition", "localize")),
    ("split_fused", exchanged_results, "add"),
    *((name, another_operation, "gelu") for name in ("bucket", "overlap")),
    ("start_wait", no_collective, "einsum_default"),
)


@pytest.mark.parametrize("name, fault, value", FAULTS)
def test_the_pass_that_has_a_fault_is_named(name, fault, value, monkeypatch):
    monkeypatch.setenv("TORCHGSPMD_CHECK", "2")
    mesh, x, w = Mesh(data=2), torch.ones(4, 6), torch.ones(6, 4)

    def f(x, w):
        y = F.gelu(x) @ w
        return y, x[:, :4] + 1

    specs = {"in_specs": ("_ data", "data _"), "out_specs": "_ _"}
    with with_fault(name, fault), pytest.raises(ShardingError) as raised:
        gspmd.plan(f, x, w, mesh=mesh, **specs)
    assert f"%{value}" in str(raised.value).split("fix")[0], raised.value
    assert f"  why   pass {name} made it so: the program before it is right; the" in str(
        raised.value
    )
    gspmd.plan(f, x, w, mesh=mesh, **specs)


def test_a_pipeline_with_rounds() -> None:
    """Between `localize` and `outline_loops` its stages run in another order than on devices."""

    def fault(graph: fx.Graph) -> None:
        assert any(other_operation(node, Random(0)) for node in graph.nodes)

    with with_fault("bucket", fault), pytest.raises(ShardingError) as raised:
        planned("circular").verify()
    assert "pass bucket made it so" in str(raised.value)
