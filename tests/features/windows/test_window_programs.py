"""Convolutions, pools and what else reads windows, drawn from the product of all their options.

One to three dimensions x kernel 1 to 4 x padding 0 to 3, "same" and all modes x dilation 1, 2 x
stride 1 to 3 x transposed with output padding x groups x ceil_mode, count_include_pad, unpooling,
fold, unfold. Batch, channels, one and two dimensions of space are sharded over 2 to 6 devices,
unevenly too, with devices that have no row; padding is poisoned. Result and gradients of input,
weight and bias are those of one device, of whole programs as they are planned, and of each of their
operations with windows, sharded along these. Thousands more:

    TORCHGSPMD_SEEDS=4:204 python -m pytest tests/features/windows/test_window_programs.py -s
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import prover
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import Tensor, fx

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes.ir import call_of
from torchgspmd.fx_passes.pipeline import Pass, with_pass
from torchgspmd.fx_passes.stages import Stage
from torchgspmd.rules import rule_of
from torchgspmd.rules.notation import FactorRule

SEEDS = range(*map(int, os.environ.get("TORCHGSPMD_SEEDS", "0:4").split(":")))
PROGRAMS = 30  # of a seed
MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=2), Mesh(a=2, b=3))


class Case(NamedTuple):
    """A program of some tensors. text: its options."""

    text: str
    function: Callable[..., Any]
    tensors: list[Tensor]


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def each(rng: random.Random, n: int, *choices: int) -> list[int]:
    """Draw a number for each dimension, or one for all."""
    return [rng.choice(choices)] * n if rng.random() < 0.5 else [*rng.choices(choices, k=n)]


def sizes(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(1, (12, 8, 5)[n - 1]) for _ in range(n)]


def convolution(rng: random.Random, n: int) -> Case:
    kernel, stride, dilation = each(rng, n, 1, 2, 3, 4), each(rng, n, 1, 2, 3), each(rng, n, 1, 2)
    groups = rng.choice((1, 1, 2, 3))
    inner, outer = groups * rng.choice((1, 2, 3)), groups * rng.choice((1, 2))
    padding: Any = each(rng, n, 0, 1, 2, 3)
    mode = rng.choice(("zeros", "zeros", "zeros", "reflect", "replicate", "circular"))
    if mode == "zeros" and rng.random() < 0.2:
        padding, stride = "same", [1] * n
    kind = getattr(torch.nn, f"Conv{n}d")
    options = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    options |= dict(padding_mode=mode, bias=rng.random() < 0.5)
    return of_module(rng, kind(inner, outer, kernel, **options), inner, sizes(rng, n))


def transposed(rng: random.Random, n: int) -> Case:
    kernel, stride, dilation = each(rng, n, 1, 2, 3, 4), each(rng, n, 1, 2, 3), each(rng, n, 1, 2)
    groups = rng.choice((1, 1, 2, 3))
    inner, outer = groups * rng.choice((1, 2)), groups * rng.choice((1, 2, 3))
    more = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation)]
    options = dict(stride=stride, padding=each(rng, n, 0, 1, 2, 3), output_padding=more)
    options |= dict(groups=groups, dilation=dilation, bias=rng.random() < 0.5)
    kind = getattr(torch.nn, f"ConvTranspose{n}d")
    return of_module(rng, kind(inner, outer, kernel, **options), inner, sizes(rng, n))


def of_module(rng: random.Random, module: torch.nn.Module, channels: int, space: Any) -> Case:
    """In float32, PyTorch chooses the kernel by the sizes."""
    dtype = rng.choice((torch.float32, torch.float64))
    module, x = module.to(dtype), real(rng.randint(1, 5), channels, *space).to(dtype)
    names = [name for name, _ in module.named_parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    return Case(f"{module}", function, [x, *(p.detach() for p in module.parameters())])


def pool(rng: random.Random, n: int) -> Case:
    kernel = each(rng, n, 1, 2, 3, 4)
    padding = [rng.randint(0, k // 2) for k in kernel]
    stride = each(rng, n, 1, 2, 3)
    options: dict[str, Any] = dict(stride=stride, padding=padding, ceil_mode=rng.random() < 0.5)
    kinds = ["max", "avg"] + ["lp"] * (n < 3)
    kind = rng.choice(kinds)
    if kind == "max":
        options["dilation"] = each(rng, n, 1, 2)
    elif kind == "avg":
        options["count_include_pad"] = rng.random() < 0.5
        if n > 1 and rng.random() < 0.2:
            options["divisor_override"] = 3
    else:
        options = dict(norm_type=2.0, stride=stride, ceil_mode=options["ceil_mode"])
    if n == 1:  # their functions take one number
        kernel, options = kernel[0], {k: v[0] if type(v) is list else v for k, v in options.items()}
    options["kernel_size"] = kernel
    x = real(*leading(rng), *sizes(rng, n))
    return Case(f"{kind} {options}", lambda x: getattr(F, f"{kind}_pool{n}d")(x, **options), [x])


def adaptive(rng: random.Random, n: int) -> Case:
    kind, size = rng.choice(("max", "avg")), each(rng, n, 1, 2, 3, 4)
    function = getattr(F, f"adaptive_{kind}_pool{n}d")
    x = real(*leading(rng), *sizes(rng, n))
    return Case(f"adaptive {kind} {size}", lambda x: function(x, size if n > 1 else size[0]), [x])


def unpool(rng: random.Random, n: int) -> Case:
    kernel, x = each(rng, n, 2, 3), real(*leading(rng), *sizes(rng, n))

    def function(x: Tensor) -> Tensor:
        options = (kernel if n > 1 else kernel[0],) * 2
        y, index = getattr(F, f"max_pool{n}d")(x, *options, return_indices=True)
        return getattr(F, f"max_unpool{n}d")(y, index, *options, output_size=x.shape)

    return Case(f"unpool {kernel}", function, [x])


def patches(rng: random.Random, n: int) -> Case:
    n, kernel = 2, each(rng, 2, 1, 2, 3, 4)
    options = dict(
        dilation=each(rng, n, 1, 2), padding=each(rng, n, 0, 1, 2, 3), stride=each(rng, n, 1, 2, 3)
    )
    x, both = real(rng.randint(1, 3), rng.randint(1, 3), *sizes(rng, n)), rng.random() < 0.6

    def function(x: Tensor) -> Tensor:
        columns = F.unfold(x, kernel, **options).sin()
        return F.fold(columns, x.shape[2:], kernel, **options) if both else columns

    return Case(f"{'fold' if both else 'unfold'} {kernel} {options}", function, [x])


def leading(rng: random.Random) -> list[int]:
    return [rng.randint(1, 5), rng.randint(1, 4)] if rng.random() < 0.9 else [rng.randint(1, 4)]


KINDS = (convolution, convolution, convolution, transposed, transposed, pool, pool, pool)
KINDS += (adaptive, unpool, patches)


def differentiated(case: Case) -> Callable[..., tuple]:
    def function(*tensors: Tensor) -> tuple:
        inputs = [t.clone().requires_grad_() for t in tensors]
        y = case.function(*inputs)
        return y, *torch.autograd.grad(y.sin().sum(), inputs)

    return function


def draw_spec(rng: random.Random, shape: Any, mesh: Mesh) -> str | None:
    """Draw a layout: nothing, or each axis on a dimension, one of space more often."""
    if rng.random() < 0.25 or not shape:
        return None
    words: list[list[str]] = [[] for _ in shape]
    for axis in rng.sample(mesh.names, len(mesh.names)):
        if rng.random() < 0.85:
            first = 2 if len(shape) > 2 and rng.random() < 0.7 else 0
            words[rng.randrange(first, len(shape))].append(axis)
    return " ".join("+".join(w) or "_" for w in words)


def draw(rng: random.Random) -> tuple[Case, tuple]:
    """Draw a program that one device runs, and its results there."""
    while True:
        torch.manual_seed(rng.randrange(2**31))
        case = rng.choice(KINDS)(rng, rng.choice((1, 2, 2, 3)))
        try:
            y = case.function(*case.tensors)
        except (RuntimeError, ValueError):  # PyTorch has no such program: its result is empty
            continue
        # The gradient of a maximum of no rows is written out of bounds, by PyTorch.
        if y.numel() and y.isfinite().all():
            return case, differentiated(case)(*case.tensors)


def check(rng: random.Random, counts: Counter) -> None:
    case, want = draw(rng)
    mesh = rng.choice(MESHES)
    inputs, results = ([draw_spec(rng, t.shape, mesh) for t in ts] for ts in (case.tensors, want))
    if rng.random() < 0.7 and want[0].dim() == want[1].dim():  # so that windows are the cheapest
        inputs[0] = results[0] = results[1]
    text = f"{case.text} of {[list(t.shape) for t in case.tensors]} on {mesh}: {inputs} {results}"
    options = dict(mesh=mesh, in_specs=tuple(inputs), out_specs=tuple(results))
    calls: list[tuple] = []
    record = Pass(
        "record",
        lambda program: calls.extend(calls_with_windows(program.graph, case.tensors)),
        Stage.EXPANDED,
        Stage.EXPANDED,
    )
    try:
        with with_pass(record, after="decompose_ops"):
            plan = gspmd.plan(differentiated(case), *case.tensors, **options)
        got = plan.simulate(*case.tensors, _poison=True)
    except Exception as error:
        raise AssertionError(text) from error
    assert_same(list(got), list(want), text, terms=1024)
    counts["programs"] += 1
    counts["with windows"] += any(
        node.meta["spec"].windows for node in plan.sharded.nodes if "spec" in node.meta
    )
    for call in calls:
        check_operation(rng, *call, text)
        counts["operations"] += 1


def calls_with_windows(graph: fx.Graph, tensors: list[Tensor]) -> list[tuple]:
    """Run a graph; return the calls that read windows, and which factors they have."""
    calls = []

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            rule = rule_of(call_of(n)) if isinstance(n.target, torch._ops.OpOverload) else None
            if rule is not None and rule.windowed:
                calls.append((n.target, *self.fetch_args_kwargs_from_env(n), rule))
            return super().run_node(n)

    Recorder(fx.GraphModule(torch.nn.Module(), graph)).run(*tensors)
    return calls


def check_operation(
    rng: random.Random, op: Any, args: tuple, kwargs: dict, rule: FactorRule, text: str
) -> None:
    """Shard one operation along its windows, whatever a plan would choose."""
    mesh, assignment = rng.choice(MESHES), {}
    windowed = sorted(rule.windowed)
    free = sorted(set(rule.sizes) - rule.replicated)
    if rng.random() < 0.2:
        assignment[rng.choice(windowed)] = mesh.names
    else:
        for axis in mesh.names:
            assignment.setdefault(rng.choice(windowed if rng.random() < 0.8 else free), (axis,))
    try:
        prover.check(op, args, kwargs, assignment, mesh)
    except Exception as error:
        raise AssertionError(f"{op} of {text}: {assignment} on {mesh}") from error


@pytest.mark.parametrize("kernel, padding, dilation", [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1)])
@pytest.mark.parametrize("spec", ["_ _ a _", "_ _ _ a"])
def test_padding_that_is_wider_than_the_window(kernel, padding, dilation, spec):
    options = dict(padding=padding, dilation=dilation)
    tensors = [real(4, 4, 5, 5), real(3, 4, kernel, kernel)]
    step = differentiated(Case("", lambda x, w: F.conv2d(x, w, **options), tensors))
    outs = (spec, spec, None)
    plan = gspmd.plan(step, *tensors, mesh=Mesh(a=2), in_specs=(spec, None), out_specs=outs)
    assert_same(plan.simulate(*tensors, _poison=True), step(*tensors))
    assert "all_gather" not in {c.kind for c in plan.collectives}


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_of_any_options_and_layouts(seed):
    rng, counts = random.Random(seed), Counter()
    for _ in range(PROGRAMS):
        check(rng, counts)
    assert counts["with windows"]
    print(f"seed {seed}: {dict(counts)}")
