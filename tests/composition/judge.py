"""Run a set of features on simulated devices, and judge it by plain PyTorch on one device."""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.func import functional_call

import torchgspmd as gspmd
from torchgspmd import Plan, ShardingError
from torchgspmd.comm.hardware import PRESETS
from torchgspmd.fx_passes.printer import program_text
from torchgspmd.model_api.train_step import TrainStep

from .features import fit, setup_of
from .program import NextWords, Setup, Words, batch, build, caches

RIGHT, REFUSED, WRONG, CRASH = "right", "refused", "wrong", "crash"
TERMS = 4096  # how many roundings a number has, in sums and in layers one after the other
TIMES = 2  # a program of few digits may be off by so many times what eager PyTorch is
SAMPLES = 9  # by which that is measured; the first is the truth
NEW = 2  # tokens of a call of decoding
STEP, SLOPE = 1e-6, 1e-5  # of central differences, and how far they may be off


@dataclass(frozen=True)
class Verdict:
    names: tuple[str, ...]
    kind: str
    text: str = ""  # why it is not right
    sent: float | None = None  # bytes of a device, if they were counted

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


def bytes_sent(names: tuple[str, ...]) -> float | None:
    """Return the bytes that a device sends, None of a set that is refused."""
    try:
        return compiled(setup_of(names))[0].sent_bytes
    except ShardingError:
        return None


def planned(setup: Setup) -> tuple[Plan, nn.Module]:
    """Return the plan of a setup's program, whose views work, and the module that it is of."""
    plan, model = compiled(setup)
    _ = str(plan), plan.summary(), program_text(plan.program_graph), str(plan.report())
    for name in PRESETS if "hardware" in setup.options else ():
        _ = str(plan.report(name))
    return plan, model


def compiled(setup: Setup) -> tuple[Plan, nn.Module]:
    """Return the plan of a setup's program, and the module that it is of."""
    model, mesh = build(setup), setup.on_mesh()
    rows, options = setup.spec("batch length"), {**options_of(setup), "grad": not setup.step}
    plan = gspmd.plan(model, *batch(setup), mesh=mesh, in_specs=(rows, rows), **options)
    return plan, model


def options_of(setup: Setup) -> dict[str, Any]:
    """Return the options of plan and of parallelize."""
    names = ("arg0", "arg1") if setup.step else ("tokens", "targets")
    dims = {dim: name for name, dim in setup.dynamic.items()}
    options = dict(setup.options)
    for name in ("param_dtype", "microbatches") if setup.step else ():  # it has them itself
        options.pop(name, None)
    return options | ({"dynamic": dict.fromkeys(names, dims)} if dims else {})


def difference(setup: Setup, plan: Plan, model: nn.Module) -> str:
    """Return where two runs differ from plain PyTorch, or nothing."""
    alone = build(setup.plain())
    for seed in range(2):
        tokens = batch(setup, seed, **(other_sizes(setup) if seed else {}))
        if setup.random:
            wrong = slope_difference(setup, plan, model, tokens)
        else:
            wrong = run_difference(setup, plan, model, alone, tokens, seed)
        if wrong:
            return f"run {seed}: {wrong}"
    return checkpoint_difference(setup, model) if setup.evaluate or setup.decode else ""


def other_sizes(setup: Setup) -> dict[str, int]:
    """Return dynamic sizes that no axis divides; a batch has microbatches of three or five rows."""
    parts = setup.accumulate * setup.options.get("microbatches", 1)
    parts *= 2 if setup.blocks == "pipeline" else 1
    other = {"batch": parts * (3 if parts > 1 else 5), "length": setup.sizes["length"] - 1}
    return {name: other[name] for name in setup.dynamic}


def checkpoint_difference(setup: Setup, trained: nn.Module) -> str:
    """Compare what other programs predict, from a checkpoint of the weights, with plain PyTorch."""
    weights = (trained.model if setup.step else trained).state_dict()
    alone = restored(replace(setup.plain(), step=False), weights)
    tokens, _ = batch(setup)
    with torch.no_grad():
        expected = Words(alone)(tokens)
    if setup.evaluate:
        found = predictions(other_mesh(setup), weights, tokens)
        if wrong := first_difference(setup, {"evaluation": found}, {"evaluation": expected}):
            return wrong
    if setup.decode:
        found = {"decoding": decoded(decoding(setup), weights, tokens)}
        return first_difference(setup, found, {"decoding": expected[:, : 2 * NEW]})
    return ""


def restored(setup: Setup, weights: dict[str, Tensor]) -> nn.Module:
    """Return a model in the mode eval, whose weights have been in a file."""
    model = build(setup)
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(weights, checkpoint_id=folder, no_dist=True)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state)
    return model.eval()


def other_mesh(setup: Setup) -> Setup:
    """Return the setup for a mesh of the same axes: more devices along one, fewer along others."""
    first, *rest = [axis for axis in setup.mesh if axis != "stage"] or ["data"]
    mesh = {**setup.mesh, first: 4, **dict.fromkeys(rest, 1)}
    return replace(setup, mesh=mesh, step=False, accumulate=1)


