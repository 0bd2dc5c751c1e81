"""Model classes of other libraries by their own configurations, under random layouts, against one
device.

    python benchmarks/every_model.py --library transformers --part 0/10 --json rows.json
        every tenth model class of transformers; rows that rows.json has already are not run again
    python benchmarks/every_model.py --library timm --only resnet18
    python benchmarks/every_model.py --sample 300 --seed 7 --json rows.json
        300 classes of all libraries by chance, in an order of which each beginning is a sample
    python benchmarks/every_model.py --layout suggest --processes --only LlamaModel
        the first proposal for 8 devices; three AdamW steps on as many processes
    python benchmarks/every_model.py --beside    bytes of a data and a tensor layout as well
    python benchmarks/every_model.py --build-only    what one device can run, quickly
    python benchmarks/every_model.py --table rows.json
        the counts of a file, and each class that is not right

A configuration is made small by one function for each library: two layers of each kind, narrow,
four heads. Every parameter is marked at random on Mesh(data=2, model=2). Results and gradients of
plan(...).simulate are compared with eager PyTorch, in float64 if the model computes in it, padding
poisoned with NaN. A row is right, refused (a ShardingError), an error, wrong, or not built: one
device cannot run it either, for the reason given.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from coverage import Pool, differs, failure
from model_layouts import (
    Layout,
    on_processes,
    plain_layouts,
    proposed_layout,
    random_layout,
    sent_bytes,
    train,
)
from narrow_models import LARGEST
from small_diffusers import diffusers_model, diffusers_names
from small_layers import (
    segmentation_model,
    segmentation_names,
    torch_geometric_model,
    torch_geometric_names,
)
from small_models import (
    Built,
    timm_model,
    timm_names,
    without_broken_packages,
    x_transformers_model,
    x_transformers_names,
)
from small_operators import (
    e3nn_model,
    e3nn_names,
    neuralop_model,
    neuralop_names,
    torchrec_model,
    torchrec_names,
)
from small_torchvision import torchvision_model, torchvision_names
from small_transformers import transformers_model, transformers_names
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd.capture.state.object_trees import opened
from torchgspmd.errors import ShardingError

EXACT, SINGLE = 1e-8, 1e-4  # relative, of float64 and float32: some hundred operations deep
LARGE = 1e6  # results from which on a weighted sum leaves them out
COARSE = 1e-2  # of results in float32 beside float64

LIBRARIES: dict[str, tuple[Callable[[], list[str]], Callable[[str], Built]]] = {
    "transformers": (transformers_names, transformers_model),
    "timm": (timm_names, timm_model),
    "torchvision": (torchvision_names, torchvision_model),
    "diffusers": (diffusers_names, diffusers_model),
    "x_transformers": (x_transformers_names, x_transformers_model),
    "torch_geometric": (torch_geometric_names, torch_geometric_model),
    "segmentation": (segmentation_names, segmentation_model),
    "neuralop": (neuralop_names, neuralop_model),
    "e3nn": (e3nn_names, e3nn_model),
    "torchrec": (torchrec_names, torchrec_model),
}

# ------------------------------------------------------------------------------------- comparisons


def tensors(tree) -> list[Tensor]:
    """Tensors of a result, those in caches too."""
    return [t for t in pytree.tree_leaves(opened(tree)) if isinstance(t, Tensor)]


def weighted(model: nn.Module, args: tuple, result: Any) -> tuple[Any, Tensor]:
    """A forward hook: the result, and a sum whose gradients are more than rounding.

    The plain sum of a softmax or a layer norm is a constant, along any dimension.
    """
    total = torch.zeros(())
    for t in tensors(result):
        if t.requires_grad and t.dim():
            places = torch.arange(t.numel(), dtype=t.real.dtype).view(t.shape)
            finite = torch.where(t.abs() < LARGE, t, 0)  # a mask's lowest number would overflow
            total = total + (finite * torch.cos(places)).sum()
    return result, total


class ReadsSingle(TorchDispatchMode):
    """Notes whether a model computes anything in float32 or less."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.dtype in (torch.float32, torch.bfloat16, torch.float16):
                self.found = self.found or t.numel() > 1
        return out


def doubled(tree):
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, tree)


