"""PyTorch's own operator samples under random layouts, against one device.

    python benchmarks/op_coverage.py
        all float32 operations that are deterministic, 8 samples each
    python benchmarks/op_coverage.py --only cumsum --only nn.functional.conv2d --json rows.json
    python benchmarks/op_coverage.py --dtype complex64      those that take complex numbers

Every sample runs forward and backward through plan(...).simulate on a random mesh (one and two
axes) with random layouts, even and uneven, padding poisoned with NaN; results and gradients are
compared with PyTorch's. Prints what is not right.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import partial

import torch
from coverage import MESHES, Found, differs, failure, measure, options, random_spec, tried
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torchgspmd as gspmd

SIZED_BY_VALUES = {
    "masked_select",
    "combinations",
}  # a cotangent of their results has no size beforehand
UNINITIALIZED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


def full_name(op) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


class Case:
    """One sample as a function of its tensors; with gradients, also of its cotangents."""

    def __init__(self, op, sample):
        leaves, self.tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.op, self.leaves = op, leaves
        self.slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[i].detach() for i in self.slots]
        self.grads = [leaves[i].requires_grad for i in self.slots]
        self.cotangents: list[Tensor] = []

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        leaves = list(self.leaves)
        for i, t in zip(self.slots, tensors):
            leaves[i] = t
        first, args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return [
            t for t in pytree.tree_leaves(self.op(first, *args, **kwargs)) if isinstance(t, Tensor)
        ]

    def joint(self, *tensors: Tensor) -> list[Tensor]:
        inputs = [t.clone().requires_grad_() if g else t for t, g in zip(tensors, self.grads)]
        outs = self.forward(*inputs)
        wanted = [t for t, g in zip(inputs, self.grads) if g]
        used = [o for o in outs if o.requires_grad]
        cotangents = (
            list(map(torch.ones_like, used))
            if self.op.name in SIZED_BY_VALUES
            else list(tensors[len(self.slots) :])
        )
        grads = torch.autograd.grad(used, wanted, cotangents, allow_unused=True)
        return [*outs, *(g for g in grads if g is not None)]

    def prepare(self) -> bool:
        """Draws cotangents; whether there is anything to differentiate."""
        inputs = [
            t.clone().requires_grad_() if g else t.clone() for t, g in zip(self.tensors, self.grads)
        ]
        used = [o for o in self.forward(*inputs) if o.requires_grad]
        self.cotangents = (
            [] if self.op.name in SIZED_BY_VALUES else [torch.randn_like(o) for o in used]
        )
        return bool(used)


def attempt(
    case: Case, rng: random.Random, backward: bool, meshes: Sequence[dict] = MESHES
) -> dict:
    """Plans and runs one sample: {} or why it failed, and what the plan replicated."""
    mesh = gspmd.Mesh(**rng.choice(meshes))
    fn = case.joint if backward else case.forward
    args = [*case.tensors, *(case.cotangents if backward else ())]
    specs = tuple(random_spec(rng, t.shape, mesh.names) for t in args)
    row: dict = {"mesh": str(mesh), "specs": specs, "backward": backward}
    try:
        want = fn(*(t.clone() for t in args))
        plan = gspmd.plan(fn, *args, mesh=mesh, in_specs=specs)
        tried(row, plan, specs)
        got = plan.simulate(*(t.clone() for t in args), _poison=True)
        why = differs(got, want)
        if why:
            row["wrong"] = why
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        row["raises"] = failure(error)
    return row


def is_random(case: Case) -> bool:
    first, second = (case.forward(*(t.clone() for t in case.tensors)) for _ in range(2))
    return differs(second, first) is not None


def run_op(samples: int, seed: int, dtype: torch.dtype, name: str) -> dict:
    """The row of one operation."""
    op, found = OPS[name], Found(name)
    torch.manual_seed(seed)
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        if found.row["samples"] == samples:
            break
        rng = random.Random(zlib.crc32(f"{name} {index} {seed}".encode()))
        try:
            case = Case(op, sample)
            if is_random(case):
                found.row["skipped"] = "random"
                continue
            backward = differentiable and case.prepare()
            if backward:
                case.joint(*(t.clone() for t in (*case.tensors, *case.cotangents)))
        except Exception:  # noqa: BLE001 (one device cannot run it either)
            continue
        found.add(index, attempt(case, rng, backward), backward, partial(attempt, case, rng, False))
    return found.row


OPS = {full_name(op): op for op in op_db if op.name not in UNINITIALIZED}


if __name__ == "__main__":
    given = options(__doc__, "an operation", dtype="float32")
    dtype = getattr(torch, given.dtype)
    names = [name for name, op in OPS.items() if dtype in op.supported_dtypes("cpu")]
    measure("operations", names, partial(run_op, given.samples, given.seed, dtype), given)