def decoding(setup: Setup) -> Setup:
    """Return the setup of a model that writes token by token: a loop, the cache along `seq`."""
    axes = {axis: size for axis, size in setup.mesh.items() if axis != "stage"}
    layout = {**setup.layout, "cached": "seq"}
    layout.pop("stage", None)
    changes = {"mesh": {**axes, "seq": 2}, "layout": layout, "blocks": "loop"}
    return replace(setup, **changes, step=False, accumulate=1)


def predictions(setup: Setup, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of a program for another mesh."""
    model = Words(restored(setup, weights))
    rows = setup.spec("batch length")
    plan = gspmd.plan(model, tokens, mesh=setup.on_mesh(), in_specs=(rows,), **setup.options)
    return plan.simulate(tokens, _poison=True)


def decoded(setup: Setup, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of the first tokens, NEW at a time."""
    model, tables = NextWords(restored(setup, weights)), caches(setup)
    calls = [(tokens[:, at : at + NEW], torch.tensor(at), tables) for at in (0, NEW)]
    specs = setup.spec("batch _"), None, None
    plan = gspmd.plan(model, *calls[0], mesh=setup.on_mesh(), in_specs=specs, **setup.options)
    return torch.cat([plan.simulate(*call, _poison=True) for call in calls], 1)


def eager_errors(setup: Setup, seed: int) -> dict[str, float]:
    """Return how far plain PyTorch with cast parameters is off, by name.

    Relative to norms of 1 and more, the worst of some samples: roundings of one are a matter of
    luck, and another order of sums has others. Weights of the samples differ by half a rounding.
    """
    tokens, errors, expected = batch(setup, seed), dict[str, float](), dict[str, Tensor]()
    for sample in range(SAMPLES):
        alone = build(replace(setup.plain(), options=setup.options if sample else {}))
        torch.manual_seed(sample)
        with torch.no_grad():
            for p in alone.parameters() if sample else ():
                p.mul_(1 + torch.finfo(setup.rounding).eps * (torch.rand_like(p) - 0.5))
        found = eager_results(setup, alone, tokens)
        expected = expected or found
        for name, value in expected.items():
            off = float((found[name] - value).double().norm()) / scale_of(value)
            errors[name] = max(off, errors.get(name, 0.0))
    return errors


def eager_results(
    setup: Setup, alone: nn.Module, tokens: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Return the results of plain PyTorch, and its logits."""
    for _ in range(2 if setup.step else 1):
        loss = in_dtype(alone, *tokens)
    logits = in_dtype(Words(alone.model if setup.step else alone), tokens[0]).detach()
    more = {"evaluation": logits, "decoding": logits[:, : 2 * NEW]}
    return results(setup, alone, loss) | more


def scale_of(value: Tensor) -> float:
    return max(1.0, float(value.double().norm()))


def in_dtype(model: nn.Module, *args: Tensor) -> Tensor:
    """Return the result of a model whose parameters are cast; a step casts them itself."""
    if isinstance(model, TrainStep):
        return model(*args)
    setup: Setup = (model.model if isinstance(model, Words) else model).setup
    dtype = setup.options.get("param_dtype", torch.float64)
    return functional_call(model, {n: p.to(dtype) for n, p in model.named_parameters()}, args)


def results(setup: Setup, alone: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the loss of plain PyTorch, gradients if it has none of its own, and its state."""
    found = {"loss": loss.detach()}
    if not setup.step:
        parameters = {n: p for n, p in alone.named_parameters() if p.requires_grad}
        found |= dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()])))
    return found | {f"state {name}": value for name, value in alone.state_dict().items()}


def run_difference(
    setup: Setup,
    plan: Plan,
    model: nn.Module,
    alone: nn.Module,
    tokens: tuple[Tensor, Tensor],
    seed: int = 0,
) -> str:
    """Compare a run of the plan, and what it leaves behind, with plain PyTorch."""
    expected = results(setup, alone, alone(*tokens))
    found = {}
    if setup.step:
        found["loss"] = plan.simulate(*tokens, _poison=True)
    else:
        found["loss"], gradients = plan.simulate(*tokens, _poison=True)
        found |= by_block(model, gradients)
    states = by_block(model.model if setup.step else model, model.state_dict())
    found |= {f"state {name}": value for name, value in states.items()}
    # Weights that an adapter holds still have no gradients.
    if found.keys() != expected.keys():
        return f"there are not both of {sorted(found.keys() ^ expected.keys())}"
    return first_difference(setup, found, expected, seed)


def first_difference(setup: Setup, found: dict, expected: dict[str, Tensor], seed: int = 0) -> str:
    """Return which tensor differs by more than roundings.

    Tensors of few digits are compared by their norms. They may be off by one rounding, or by
    TIMES of what eager PyTorch is in that dtype.
    """
    is_half = setup.rounding.itemsize < 4
    roundings = (1 if is_half else TERMS) * torch.finfo(setup.rounding).eps
    errors: dict[str, float] = {}
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return f"{name} is {tuple(found[name].shape)}, not {tuple(value.shape)}"
        difference = (found[name] - value).double()
        if is_half:
            off = float(difference.norm()) / scale_of(value)
        else:
            off = float(difference.abs().max()) / max(1.0, float(value.abs().max()))
        if off > roundings and is_half:
            errors = errors or eager_errors(setup, seed)
        if not off <= max(roundings, TIMES * errors.get(name, 0.0)):
            return f"{name} is off by {off:.1e} of its size"
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
