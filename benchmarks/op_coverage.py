"""PyTorch's own operator samples under random layouts, against one device.

    python benchmarks/op_coverage.py                        all float32 operations that are deterministic, 8 samples each
    python benchmarks/op_coverage.py --only cumsum --only nn.functional.conv2d --json rows.json

Every sample runs forward and backward through plan(...).simulate on a random mesh (one and two axes) with random layouts,
even and uneven, padding poisoned with NaN; results and gradients are compared with PyTorch's. Prints what is not right.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
import warnings
import zlib
from multiprocessing.connection import wait

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torchgspmd as gspmd

MESHES = (dict(a=2), dict(a=3), dict(a=4), dict(a=2, b=2), dict(a=2, b=3))
SIZED_BY_VALUES = {"masked_select", "combinations"}                        # a cotangent of their results has no size beforehand
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def full_name(op) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def random_spec(rng: random.Random, shape, names) -> str:
    """Every axis on a random dimension or on none; an axis may meet another one there."""
    words: list[list[str]] = [[] for _ in shape]
    for name in rng.sample(names, len(names)):
        if shape and rng.random() < 0.75:
            words[rng.randrange(len(shape))].append(name)
    return " ".join("+".join(w) or "_" for w in words)


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
        return [t for t in pytree.tree_leaves(self.op(first, *args, **kwargs)) if isinstance(t, Tensor)]

    def joint(self, *tensors: Tensor) -> list[Tensor]:
        inputs = [t.clone().requires_grad_() if g else t for t, g in zip(tensors, self.grads)]
        outs = self.forward(*inputs)
        wanted = [t for t, g in zip(inputs, self.grads) if g]
        used = [o for o in outs if o.requires_grad]
        cotangents = list(map(torch.ones_like, used)) if self.op.name in SIZED_BY_VALUES else list(tensors[len(self.slots):])
        grads = torch.autograd.grad(used, wanted, cotangents, allow_unused=True)
        return [*outs, *(g for g in grads if g is not None)]

    def prepare(self) -> bool:
        """Draws cotangents; whether there is anything to differentiate."""
        inputs = [t.clone().requires_grad_() if g else t.clone() for t, g in zip(self.tensors, self.grads)]
        used = [o for o in self.forward(*inputs) if o.requires_grad]
        self.cotangents = [] if self.op.name in SIZED_BY_VALUES else [torch.randn_like(o) for o in used]
        return bool(used)


def differs(got: list[Tensor], want: list[Tensor]) -> str | None:
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for i, (g, w) in enumerate(zip(got, want)):
        g, w = g.detach().resolve_conj().resolve_neg(), w.detach().resolve_conj().resolve_neg()
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"result {i} is {g.dtype}{list(g.shape)}, not {w.dtype}{list(w.shape)}"
        finite = w[w.isfinite()].abs() if w.numel() else w
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        if not torch.allclose(g, w, rtol=1e-4, atol=2e-5 * scale, equal_nan=True):
            error = (g - w).abs().nan_to_num(9e9).max() if w.is_floating_point() else (g != w).float().mean()
            return f"result {i} is off by {float(error):.1e}"
    return None


def attempt(case: Case, rng: random.Random, backward: bool) -> dict:
    """Plans and runs one sample: {} or why it failed, and what the plan replicated."""
    mesh = gspmd.Mesh(**rng.choice(MESHES))
    fn = case.joint if backward else case.forward
    args = [*case.tensors, *(case.cotangents if backward else ())]
    specs = tuple(random_spec(rng, t.shape, mesh.names) for t in args)
    row: dict = {"mesh": str(mesh), "specs": specs, "backward": backward}
    try:
        want = fn(*(t.clone() for t in args))
        plan = gspmd.plan(fn, *args, mesh=mesh, in_specs=specs)
        row["random"] = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in plan.sharded.nodes)
        row["replicated"] = sorted({r.op for r in plan.replicated_ops if "is gathered over" not in r.why})
        row["sharded"] = any(any(w not in "_" for w in s.split()) for s in specs)
        row["partitioned"] = any(n.meta.get("assignment") for n in plan.sharded.nodes)
        got = plan.simulate(*(t.clone() for t in args), _poison=True)
        why = differs(got, want)
        if why:
            row["wrong"] = why
    except Exception as error:                                              # noqa: BLE001 (whatever it is, it is a row)
        row["raises"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
    return row


def is_random(case: Case) -> bool:
    first, second = (case.forward(*(t.clone() for t in case.tensors)) for _ in range(2))
    return differs(second, first) is not None


def run_op(op, samples: int, seed: int) -> dict:
    """All samples of one operation: rows of those that failed, and counts."""
    name = full_name(op)
    found = {"op": name, "samples": 0, "forward": 0, "both": 0, "failures": [], "replicated": [], "partitioned": 0, "sharded": 0}
    torch.manual_seed(seed)
    differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    for index, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=differentiable)):
        if found["samples"] == samples:
            break
        rng = random.Random(zlib.crc32(f"{name} {index} {seed}".encode()))
        try:
            case = Case(op, sample)
            if is_random(case):
                found["skipped"] = "random"
                continue
            backward = differentiable and case.prepare()
            if backward:
                case.joint(*(t.clone() for t in (*case.tensors, *case.cotangents)))
        except Exception:                                                   # noqa: BLE001 (one device cannot run it either)
            continue
        row = attempt(case, rng, backward)
        if row.get("random"):                                               # it sets the seed itself, so is_random did not see it
            found["skipped"] = "random"
            continue
        found["samples"] += 1
        failed = "wrong" in row or "raises" in row
        forward = not failed or backward and not {"wrong", "raises"} & set(attempt(case, rng, False))
        found["both"] += not failed
        found["forward"] += forward
        found["sharded"] += row.get("sharded", False)
        found["partitioned"] += row.get("sharded", False) and row.get("partitioned", False) and not row.get("replicated")
        found["replicated"] = sorted({*found["replicated"], *row.get("replicated", ())})
        if failed:
            found["failures"].append({"sample": index, **row})
    return found


def worker(connection, samples: int, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ops = {full_name(op): op for op in op_db}
    while (name := connection.recv()) is not None:
        try:
            connection.send(run_op(ops[name], samples, seed))
        except Exception as error:                                          # noqa: BLE001
            connection.send({"op": name, "samples": 0, "forward": 0, "both": 0, "skipped": f"{type(error).__name__}: {error}"[:200]})


class Pool:
    """Processes that work on one operation each, replaced where one crashes or takes too long."""

    def __init__(self, jobs: int, samples: int, seed: int, seconds: float):
        self.jobs, self.options, self.seconds = jobs, (samples, seed), seconds

    def start(self):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=worker, args=(theirs, *self.options), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def run(self, names: list[str]):
        """Yields the result of every operation."""
        todo, busy = list(reversed(names)), {}
        idle = [self.start() for _ in range(self.jobs)]
        while todo or busy:
            while todo and idle:
                connection, process = idle.pop()
                name = todo.pop()
                connection.send(name)
                busy[connection] = process, name, time.monotonic() + self.seconds
            for connection in wait(list(busy), timeout=1):
                process, name, _ = busy.pop(connection)
                try:
                    yield connection.recv()
                    idle.append((connection, process))
                except EOFError:
                    yield self.lost(name, "crashed")
                    idle.append(self.start())
            for connection, (process, name, end) in list(busy.items()):
                if time.monotonic() > end:
                    busy.pop(connection)
                    process.kill()
                    yield self.lost(name, f"took more than {self.seconds:.0f} s")
                    idle.append(self.start())
        for connection, _ in idle:
            connection.send(None)

    @staticmethod
    def lost(name: str, why: str) -> dict:
        return {"op": name, "samples": 1, "forward": 0, "both": 0, "sharded": 0, "partitioned": 0, "replicated": [],
                "failures": [{"raises": why}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", help="name of an operation; may be repeated")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120, help="limit for one operation")
    parser.add_argument("--json", help="file to write all rows to")
    options = parser.parse_args()
    names = [full_name(op) for op in op_db if torch.float32 in op.supported_dtypes("cpu") and op.name not in UNINITIALIZED]
    if options.only:
        names = [n for n in names if n in options.only or n.split(".")[-1] in options.only]
    rows, start = [], time.monotonic()
    for row in Pool(options.jobs, options.samples, options.seed, options.seconds).run(names):
        rows.append(row)
        for failure in row.get("failures", ())[:2]:
            why = failure.get("wrong") or failure["raises"]
            print(f"{row['op']}: {why}  [{failure.get('mesh')} {failure.get('specs')}]", flush=True)
    tested = [r for r in rows if r["samples"]]
    summary = {"operations": len(tested), "skipped": sorted(r["op"] for r in rows if not r["samples"]),
               "forward_right": sum(r["forward"] == r["samples"] for r in tested),
               "both_right": sum(r["both"] == r["samples"] for r in tested),
               "silently_wrong": sorted(r["op"] for r in tested if any("wrong" in f for f in r["failures"])),
               "raising": sorted(r["op"] for r in tested if any("raises" in f for f in r["failures"])),
               "nothing_replicated": sum(not r["replicated"] for r in tested),
               "partitioned": sum(r["partitioned"] > 0 for r in tested), "seconds": round(time.monotonic() - start)}
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"summary": summary, "rows": sorted(rows, key=lambda r: r["op"])}, file, indent=1)
    print(f"{summary['operations']} operations ({len(summary['skipped'])} left out: random, or without samples) in {summary['seconds']} s: "
          f"{summary['forward_right']} right in the forward, {summary['both_right']} in both; "
          f"{len(summary['silently_wrong'])} silently wrong, "
          f"{len(summary['raising'])} raise; {summary['partitioned']} ran partitioned, {summary['nothing_replicated']} replicate nothing")


if __name__ == "__main__":
    main()
