"""Run a set of features on simulated devices, and judge it by plain PyTorch on one device."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan, ShardingError
from torchgspmd.fx_passes.printer import program_text

from .features import fit, setup_of
from .program import Setup, batch, build

RIGHT, REFUSED, WRONG, CRASH = "right", "refused", "wrong", "crash"
TERMS = 4096  # how many roundings a number has, in sums and in layers one after the other
STEP, SLOPE = 1e-6, 1e-5  # of central differences, and how far they may be off


@dataclass(frozen=True)
class Verdict:
    names: tuple[str, ...]
    kind: str
    text: str = ""  # why it is not right
    sent: float = 0.0  # bytes of a device

    def __str__(self) -> str:
        lines = [f"{'+'.join(self.names)}: {self.kind}", *self.text.splitlines()]
        return "\n  ".join(lines)


def judge(names: tuple[str, ...]) -> Verdict:
    """Return whether the program of a set of features is right, and what it sends."""
    setup = setup_of(names)
    try:
        plan, model = planned(setup)
        wrong = difference(setup, plan, model)
        return Verdict(names, WRONG if wrong else RIGHT, wrong, plan.sent_bytes)
    except ShardingError as error:
        return Verdict(names, REFUSED, str(error))
    except Exception:
        return Verdict(names, CRASH, traceback.format_exc(limit=-4))


def shrink(verdict: Verdict) -> Verdict:
    """Return the verdict of a smallest set of these features that is not right either."""
    for name in verdict.names:
        fewer = tuple(other for other in verdict.names if other != name)
        if fewer and fit(fewer) and (smaller := judge(fewer)).kind != RIGHT:
            return shrink(smaller)
    return verdict


def planned(setup: Setup) -> tuple[Plan, nn.Module]:
    """Return the plan of a setup's program, and the module that it is of."""
    model, mesh = build(setup), Mesh(**setup.mesh)
    names = ("arg0", "arg1") if setup.step else ("tokens", "targets")
    dims = {dim: name for name, dim in setup.dynamic.items()}
    options = {**setup.options, "grad": not setup.step}
    if dims:
        options["dynamic"] = dict.fromkeys(names, dims)
    rows = setup.spec("batch length")
    plan = gspmd.plan(model, *batch(setup), mesh=mesh, in_specs=(rows, rows), **options)
    _ = str(plan), plan.summary(), program_text(plan.program_graph), str(plan.report())
    return plan, model


def difference(setup: Setup, plan: Plan, model: nn.Module) -> str:
    """Return where two runs differ from plain PyTorch, or nothing."""
    alone = build(setup.plain())
    for seed in range(2):
        other = {name: setup.sizes[name] - 2 * seed for name in setup.dynamic}
        if "batch" in other:
            other["batch"] = setup.sizes["batch"] * (1 + seed)
        tokens = batch(setup, seed, **other)
        if setup.random:
            wrong = slope_difference(setup, plan, model, tokens)
        else:
            wrong = run_difference(setup, plan, model, alone, tokens)
        if wrong:
            return f"run {seed}: {wrong}"
    return ""


def run_difference(
    setup: Setup, plan: Plan, model: nn.Module, alone: nn.Module, tokens: tuple[Tensor, Tensor]
) -> str:
    """Compare a run of the plan, and what it leaves behind, with plain PyTorch."""
    loss = alone(*tokens)
    expected = {"loss": loss.detach()}
    found = {}
    if setup.step:
        found["loss"] = plan.simulate(*tokens, _poison=True)
    else:
        parameters = {n: p for n, p in alone.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, [*parameters.values()])
        expected |= dict(zip(parameters, gradients))
        found["loss"], gradients = plan.simulate(*tokens, _poison=True)
        found |= by_block(model, gradients)
        # Weights that an adapter holds still have none.
        if found.keys() != expected.keys():
            return f"gradients of {sorted(found.keys() ^ expected.keys())}"
    expected |= {f"state {name}": value for name, value in alone.state_dict().items()}
    states = by_block(model.model if setup.step else model, model.state_dict())
    found |= {f"state {name}": value for name, value in states.items()}
    return first_difference(setup, found, expected)


def first_difference(setup: Setup, found: dict, expected: dict) -> str:
    tolerance = TERMS * torch.finfo(setup.rounding).eps
    for name, value in expected.items():
        if name not in found:
            return f"no {name}"
        if found[name].shape != value.shape:
            return f"{name} is {tuple(found[name].shape)}, not {tuple(value.shape)}"
        scale = max(1.0, float(value.abs().max()))
        off = float((found[name] - value).abs().max())
        if not off <= tolerance * scale:
            return f"{name} is off by {off:.1e}"
    return ""


def by_block(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of stacked weights by the names that a loop's blocks have."""
    result = {}
    for name, tensor in tensors.items():
        before, is_stacked, of_block = name.partition("blocks.block.")
        if is_stacked:
            for layer in range(model.blocks.count):
                row = tensor[model.blocks.place(layer)]
                result[f"{before}blocks.{layer}.{of_block}"] = row
        else:
            result[name] = tensor
    return result


def slope_difference(
    setup: Setup, plan: Plan, model: nn.Module, tokens: tuple[Tensor, Tensor]
) -> str:
    """Compare the gradient of random numbers that are drawn with the slope of the loss itself."""
    inner = model.model if setup.step else model
    parameters = {n: p for n, p in inner.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in inner.named_parameters()}

    def run(shift: float) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and gradients of weights that are moved by `shift`."""
        with torch.no_grad():
            for name, p in inner.named_parameters():
                p.copy_(start[name])
                if name in parameters:
                    p.add_(directions[name], alpha=shift)
        torch.manual_seed(5)
        if not setup.step:
            loss, gradients = plan.simulate(*tokens, _poison=True)
            return float(loss), gradients
        loss = plan.simulate(*tokens, _poison=True)
        return float(loss), {name: start[name] - p.detach() for name, p in parameters.items()}

    torch.manual_seed(3)
    directions = {name: torch.randn_like(p) for name, p in parameters.items()}
    _, gradients = run(0.0)
    slope = (run(STEP)[0] - run(-STEP)[0]) / (2 * STEP)
    run(0.0)
    found = sum(float((gradients[name] * d).sum()) for name, d in directions.items())
    size = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    rounding = TERMS * torch.finfo(setup.rounding).eps if setup.rounding != torch.float64 else 0
    if not abs(found - slope) <= (SLOPE + rounding) * max(1.0, size):
        return f"the slope of the loss is {slope:.8f}, that of the gradients {found:.8f}"
    return ""
