"""Layouts of a model whose author knew of none, and training steps under them on processes."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from coverage import differs, failure, random_spec
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torchgspmd as gspmd
from torchgspmd.capture.state.object_trees import opened
from torchgspmd.errors import ShardingError

MESH = gspmd.Mesh(data=2, model=2)
DEVICES = 8  # of a proposal
STEPS, RATE = 3, 1e-2  # of AdamW


class Layout(NamedTuple):
    mesh: gspmd.Mesh
    marks: dict[str, str]
    in_specs: Any = None


def random_layout(model: nn.Module, name: str, seed: int) -> Layout:
    """Every parameter marked at random."""
    rng = random.Random(zlib.crc32(f"{name} {seed}".encode()))
    parameters = model.named_parameters(remove_duplicate=True)
    return Layout(MESH, {n: random_spec(rng, p.shape, MESH.names) for n, p in parameters})


def proposed_layout(model: nn.Module, kwargs: dict[str, Any], seconds: float) -> Layout:
    """Marks of the first proposal without stages, whose arguments are the same."""
    found = gspmd.suggest(model, kwargs=kwargs, devices=DEVICES, seconds=seconds)
    best = next(p for p in found if not p.staged)
    return Layout(best.mesh, dict(best.marks), best.in_specs)


def plain_layouts(model: nn.Module) -> dict[str, Layout]:
    """A data layout: the batch on all devices. A tensor layout: each matrix on one axis, too."""
    matrices = {n: p.shape for n, p in model.named_parameters() if p.dim() > 1}
    widths = Counter(size for shape in matrices.values() for size in shape)
    marks = {}
    for name, shape in matrices.items():
        dims = [d for d, n in enumerate(shape) if n % MESH.count(("model",)) == 0]
        if dims:  # the dimension that the fewest weights share, such as heads, not the width
            dim = min(dims, key=lambda d: widths[shape[d]])
            marks[name] = " ".join("model" if d == dim else "_" for d in range(len(shape)))
    return {
        "data": Layout(gspmd.Mesh(data=MESH.size), {}, "auto"),
        "tensor": Layout(MESH, marks, "auto"),
    }


def sent_bytes(model: nn.Module, kwargs: dict[str, Any], layout: Layout, grad: bool) -> int | None:
    """Bytes that a device sends in a step; None if the layout does not fit the model."""
    model = copy.deepcopy(model)
    try:
        gspmd.annotate(model, layout.mesh, layout.marks)
        plan = gspmd.plan(
            model, mesh=layout.mesh, in_specs=layout.in_specs, out_specs="same", grad=grad, **kwargs
        )
    except ShardingError:
        return None
    return plan.sent_bytes


# ---------------------------------------------------------------------------------------- training


def trained(model: nn.Module, kwargs: dict[str, Any]) -> list[Tensor]:
    """Losses of AdamW's steps."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=RATE)
    losses = []
    for _ in range(STEPS):
        outs = [t for t in pytree.tree_leaves(opened(model(**kwargs))) if isinstance(t, Tensor)]
        used = [t.nan_to_num(0, 0, 0) for t in outs if t.requires_grad]  # -inf masks logits
        loss = torch.stack([t.abs().square().mean() for t in used]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train(model: nn.Module, kwargs: dict[str, Any], layout: Layout, exact: float) -> dict[str, Any]:
    """Train on this process's rank, and compare the losses with those of one device."""
    want = trained(copy.deepcopy(model), kwargs)
    try:
        gspmd.annotate(model, layout.mesh, layout.marks)
        wrapped = gspmd.parallelize(model, layout.mesh, in_specs=layout.in_specs)
        got = trained(wrapped, kwargs)
    except ShardingError as error:
        return {"what": "refused", "why": str(error).strip()[:600]}
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        return {"what": "error", "why": failure(error)}
    got = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in got]
    moves = float((want[0] - want[-1]).abs()) > 100 * exact * float(want[0].abs())
    why = differs(got, want, exact)
    return {"what": "wrong" if why else "right", "why": why or "", "moves": moves}


def on_processes(count: int, seconds: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The first row that is not right of those of `count` forked processes, else any."""
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(count):
            child = os.fork()
            if child == 0:
                signal.alarm(seconds)
                try:
                    dist.init_process_group(
                        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
                    )
                    Path(folder, str(rank)).write_text(json.dumps(run()))
                    os._exit(0)
                except BaseException:  # noqa: BLE001 (it ends here: its caller is the parent's)
                    traceback.print_exc()
                    os._exit(1)
            children[child] = rank
        row = {"what": "error", "why": "no process"}
        while children:
            child, status = os.wait()
            path = Path(folder, str(children.pop(child)))
            row = json.loads(path.read_text()) if path.exists() else {
                "what": "error", "why": f"a process ended with {status}"}  # fmt: skip
            if row["what"] != "right":  # the others may wait for this one
                for other in children:
                    os.kill(other, signal.SIGKILL)
                    os.waitpid(other, 0)
                return row
        return row
