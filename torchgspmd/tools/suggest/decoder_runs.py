"""Proposals for a published decoder: the search over its runs, as scripts and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...comm.hardware import PRESETS, Hardware
from ...fx_passes.units import size_text, time_text
from ..decoders import DecoderRun, NamedDecoder, RunDecoder
from ..decoders.run_layouts import Axes, marks
from ..decoders.run_search import RunSearch
from ..decoders.run_steps import RunStep
from ..report.kernels import Kernels
from .proposal import Proposal, Savings
from .script import CodeNames, ScriptSource

SHOWN = 5


def run_of(
    model: NamedDecoder | RunDecoder,
    args: Sequence[Any],
    devices: int,
    hardware: Hardware,
    kernels: Kernels,
) -> DecoderRun:
    """Return the run of a batch, whose layout is to be chosen; one that it has is its own."""
    if isinstance(model, RunDecoder):
        batch = {"gpus": devices, "global_batch": len(args[0])}
        return replace(model.run, system=hardware, precision=kernels.products.upper(), **batch)
    return DecoderRun(
        model=model.name,
        system=hardware,
        gpus=devices,
        precision=kernels.products.upper(),
        global_batch=len(args[0]),
        micro_batch=1,
        sequence=model.sequence,
        has_adapters=model.adapters,
        is_automodel=model.automodel,
    )


def propose(
    run: DecoderRun, end: float, dtypes: Mapping[str, torch.dtype], is_known: bool = False
) -> list[Proposal]:
    """Return the best layouts; none if no layout has so many devices and rows.

    is_known: whether the run has a layout, which is tried first.
    """
    search = RunSearch(run, run.hardware.memory, end, run if is_known else None)
    search.run_until_end()
    counts = {"plans": search.planned, "candidates": search.space}
    return [_proposal(each, step, search, dtypes, counts) for each, step in search.best(SHOWN)]


def _proposal(
    run: DecoderRun,
    step: RunStep,
    search: RunSearch,
    dtypes: Mapping[str, torch.dtype],
    counts: Mapping[str, int],
) -> Proposal:
    axes, chosen = Axes.of(run, run.config).staged(run.pipeline), run.config
    specs, speed = marks(axes, chosen, list(chosen.kinds())), run.hardware
    kernels = Kernels(run.precision.lower())
    rate = speed.rate(kernels.recipe.itemsize)
    return Proposal(
        mesh=axes.mesh,
        marks={name: spec for name, spec in specs.items() if set(spec) - {"_", " "}},
        in_specs=(axes.tokens, axes.tokens),
        hardware=speed,
        seconds=step.seconds,
        memory=step.memory,
        sent_bytes=step.sent,
        mfu=step.products / (step.seconds * rate),
        bound=speed.product_seconds(step.products, kernels.recipe.itemsize),
        layers=(2, sum(chosen.kinds().values())),
        savings=Savings("always" if run.fsdp > 1 else "auto", (), run.microbatches),
        dtype_options=dtypes,
        staged="layers" if run.pipeline > 1 else "",
        repeats=run.virtual_stages,
        shards_updates=run.fsdp <= 1 and "data" in axes.sizes and not run.has_adapters,
        limit=search.limit,
        dtype=torch.bfloat16,
        kernels=kernels,
        least=search.bound,
        reason=" ".join(reasons(run, step, axes)),
        source=_source(run),
        counts=counts,
    )


def _source(run: DecoderRun) -> ScriptSource:
    names = CodeNames()
    preset = PRESETS.get(run.hardware.name)
    system = run.hardware.name if preset else run.system
    given = {**vars(run), "system": system}
    made = DecoderRun(**given)
    names.lines["from torchgspmd.tools.decoders import RunDecoder"] = None
    tokens = torch.empty(run.global_batch, run.sequence, dtype=torch.long, device="meta")
    batch = CodeNames().code((tokens, tokens))
    model = f"RunDecoder({names.code(made)})"
    return ScriptSource(tuple(names.lines), model, batch, "model(*ROWS)")


def reasons(run: DecoderRun, step: RunStep, axes: Axes) -> Iterator[str]:
    """Yield sentences: who computes which part, what is sent along each axis, and what limits."""
    yield (
        f"Why: {run.replicas} replicas compute {run.microbatches} microbatches of "
        f"{run.micro_batch} x {run.sequence} tokens each."
    )
    if run.pipeline > 1:
        layers = sum(run.config.kinds().values())
        yield (
            f"{layers} layers are in {run.pipeline} stages, {run.virtual_stages} on a device, "
            "which send activations to their neighbours."
        )
        if layers % (run.pipeline * run.virtual_stages) or len(run.config.kinds()) > 1:
            yield (
                "These stages are not alike, so the estimate is of a framework's pipeline; "
                "pipeline_model takes like layers in equal stages."
            )
    for axis, sent in _sent(run).items():
        if axes.sizes.get(axis, 1) > 1:
            yield f"Along {axis}={axes.sizes[axis]}: {sent}."
    shares = {"compute": step.parts["microbatches"], "idle stages": step.parts["idle"]}
    shares |= {"messages of stages": step.parts["messages"]}
    shares |= {"exchange of gradients and weights": step.parts["exchange"]}
    shares |= {"optimizer": step.parts["update"]}
    text = ", ".join(
        f"{name} {seconds / step.seconds:.0%}"
        for name, seconds in shares.items()
        if seconds > 0.005 * step.seconds
    )
    room = run.hardware.memory
    yield (
        f"Of {time_text(step.seconds)}: {text}; a device holds {size_text(step.memory)} of "
        f"{size_text(room)}, and sends {size_text(step.sent)}."
    )


def _sent(run: DecoderRun) -> dict[str, str]:
    """Return the exchanges along each axis, in words."""
    fsdp = "weights are gathered before each use, gradients reduced to shards in each microbatch"
    return {
        "data": "gradients are reduced and new weights gathered once a step",
        "shard": fsdp,
        "expert": "tokens travel to their experts and back" + f"; {fsdp}" * (run.fsdp > 1),
        "context": "keys and values travel round a ring",
        "model": "tokens are gathered before products, partial sums reduced to shards behind them",
    }
