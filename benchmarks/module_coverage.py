"""PyTorch's own modules under random layouts, against one device.

    python benchmarks/module_coverage.py
        all modules of torch.nn, 8 samples each, half of them in training
    python benchmarks/module_coverage.py --only LSTM --only nn.MultiheadAttention --json rows.json

Every sample of PyTorch's module database runs forward and backward through plan(...).simulate on a
random mesh, in float64, with random marks on parameters and arguments, even and uneven, padding
poisoned with NaN. Results, gradients and buffers are compared with PyTorch's. Prints what is not
right.
"""

from __future__ import annotations

import copy
import random
import zlib
from functools import partial

import torch
from coverage import MESHES, Found, differs, failure, measure, options, random_spec, tried
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

import torchgspmd as gspmd

EXACT = 1e-9  # relative; float64


def tensors(tree) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


class Case:
    """One sample: a module and its arguments."""

    def __init__(self, info: ModuleInfo, sample, training: bool):
        torch.manual_seed(0)
        constructor, call = sample.constructor_input, sample.forward_input
        self.module = (
            info.module_cls(*constructor.args, **constructor.kwargs).double().train(training)
        )
        self.args, self.kwargs = call.args, dict(call.kwargs)

    def fresh(self) -> tuple[nn.Module, tuple, dict]:
        return copy.deepcopy((self.module, self.args, self.kwargs))

    def run(self, backward: bool) -> list[Tensor]:
        """Results, gradients by order of the parameters, buffers."""
        module, args, kwargs = self.fresh()
        outs = tensors(module(*args, **kwargs))
        used, wanted = [t for t in outs if t.requires_grad], list(module.parameters())
        grads = (
            torch.autograd.grad(sum(t.sum() for t in used), wanted, allow_unused=True)
            if backward
            else []
        )
        return [*outs, *(g for g in grads if g is not None), *module.buffers()]

    def differentiable(self) -> bool:
        module, args, kwargs = self.fresh()
        return any(t.requires_grad for t in tensors(module(*args, **kwargs))) and any(
            True for _ in module.parameters()
        )


def attempt(case: Case, rng: random.Random, backward: bool) -> dict:
    """Plans and runs one sample: {} or why it failed, and what the plan replicated."""
    mesh = gspmd.Mesh(**rng.choice(MESHES))
    module, args, kwargs = case.fresh()
    marks = {
        name: random_spec(rng, p.shape, mesh.names)
        for name, p in module.named_parameters()
        if rng.random() < 0.7
    }
    specs = tuple(
        random_spec(rng, a.shape, mesh.names) if isinstance(a, Tensor) else None for a in args
    )
    row: dict = {"mesh": str(mesh), "specs": (*specs, marks), "backward": backward}
    try:
        want = case.run(backward)
        gspmd.annotate(module, mesh, marks)
        plan = gspmd.plan(module, *args, mesh=mesh, in_specs=specs, grad=backward, **kwargs)
        tried(row, plan, [*(s for s in specs if s), *marks.values()])
        got = plan.simulate(*args, _poison=True, **kwargs)
        outs, grads = got if backward else (got, {})
        grads = [grads[name] for name, _ in module.named_parameters() if name in grads]
        if why := differs([*tensors(outs), *grads, *module.buffers()], want, EXACT):
            row["wrong"] = why
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        row["raises"] = failure(error)
    return row


def run_module(samples: int, seed: int, name: str) -> dict:
    """The row of one module: half of its samples in training."""
    info, found = MODULES[name], Found(name)
    for training in (True, False):
        made = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=training
        )
        for index, sample in enumerate(made[: samples // 2]):
            rng = random.Random(zlib.crc32(f"{name} {index} {training} {seed}".encode()))
            try:
                case = Case(info, sample, training)
                if differs(case.run(False), case.run(False)):
                    found.row["skipped"] = "random"
                    continue
                backward = case.differentiable()
            except Exception:  # noqa: BLE001 (one device cannot run it either)
                continue
            found.add(
                index, attempt(case, rng, backward), backward, partial(attempt, case, rng, False)
            )
    return found.row


MODULES = {info.name: info for info in module_db}


if __name__ == "__main__":
    given = options(__doc__, "a module")
    measure("modules", list(MODULES), partial(run_module, given.samples, given.seed), given)
