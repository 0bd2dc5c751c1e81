"""Judge sets of features on four processes that stay alive, by plain PyTorch on rank 0.

Random numbers have no plain truth: such a set has the numbers of its simulation, which the slope of
the loss judges (judge.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from ranks import distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd
from torchgspmd.errors import ShardingError

from .features import parse, setup_of
from .judge import (
    CRASH,
    NEW,
    REFUSED,
    RIGHT,
    WRONG,
    Verdict,
    by_block,
    compiled,
    decoding,
    first_difference,
    options_of,
    other_sizes,
    restored,
    results,
)
from .program import NextWords, Setup, Words, batch, build, caches

DEVICES = 4


def judge(names: tuple[str, ...]) -> Verdict:
    """Return whether a set is right on processes."""
    try:
        judge_here(f"all={DEVICES}", text="+".join(names))
    except BaseException as failure:  # pytest's Failed is no Exception
        if isinstance(failure, KeyboardInterrupt):
            raise
        text = str(failure)
        kinds = {_Differs.__name__: WRONG, ShardingError.__name__: REFUSED}
        for error, kind in kinds.items():
            if f"{error}: " in text:
                return Verdict(names, kind, text.split(f"{error}: ", 1)[1].partition("\n---")[0])
        return Verdict(names, CRASH, text)
    return Verdict(names, RIGHT)


class _Differs(Exception):
    """A run on processes has other numbers than plain PyTorch."""


@distributed(timeout=600, warning_filter="ignore")
def judge_here(mesh: Any, text: str) -> None:
    setup = on_four(setup_of(parse(text)))
    if wrong := difference(setup):
        raise _Differs(wrong)


def on_four(setup: Setup) -> Setup:
    """Return the setup on four devices; an axis `spare` shards nothing."""
    mesh = dict(setup.mesh)
    if mesh == {"stage": 2}:
        mesh["spare"] = 2
    elif len(mesh) == 1:
        mesh = dict.fromkeys(mesh, DEVICES)
    # `data` first: beside `hosts` it has a share of the batch, and other axes are of one feature.
    for axis in sorted(reversed([axis for axis in mesh if axis != "stage"]), key="data".__ne__):
        if math.prod(mesh.values()) > DEVICES:
            mesh[axis] = 1
    return replace(setup, mesh=mesh)


def difference(setup: Setup) -> str:
    """Return where two runs differ from the truth, or nothing; rank 0 says it to the others."""
    model, alone = build(setup), build(setup.plain())
    rows, options = setup.spec("batch length"), options_of(setup)
    module = gspmd.parallelize(model, setup.on_mesh(), in_specs=(rows, rows), **options)
    simulated = compiled(setup) if setup.random and dist.get_rank() == 0 else None
    for seed in range(2):
        tokens = batch(setup, seed, **(other_sizes(setup) if seed else {}))
        found, wrong = run(setup, module, model, tokens), [""]
        if dist.get_rank() == 0:
            expected = simulation(setup, *simulated, tokens) if simulated else None
            expected = expected or results(setup, alone, alone(*tokens))
            if found.keys() != expected.keys():
                wrong[0] = f"there are not both of {sorted(found.keys() ^ expected.keys())}"
            else:
                wrong[0] = first_difference(setup, found, expected, seed)
        dist.broadcast_object_list(wrong)
        if wrong[0]:
            return f"run {seed}: {wrong[0]}"
    weights = {
        n: whole(x) for n, x in (module.model if setup.step else module).state_dict().items()
    }
    return checkpoint_difference(setup, weights) if setup.evaluate or setup.decode else ""


def run(
    setup: Setup, module: nn.Module, model: nn.Module, tokens: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Return the loss of a run, gradients if there is no step, and the state after it."""
    inner = model.model if setup.step else model
    torch.manual_seed(5)
    loss = module(*tokens)
    found = {"loss": whole(loss)}
    if not setup.step:
        loss.backward()
        gradients = {n: whole(p.grad) for n, p in module.named_parameters() if p.requires_grad}
        found |= by_block(inner, gradients)
        module.zero_grad()
    state = by_block(inner, {name: whole(x) for name, x in module.state_dict().items()})
    return found | {f"state {name}": value for name, value in state.items()}


def simulation(
    setup: Setup, plan: gspmd.Plan, model: nn.Module, tokens: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Return the same of the simulated devices."""
    torch.manual_seed(5)
    result = plan.simulate(*tokens)
    loss, gradients = (result, {}) if setup.step else result
    found = {"loss": loss, **by_block(model, gradients)}
    states = by_block(model.model if setup.step else model, model.state_dict())
    return found | {f"state {name}": value for name, value in states.items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.detach().clone()


def checkpoint_difference(setup: Setup, weights: dict[str, Tensor]) -> str:
    """Compare what other programs predict, from a checkpoint of the weights, with plain PyTorch."""
    alone = restored(replace(setup.plain(), step=False), weights)
    tokens, _ = batch(setup)
    with torch.no_grad():
        expected, found = Words(alone)(tokens), dict[str, Tensor]()
        if setup.evaluate:
            found["evaluation"] = predictions(other_mesh(setup), weights, tokens)
        if setup.decode:
            halves = replace(setup, mesh=dict.fromkeys(setup.mesh, 2))  # the cache has an axis too
            found["decoding"] = decoded(on_four(decoding(halves)), weights, tokens)
    known = {"evaluation": expected, "decoding": expected[:, : 2 * NEW]}
    return first_difference(setup, found, {name: known[name] for name in found})


def other_mesh(setup: Setup) -> Setup:
    """Return the setup for a mesh of the same axes that divides one of them alone."""
    first = next((axis for axis in setup.mesh if axis not in ("stage", "spare")), "spare")
    left = DEVICES // setup.mesh.get("stage", 1)
    mesh = {axis: setup.mesh[axis] if axis == "stage" else 1 for axis in setup.mesh}
    return replace(setup, mesh={**mesh, first: left}, step=False, accumulate=1)


def predictions(setup: Setup, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of a program for another mesh."""
    model = Words(restored(setup, weights))
    specs = (setup.spec("batch length"),)
    return whole(gspmd.parallelize(model, setup.on_mesh(), in_specs=specs, **setup.options)(tokens))


def decoded(setup: Setup, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of the first tokens, NEW at a time."""
    specs = setup.spec("batch _"), None, None
    model = NextWords(restored(setup, weights))
    module = gspmd.parallelize(model, setup.on_mesh(), in_specs=specs, **setup.options)
    tables = caches(setup)
    calls = ((tokens[:, at : at + NEW], torch.tensor(at), tables) for at in (0, NEW))
    return torch.cat([whole(module(*call)) for call in calls], 1)
