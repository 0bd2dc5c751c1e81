"""Public silent bugs as small programs: one device, DTensor on processes, and a plan.

    python benchmarks/silent_bugs.py

Prints a row for each program: the largest difference to one device, by torch's DTensor on four gloo
processes and by the plan's program, and the plan's certificate. A bug is silent if a number differs
and nothing is raised. Sources are public reports, written anew; with other releases of torch the
rows differ, and docs/silent_bugs.md has those of 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchgspmd as gspmd

DEVICES = 4


@dataclass(frozen=True)
class Program:
    """A program: its report, the function, its arguments, and by argument the sharded dimension."""

    report: str
    function: Callable[..., Tensor]
    arguments: Callable[[], tuple[Tensor, ...]]
    sharded: tuple[int | None, ...]

    def specs(self) -> tuple[str, ...]:
        return tuple(
            " ".join("x" if d == dim else "_" for d in range(t.dim()))
            for t, dim in zip(self.arguments(), self.sharded)
        )


def drawn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    def draw() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(shape, generator=generator) for shape in shapes)

    return draw


def input_gradient(x: Tensor, w: Tensor) -> Tensor:
    """Return the gradient of patches' input, of which columns are sharded."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.conv2d(x, w, stride=4).square().sum(), x)
    return gradient


def put(x: Tensor, values: Tensor) -> Tensor:
    """Write numbers on a diagonal."""
    rows = torch.arange(x.shape[0])
    if isinstance(x, DTensor):
        rows = distribute_tensor(rows, x.device_mesh, [Replicate()])
    return x.index_put((rows, rows), values)


def scaled(x: Tensor) -> Tensor:
    """Scale one sum by two numbers."""
    total = x.sum()
    return torch.stack(
        [(total * i).full_tensor() if isinstance(x, DTensor) else total * i for i in (1, 2)]
    )


PROGRAMS = {
    "view": Program("pytorch #179502", lambda x: x.view(-1, 6), drawn((12, 8)), (1,)),
    "patches, backward": Program(
        "pytorch #191926", input_gradient, drawn((2, 3, 16, 16), (8, 3, 4, 4)), (3, None)
    ),
    "convolution of rows": Program(
        "pytorch #191926, its forward",
        lambda x, w: F.conv2d(x, w, padding=1),
        drawn((2, 3, 16, 16), (8, 3, 3, 3)),
        (2, None),
    ),
    "index_put": Program("pytorch #172350", put, drawn((4, 4), (4,)), (0, 0)),
    "mean of uneven rows": Program(
        "local means, seen with mse_loss", F.mse_loss, drawn((6, 3), (6, 3)), (0, 0)
    ),
    "mean of fewer rows than devices": Program(
        "local means of empty shards, seen with binary_cross_entropy_with_logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        drawn((3, 4), (3, 4)),
        (0, 0),
    ),
    "cosine_embedding_loss": Program(
        "pytorch's DTensor rules for losses",
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones_like(x[:, 0])),
        drawn((8, 4), (8, 4)),
        (1, 1),
    ),
    "one sum, two scales": Program("pytorch #153603", scaled, drawn((8,)), (0,)),
}


def by_dtensor() -> dict[str, Tensor | str]:
    """Return each program's result by DTensor, on this process's mesh, or the error."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for name, program in PROGRAMS.items():
        try:
            tensors = [
                distribute_tensor(t, mesh, [Replicate() if dim is None else Shard(dim)])
                for t, dim in zip(program.arguments(), program.sharded)
            ]
            result = program.function(*tensors)
            found[name] = result.full_tensor() if isinstance(result, DTensor) else result
        except Exception as error:  # the row says which
            found[name] = type(error).__name__
    return found


def difference(found: Tensor | str, expected: Tensor) -> str:
    if isinstance(found, str):
        return found
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}"
    gap = (found - expected).abs().max().item()
    return "0" if gap < 1e-5 * expected.abs().max().item() + 1e-6 else f"{gap:.3g}"


def rows() -> list[tuple[str, ...]]:
    """Return a row for each program."""
    theirs, table = gspmd.launch(by_dtensor, DEVICES)[0], []
    for name, program in PROGRAMS.items():
        arguments, mesh = program.arguments(), gspmd.Mesh(x=DEVICES)
        expected = program.function(*arguments)
        plan = gspmd.plan(program.function, *arguments, mesh=mesh, in_specs=program.specs())
        ours = difference(plan.simulate(*arguments), expected)
        table.append(
            (name, program.report, difference(theirs[name], expected), ours, str(plan.verify()))
        )
    return table


if __name__ == "__main__":
    print(f"torch {torch.__version__.split('+')[0]}")
    print("| program | report | DTensor | torchgspmd | certificate |\n|---|---|---|---|---|")
    for row in rows():
        print(f"| {' | '.join(row)} |")
