"""Bytes of programs that flatten a sharded dimension, beside it kept, DTensor and XLA.

    python benchmarks/flattened.py [--only loss] [--mesh data=2,seq=4]

Forward and backward; MiB that one device sends, by what each collective hands to its group, with
bandwidth-optimal algorithms. DTensor runs the flattened program on torch's fake process group, with
inputs in the same layout and weights on every device: its gradients are reduced at the end.
XLA partitions the flattened program where torch_xla is installed, with the plan's layouts of inputs
and results.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd

D, V = 256, 8000
MESHES = ("data=2,seq=4", "seq=8", "data=2,seq=2,model=2")


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], out: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D, bias=False), nn.Linear(D, out, bias=False)
        self.f = forward

    def forward(self, *args: Tensor) -> Tensor:
        return self.f(self, *args)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def mlp(m: Any, x: Tensor) -> Tensor:
    return m.b(F.gelu(m.a(x)))


def flat_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, V), y.reshape(-1))


def kept_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y)


def windows(x: Tensor) -> Tensor:
    return x.view(8, 8, 8, 8, 8, D).permute(0, 1, 3, 2, 4, 5)


def back(y: Tensor) -> Tensor:
    return y.permute(0, 1, 3, 2, 4, 5).reshape(8, 64, 64, D)


def frames(m: Any, x: Tensor) -> Tensor:  # (b t) n d
    return m.b(attend(m.a(x.unflatten(2, (4, -1)).flatten(0, 1).repeat(1, 1, 4)))).square().mean()


def kept_frames(m: Any, x: Tensor) -> Tensor:
    return m.b(attend(m.a(x.unflatten(2, (4, -1)).repeat(1, 1, 1, 4)))).square().mean()


def losses(loss: Callable[[Tensor, Tensor], Tensor], scales: tuple[int, ...]) -> Callable:
    return lambda m, x, y: sum(loss(m.b(m.a(x) * k).float(), y) for k in scales)


ROWS = {  # name: flattened, kept, width of the output, dtype
    "mlp of x.view(-1, d)": (
        lambda m, x: mlp(m, x.view(-1, D)).square().mean(),
        lambda m, x: mlp(m, x).square().mean(),
        D,
        torch.float32,
    ),
    "with residual": (
        lambda m, x: (mlp(m, x.view(-1, D)).view(x.shape) + x).square().mean(),
        lambda m, x: (mlp(m, x) + x).square().mean(),
        D,
        torch.float32,
    ),
    "loss of view(-1, V)": (losses(flat_loss, (1,)), losses(kept_loss, (1,)), V, torch.float32),
    "two losses, bfloat16": (
        losses(flat_loss, (1, 2)),
        losses(kept_loss, (1, 2)),
        V,
        torch.bfloat16,
    ),
    "three losses": (losses(flat_loss, (1, 2, 3)), losses(kept_loss, (1, 2, 3)), V, torch.float32),
    "shifted logits": (
        lambda m, x, y: flat_loss(m.b(m.a(x))[:, :-1], y[:, 1:]),
        lambda m, x, y: kept_loss(m.b(m.a(x))[:, :-1], y[:, 1:]),
        V,
        torch.float32,
    ),
    "(b t) n d attention": (frames, kept_frames, D, torch.float32),
    "windows of an image": (
        lambda m, x: m.b(attend(m.a(windows(x).reshape(-1, 64, D)))).square().mean(),
        lambda m, x: m.b(attend(m.a(windows(x).flatten(3, 4)))).square().mean(),
        D,
        torch.float32,
    ),
    "windows, and back": (
        lambda m, x: (
            m.b(back(attend(m.a(windows(x).reshape(-1, 64, D))).view(8, 8, 8, 8, 8, D)) + x)
            .square()
            .mean()
        ),
        lambda m, x: (
            m.b(back(attend(m.a(windows(x).flatten(3, 4))).unflatten(3, (8, 8))) + x)
            .square()
            .mean()
        ),
        D,
        torch.float32,
    ),
}


def arguments(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    if "windows" in name:
        return (torch.empty(8, 64, 64, D, dtype=dtype),)
    x = torch.empty(8, 2048, D, dtype=dtype)
    return (x, torch.zeros(8, 2048, dtype=torch.long)) if "los" in name or "log" in name else (x,)


# Of the operand: the bytes of the tensor that a collective over n devices moves (n - 1) / n of.
_WHOLE: dict[str, Callable[[int], int]] = {
    "all_gather_into_tensor": lambda n: n,
    "all_reduce": lambda n: 2,
    "reduce_scatter_tensor": lambda n: 1,
    "all_to_all_single": lambda n: 1,
}


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that collectives send, below DTensor."""

    total = 0.0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own operations come next
        result = op(*args, **(kwargs or {}))
        name = op.name().split("::")[1].split(".")[0] if op.namespace == "_c10d_functional" else ""
        if name in _WHOLE:
            n = dist.distributed_c10d._resolve_process_group(args[-1]).size()
            whole = _WHOLE[name](n) * args[0].nbytes
            self.total += (n - 1) / n * whole
        return result


def bytes_of_dtensor(f: Callable, out: int, args: tuple[Tensor, ...], mesh: gspmd.Mesh) -> float:
    """Return the bytes that DTensor sends for a step; NaN if it has no sharding for the program."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    names = mesh.names
    devices = init_device_mesh("cpu", tuple(size for _, size in mesh.axes), mesh_dim_names=names)
    places = [
        Shard({"data": 0, "seq": 1}[n]) if n in ("data", "seq") else Replicate() for n in names
    ]
    model = distribute_module(Model(f, out).to(args[0].dtype), devices)
    inputs = [distribute_tensor(a, devices, places) for a in args]
    counted = SentBytes()
    try:
        with counted:
            model(*inputs).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.redistribute(devices, [Replicate()] * len(names))
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        print(f"    DTensor: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return math.nan
    return counted.total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--mesh", action="append")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    has_xla = importlib.util.find_spec("torch_xla") is not None
    if has_xla:
        from against_xla import start_xla

        start_xla(8)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    heads = ("flattened", "kept", "ratio", "DTensor", *(["XLA"] if has_xla else []))
    print(f"{'MiB sent by a device':22} {'mesh':21}" + "".join(f"{h:>10}" for h in heads))
    for text in options.mesh or MESHES:
        mesh = gspmd.Mesh.parse(text)
        for name, (flat, kept, out, dtype) in ROWS.items():
            if options.only not in name:
                continue
            args = arguments(name, dtype)
            spec = "data seq" if "data" in mesh.names else "_ seq"
            specs = tuple(spec + " _" * (a.dim() - 2) for a in args)
            layouts = {"in_specs": specs, "out_specs": "same"}
            plans = [
                gspmd.plan(Model(f, out).to(dtype), *args, mesh=mesh, grad=True, **layouts)
                for f in (flat, kept)
            ]
            a, b = (p.sent_bytes / 2**20 for p in plans)
            other = bytes_of_dtensor(flat, out, args, mesh) / 2**20
            xla = [gspmd.compare_with_xla(plans[0]).bytes[1] / 2**20] if has_xla else []
            numbers = "".join(f"{n:10.2f}" for n in (a, b, a / b, other, *xla))
            print(f"{name:22} {mesh!s:21}{numbers}", flush=True)


if __name__ == "__main__":
    main()