def eager(model: nn.Module, kwargs: dict) -> tuple[list[Tensor], list[Tensor | None]]:
    outs = tensors(model(**kwargs))
    used = [t for t in outs if t.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if not used:
        return outs, []
    return outs, list(torch.autograd.grad(sum(t.sum() for t in used), wanted, allow_unused=True))


def rounding(model: nn.Module, kwargs: dict, want: tuple[list, list]) -> float:
    """Return how far results and gradients move if the weights move by float32's rounding."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + torch.finfo(torch.float32).eps * torch.randn_like(p))
    moved = 0.0
    for got, known in zip(eager(other, kwargs), want):
        pairs = [(g, w) for g, w in zip(got, known) if w is not None and w.is_floating_point()]
        if any(g is not None and g.shape != w.shape for g, w in pairs):
            raise RuntimeError("random: rounding decides on the sizes of results")
        finite = [w[w.isfinite()].abs() for _, w in pairs]
        scale = max((float(w.max()) for w in finite if w.numel()), default=1.0)
        # inf - inf is no change
        changes = (float((g - w).nan_to_num(0, 0, 0).abs().max()) for g, w in pairs if g.numel())
        moved = max(moved, max(changes, default=0.0) / max(scale, 1e-30))
    return moved


class Subject(NamedTuple):
    """A model, a call, its results and gradients on one device, and a relative tolerance."""

    model: nn.Module
    kwargs: dict[str, Any]
    want: tuple[list[Tensor], list[Tensor | None]]
    exact: float


def subject(model: nn.Module, kwargs: dict[str, Any]) -> Subject:
    """Run a model on one device, in float64 if it computes in it."""
    model.register_forward_hook(weighted)
    try:
        double = copy.deepcopy(model).double()
        with torch.no_grad():
            double(**doubled(kwargs))  # a first call may cast weights, as a router's to float32
        with ReadsSingle() as single:
            want = eager(copy.deepcopy(double), doubled(kwargs))
        if differs(doubled(eager(copy.deepcopy(model), kwargs)[0]), doubled(want[0]), COARSE):
            raise RuntimeError("PyTorch's kernels for float32 and float64 disagree")
        model, kwargs, exact = double, doubled(kwargs), SINGLE if single.found else EXACT
    except Exception:  # noqa: BLE001 (a model that computes in float32 somewhere)
        want, exact = eager(copy.deepcopy(model), kwargs), SINGLE
    again = eager(copy.deepcopy(model), kwargs)
    if differs(again[0], want[0], exact):
        raise RuntimeError("random: two runs differ")
    if not any(t.isfinite().any() for t in want[0] if t.is_floating_point()):
        raise RuntimeError("no result is finite: nothing could differ")
    if exact == SINGLE:
        exact = max(exact, 4 * rounding(model, kwargs, want))
    return Subject(model, kwargs, want, exact)


def compared(one: Subject, layout: Layout, row: dict[str, Any]) -> str | None:
    """Plan and simulate; fill the row's costs. Return how results or gradients differ, if so."""
    model, kwargs, want, exact = one
    grad = bool(want[1])
    gspmd.annotate(model, layout.mesh, layout.marks)
    start = time.process_time()
    with patch("time.perf_counter", time.process_time):  # a plan's seconds are CPU seconds
        plan = gspmd.plan(model, mesh=layout.mesh, in_specs=layout.in_specs, grad=grad, **kwargs)
    row["planning"] = round(time.process_time() - start, 2)
    row["capture"] = round(plan.seconds["capture"], 2)
    row["sent"] = plan.sent_bytes
    row["replicated"] = sorted({r.op for r in plan.replicated_ops if r.why.startswith("no rule")})
    got = plan.simulate(_poison=True, **kwargs)
    outs, grads = got if grad else (got, {})
    named = [n for n, p in model.named_parameters() if p.requires_grad]
    why = difference(tensors(outs), [grads.get(n) for n in named], want, exact, named)
    # A copy's lambda may keep the first model, as x-transformers' with tied embeddings.
    return why and difference(
        tensors(outs), [grads.get(n) for n in named], eager(model, kwargs), exact, named
    )


def difference(
    outs: list[Tensor], grads: list[Tensor | None], want: tuple, exact: float, names: list[str]
) -> str | None:
    """Return how results or gradients differ from those of eager PyTorch, if so."""
    pairs = [(n, g, w) for n, g, w in zip(names, grads, want[1]) if w is not None]
    if missing := [n for n, g, _ in pairs if g is None]:
        return f"no gradient of {missing[:3]}"
    largest = max((float(w.abs().max()) for _, _, w in pairs if w.numel()), default=0.0) or 1.0
    return differs(outs, want[0], exact) or differs(  # a gradient may be but rounding
        [g / largest for _, g, _ in pairs], [w / largest for _, _, w in pairs], exact
    )


def run_model(given: argparse.Namespace, op: str) -> dict[str, Any]:
    """The row of one model class; op: library:class."""
    row: dict[str, Any] = {"op": op, "samples": 1}
    library, name = op.split(":")
    torch.manual_seed(0)
    try:
        model, kwargs = LIBRARIES[library][1](name)
        model.train("targets" in kwargs)  # detectors get them in training alone
        row["parameters"] = sum(p.numel() for p in model.parameters())
        if row["parameters"] > LARGEST:
            raise MemoryError(f"{row['parameters']:,} parameters: not small")
        if given.build_only:
            return {**row, "what": "built"}
        one = subject(model, kwargs)
        if given.processes and not any(p.requires_grad for p in model.parameters()):
            raise ValueError("it has no parameters to train")
    except Exception as error:  # noqa: BLE001 (one device cannot run it)
        return {**row, "what": "not built", "why": failure(error)}
    row["double"] = one.exact == EXACT
    try:
        if given.layout == "suggest":
            layout = proposed_layout(copy.deepcopy(one.model), one.kwargs, given.search)
            row |= {"mesh": str(layout.mesh), "marks": layout.marks}
        else:
            layout = random_layout(one.model, name, given.seed)
        if given.beside:
            for kind, plain in plain_layouts(one.model).items():
                row[kind] = sent_bytes(one.model, one.kwargs, plain, bool(one.want[1]))
        if given.processes:
            training = partial(train, one.model, one.kwargs, layout, one.exact)
            return row | on_processes(layout.mesh.size, int(given.seconds), training)
        why = compared(one, layout, row)
    except ShardingError as error:
        return row | {"what": "refused", "why": str(error).strip()[:600]}
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        return {**row, "what": "error", "why": failure(error)}
    return {**row, "what": "wrong" if why else "right", "why": why or ""}


def table(rows: list[dict]) -> Iterator[str]:
    """Yield the counts of each library, and each class that is not right."""
    for library in LIBRARIES:
        own = [r for r in rows if r["op"].startswith(f"{library}:")]
        counts = Counter(r.get("what", "error") for r in own)
        if own:
            built = len(own) - counts["not built"]
            others = (f", {n} {what}" for what, n in sorted(counts.items()) if what != "right")
            yield f"{library}: {counts['right']} of {built} right{''.join(others)}"
    yield from distributions(rows)
    order = ["wrong", "error", "refused", "not built", "built"]
    for row in sorted(rows, key=lambda r: (order + ["right"]).index(r.get("what", "error"))):
        if row.get("what") not in ("right", "built"):
            why = row.get("why") or str(row.get("failures", ""))
            yield f"{row.get('what', 'error'):10s}{row['op']}: {why.splitlines()[0] if why else ''}"


def distributions(rows: list[dict]) -> Iterator[str]:
    """Yield how planning's CPU seconds and bytes are distributed over the models that ran."""
    ratios = {
        "CPU of planning, after the capture, over the capture": [
            (r["planning"] - r["capture"]) / r["capture"] for r in rows if r.get("capture")
        ],
        "bytes over the best of a data and a tensor layout": [
            r["sent"] / min(plain)
            for r in rows
            if "sent" in r and (plain := [r[k] for k in ("data", "tensor") if r.get(k)])
        ],
    }
    for name, values in ratios.items():
        if len(values) > 1:
            cuts = statistics.quantiles(values, n=20, method="inclusive")
            few = sum(v <= 3 for v in values) / len(values)
            yield (
                f"{name}: median {cuts[9]:.1f}, 95 % at most {cuts[18]:.1f}, {few:.0%} at most 3, "
                f"of {len(values)}"
            )
    kinds = Counter(op for r in rows for op in r.get("replicated", ()))
    if kinds:
        yield f"replicated for want of a rule: {', '.join(f'{k} ({n})' for k, n in kinds.items())}"


def sample(seed: int) -> list[str]:
    """All classes by chance; each beginning is a sample, with each library's share of it."""
    chance, placed = random.Random(seed), []
    for library, (names, _) in LIBRARIES.items():
        own = names()
        chance.shuffle(own)
        placed += [((i + chance.random()) / len(own), f"{library}:{n}") for i, n in enumerate(own)]
    return [op for _, op in sorted(placed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", choices=LIBRARIES, default="transformers")
    parser.add_argument("--part", default="0/1", help="i/n: each n-th class, from the i-th")
    parser.add_argument("--sample", type=int, help="so many classes of all libraries, by --seed")
    parser.add_argument("--only", action="append", help="a model class; may be repeated")
    parser.add_argument(
        "--build-only", action="store_true", help="no layouts: what one device runs"
    )
    parser.add_argument("--layout", choices=["random", "suggest"], default="random")
    parser.add_argument("--search", type=float, default=20, help="seconds of a search by suggest")
    parser.add_argument("--beside", action="store_true", help="bytes of a data and a tensor layout")
    parser.add_argument("--processes", action="store_true", help="train on gloo, one a device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="CPU limit for a class")
    parser.add_argument("--json", type=Path, help="file of rows, which is continued")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="print files of rows, and run nothing"
    )
    given = parser.parse_args()
    if given.table:
        read = (json.loads(path.read_text()) for path in given.table if path.exists())
        print(*table([row for rows in read for row in rows]), sep="\n")
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    without_broken_packages()
    rows = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    known = {r["op"] for r in rows}
    index, parts = map(int, given.part.split("/"))
    if given.sample:
        ops = sample(given.seed)[: given.sample]
    else:
        names = given.only or LIBRARIES[given.library][0]()[index::parts]
        ops = [f"{given.library}:{n}" for n in names]
    ops = [op for op in ops if op not in known]
    start = time.monotonic()
    for row in Pool(partial(run_model, given), given.jobs, given.seconds).run(ops):
        if "what" not in row:  # it crashed, or took too long
            row["what"] = "error"
            row["why"] = row.get("skipped") or row["failures"][0]["raises"]
        row["seconds"] = round(time.monotonic() - start, 1)
        start = time.monotonic()
        rows.append(row)
        why = row.get("why", "")[:160]
        print(f"{row['what']:10s}{row['op']} {row['seconds']}: {why!r}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
    print(*list(table(rows))[:1], sep="\n")


if __name__ == "__main__":
    main()
