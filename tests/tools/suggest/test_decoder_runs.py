"""Layouts of published decoders: no estimate is below its bound, the search finds the best."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd.tools.command_line import run as run_command
from torchgspmd.tools.decoders import DecoderRun, RunDecoder, runs
from torchgspmd.tools.decoders.config import config
from torchgspmd.tools.decoders.run_bounds import Bound, Reference
from torchgspmd.tools.decoders.run_kernels import RunKernels, groups_of
from torchgspmd.tools.decoders.run_layouts import Axes
from torchgspmd.tools.decoders.run_search import MIN_GAIN, RunSearch, candidates, planned_alike
from torchgspmd.tools.decoders.run_steps import HOST, Planned, composed, step
from torchgspmd.tools.suggest import decoder_runs

ONE = {"fsdp": 0, "tensor": 1, "pipeline": 1, "context": 1, "virtual_stages": 1, "expert": 1}


def run_on(model: str, gpus: int, hardware: str = "b200", **sizes: Any) -> DecoderRun:
    given = {"global_batch": 2 * gpus, "micro_batch": 1, "sequence": 1024, **ONE, **sizes}
    return DecoderRun(model, hardware, gpus, given.pop("precision", "FP8"), **given)


@pytest.mark.parametrize(
    ("model", "adapters"),
    [("llama38b", False), ("deepseekv3", False), ("qwen330ba3b", False), ("llama38b", True)],
)
def test_no_step_is_below_its_bound(model: str, adapters: bool) -> None:
    """Random layouts of random machines."""
    draw = random.Random(f"{model} {adapters}")
    hardware = draw.choice(["h100", "b200", "gb300"])
    precision = draw.choice(["BF16", "FP8", "MXFP8"])
    run = run_on(model, 16, hardware, precision=precision, has_adapters=adapters)
    reference = Reference(run)
    for each in draw.sample([*candidates(run)], 2):
        least, found = composed(Bound(reference, each)), step(each)
        assert least.seconds <= found.seconds, each.layout
        room = run.hardware.memory
        assert least.memory <= room or found.memory > room, "a layout that fits is left out"


@pytest.mark.parametrize(("precision", "passes"), [("BF16", 0), ("FP8", 4), ("MXFP8", 1)])
def test_a_host_starts_the_products_of_each_expert(precision: str, passes: int) -> None:
    """A product, a quantization of its rows, and a hook for each weight; none for sizes."""
    devices = random.Random(precision).choice([2, 4, 8])
    planned = Planned(run_on("qwen330ba3b", devices, precision=precision, expert=devices))
    plan, local = planned.plans["experts", "experts"], 128 // devices
    products = [node for node in plan.program_graph.nodes if groups_of(node) > 1]

    def kernels(automodel: bool) -> list[float]:
        times = RunKernels(plan.program_graph, plan.mesh, planned.hardware, planned.kernels)
        like, sums = planned.on(replace(planned.run, is_automodel=automodel)), [0.0, 0.0]
        for node in products:
            sums[bool(node.meta.get("backward"))] += like.host_seconds(node, times) / HOST
        return [round(each / (2 * 2 * local), 6) for each in sums]  # two products in two layers

    assert kernels(automodel=True) == [1 + passes, 2 + passes]
    assert kernels(automodel=False) == [1 + passes, 3 + passes]
    times = RunKernels(plan.program_graph, plan.mesh, planned.hardware, planned.kernels)
    assert {*products} <= times.dispatched
    assert not any("topk" in x.name or "attention" in x.name for x in times.dispatched)


def test_a_search_without_end_finds_the_best() -> None:
    run = run_on("llama38b", 2, "h100", global_batch=2)
    every = [step(each) for each in candidates(run)]
    fitting = [found.seconds for found in every if found.memory <= run.hardware.memory]
    search = RunSearch(run, run.hardware.memory, float("inf"))
    search.run_until_end()
    assert search.bound <= min(fitting) <= search.seconds <= min(fitting) * (1 + 2 * MIN_GAIN)
    assert search.planned < len({planned_alike(each) for each in candidates(run)})
    assert search.best(1)[0][1].seconds == search.seconds


def test_time_ends_a_search_and_its_bound_says_so() -> None:
    run = run_on("llama38b", 8, "h100", global_batch=64)
    search = RunSearch(run, run.hardware.memory, 0.0)
    search.run_until_end()
    assert search.planned == 1 and search.open
    assert search.bound == min([search.worth, *(group.least for group in search.open)])


@pytest.mark.parametrize("sizes", [{"tensor": 2, "fsdp": 4}, {"pipeline": 2, "fsdp": 2}])
def test_no_proposal_is_slower_than_the_layout_that_a_run_has(sizes: dict[str, Any]) -> None:
    """Whatever time there is, and also if the space does not have it: weights in two parts of 4."""
    run = run_on("llama38b", 8, global_batch=16, **sizes)
    with torch.device("meta"):
        model, tokens = RunDecoder(run), torch.empty(16, 1024, dtype=torch.long)
    options: dict[str, Any] = {"devices": 8, "hardware": "b200", "precision": "fp8"}
    first = gspmd.suggest(model, (tokens, tokens), seconds=0, **options)[0]
    assert first.counts["plans"] == 1
    assert first.seconds <= step(run).seconds


def test_candidates_are_runs() -> None:
    """Each has all devices and the whole batch; published layouts are among them."""
    run = run_on("llama370b", 64, "gb300", global_batch=256, sequence=8192)
    found = [*candidates(run)]
    assert len({*found}) == len(found)
    for each in found:
        each.check()
        assert each.replicas * each.microbatches * each.micro_batch == 256
        assert each.gpus == each.replicas * each.tensor * each.pipeline * each.context
        Axes.of(each, each.config)
    assert replace(run, pipeline=4, virtual_stages=5) in found
    assert replace(run, fsdp=64, micro_batch=2) in found


LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"model": "llama38b", "pipeline": 2, "tensor": 2, "virtual_stages": 2},
    "fsdp": {"model": "llama38b", "fsdp": 4, "context": 2},
    "experts": {"model": "qwen330ba3b", "expert": 4},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_code_of_a_proposal_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few layers: the mesh, the marks of weights and values, stages and microbatches."""
    given = LAYOUTS[name]
    # Two stages with two pieces each have a layer a piece.
    small = replace(config(given["model"]), layers=4 if "pipeline" in given else 2, words=1024)
    monkeypatch.setattr(runs, "config", lambda _: small)
    run = run_on(**{"gpus": 8, "global_batch": 32, "sequence": 256, **given})
    run.check()
    search = RunSearch(run, run.hardware.memory, 0.0)
    found = decoder_runs._proposal(run, composed(Planned(run)), search, {}, {})
    assert "Why: " in str(found) and "RunDecoder(DecoderRun(" in found.script
    compile(found.script, "train.py", "exec")
    options: dict[str, Any] = {}

    def keep(model: object, mesh: object, **given: Any) -> object:
        options.update(given, mesh=mesh)
        return model

    with torch.device("meta"):
        names: dict[str, Any] = {"gspmd": gspmd, "model": RunDecoder(run), "keep": keep}
        tokens = torch.empty(run.global_batch, run.sequence, dtype=torch.long)
        exec(found.code.replace("gspmd.parallelize(", "keep("), names)
    options.pop("shard_updates", None)  # of parallelize alone
    plan = gspmd.plan(names["model"], tokens, tokens, grad=True, **options)
    assert plan.mesh == found.mesh
    assert {kind.kind for kind in plan.collectives}


def test_the_command_says_why_and_how_far(capsys: pytest.CaptureFixture[str]) -> None:
    line = "suggest --model llama3-8b --devices 2 --batch 2 --sequence 256 --seconds 1"
    assert run_command([*line.split(), "--precision", "mxfp8", "--hardware", "b200"]) == 0
    text = capsys.readouterr().out
    for part in ("in mxfp8 by fused kernels at", "of the best layout in its space", "Why: "):
        assert part in text
    assert "model = RunDecoder(DecoderRun(model='llama3-8b', system='b200', gpus=2" in text
