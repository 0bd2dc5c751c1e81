"""Public silent bugs as small programs: one device, other systems on processes, and a plan.

    python benchmarks/silent_bugs.py

Prints a row for each program: the largest element on one device, the largest difference to it by
other systems on four gloo processes and by the plan's program, and the plan's certificate. A bug is
silent if a number differs and nothing is raised. Each program runs by torch's DTensor; some run by
another system of torch too, or by hand: collectives as a report describes them, for a project that
is not installed. Other releases of torch give other rows; docs/silent_bugs.md has those of 2.13.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from reported_bugs import (
    SMOOTHING,
    Other,
    balance,
    bias_on_each,
    by_fsdp_and_columns,
    by_megatron,
    count_of_all_for_own,
    counted_as_copies,
    drawn,
    expert,
    gated_norm,
    gathered_as_shards,
    gathered_over_another_axis,
    gradient,
    labelled,
    linear,
    local_counts,
    masked,
    mean_of_kept,
    mixture,
    norm_of_gradient,
    own_experts,
    own_heads,
    preference,
    put,
    scaled,
    smoothed,
    smoothed_in_shards,
    stored_and_recomputed,
    two_losses,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import torchgspmd as gspmd

DEVICES = 4
MEGATRON = "Megatron Core"  # optional: pip install --no-deps megatron-core
ONE_AXIS, TWO_AXES = {"x": 4}, {"data": 2, "model": 2}


@dataclass(frozen=True)
class Program:
    """A program: its report, the function, its arguments, their layouts, and other systems."""

    report: str
    function: Callable[..., Tensor]
    arguments: Callable[[], tuple[Tensor, ...]]
    specs: tuple[str, ...]
    mesh: Mapping[str, int] = field(default_factory=lambda: ONE_AXIS)
    others: Mapping[str, Other] = field(default_factory=dict)

    def systems(self) -> dict[str, Other]:
        """Return the systems that run it, by name, of those that are installed."""
        found = {"DTensor": self.by_dtensor, **self.others}
        if not importlib.util.find_spec("megatron"):
            found.pop(MEGATRON, None)
        return found

    def by_dtensor(self, mesh: DeviceMesh, *arguments: Tensor) -> Tensor:
        return self.function(*self.sharded(mesh, *arguments))

    def by_loss_parallel(self, mesh: DeviceMesh, *arguments: Tensor) -> Tensor:
        with loss_parallel():
            return self.by_dtensor(mesh, *arguments)

    def sharded(self, mesh: DeviceMesh, *arguments: Tensor) -> list[Tensor]:
        pairs = zip(arguments, self.specs)
        return [distribute_tensor(x, mesh, placements(mesh, spec)) for x, spec in pairs]


def placements(mesh: DeviceMesh, spec: str) -> list[Placement]:
    """Return a layout as DTensor has it."""
    words = [word.split("+") for word in spec.split()]
    return [
        next((Shard(d) for d, word in enumerate(words) if axis in word), Replicate())
        for axis in mesh.mesh_dim_names or ()
    ]


ROWS = ("_ _", "x _", "x _")  # a weight, and tokens over devices

PROGRAMS = {
    "view": Program("pytorch #179502", lambda x: x.view(-1, 6), drawn((12, 8)), ("_ x",)),
    "patches, backward": Program(
        "pytorch #191926",
        gradient(lambda x, w: F.conv2d(x, w, stride=4).square().sum()),
        drawn((2, 3, 16, 16), (8, 3, 4, 4)),
        ("_ _ _ x", "_ _ _ _"),
    ),
    "convolution of rows": Program(
        "pytorch #191926, its forward",
        lambda x, w: F.conv2d(x, w, padding=1),
        drawn((2, 3, 16, 16), (8, 3, 3, 3)),
        ("_ _ x _", "_ _ _ _"),
    ),
    "index_put": Program("pytorch #172350", put, drawn((4, 4), (4,)), ("x _", "x")),
    "mean of uneven rows": Program(
        "local means, seen with mse_loss", F.mse_loss, drawn((6, 3), (6, 3)), ("x _", "x _")
    ),
    "mean of fewer rows than devices": Program(
        "local means of empty shards, seen with binary_cross_entropy_with_logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        drawn((3, 4), (3, 4)),
        ("x _", "x _"),
    ),
    "cosine_embedding_loss": Program(
        "pytorch's DTensor rules for losses",
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones_like(x[:, 0])),
        drawn((8, 4), (8, 4)),
        ("_ x", "_ x"),
    ),
    "one sum, two scales": Program("pytorch #153603", scaled, drawn((8,)), ("x",)),
    "loss of preferences": Program(
        "pytorch #190746",
        gradient(preference),
        drawn((6, 16), (6, 16)),
        ("_ x", "_ x"),
        others={"loss_parallel": Program.by_loss_parallel},
    ),
    "weighted classes": Program(
        "pytorch #185167",
        F.nll_loss,
        lambda: (*labelled(), torch.arange(1.0, 17)),
        ("x _", "_", "_"),
    ),
    "uneven rows over two axes": Program(
        "pytorch #168134",
        gradient(linear),
        drawn((5, 4), (6, 4)),
        ("model+data _", "data _"),
        TWO_AXES,
        {"FSDP2 and ColwiseParallel": by_fsdp_and_columns},
    ),
    "bias of sharded experts": Program(
        "torchtitan #4245",
        expert,
        drawn((6, 4), (4, 8), (8, 4), (4,)),
        ("_ _", "_ x", "x _", "_"),
        others={"by hand": bias_on_each},
    ),
    "router of sharded experts": Program(
        "transformers #48205",
        gradient(mixture),
        drawn((4, 8), (6, 4), (8, 4, 4)),
        ("_ _", "_ _", "x _ _"),
        others={"by hand": own_experts},
    ),
    "label smoothing": Program(
        "Megatron-LM #7452, finding 1",
        smoothed,
        labelled,
        ("_ x", "_"),
        others={"by hand": smoothed_in_shards, MEGATRON: by_megatron(SMOOTHING)},
    ),
    "loss of gathered logits": Program(
        "Megatron-LM #7452, finding 2",
        F.cross_entropy,
        labelled,
        ("_ _", "_"),
        others={"by hand": gathered_as_shards, MEGATRON: by_megatron(are_gathered=True)},
    ),
    "second loss with its own mask": Program(
        "Megatron-LM #7452, finding 3",
        gradient(two_losses),
        masked(3, 2, 1, 1),
        ROWS,
        others={"DDP": local_counts(two_losses)},
    ),
    "recomputed layer": Program(
        "Megatron-LM #7452, finding 4",
        gradient(stored_and_recomputed),
        drawn((4, 4), (8, 4)),
        ("_ _", "data+model _"),
        TWO_AXES,
        {"by hand": gathered_over_another_axis},
    ),
    "norm of the sinks' gradient": Program(
        "Megatron-LM #7452, finding 8",
        norm_of_gradient,
        drawn((8,), (8, 6, 6), (8, 6, 4)),
        ("x", "x _ _", "x _ _"),
        others={"by hand": counted_as_copies},
    ),
    "mask in one shard": Program(
        "Megatron-LM #7452, finding 9",
        gradient(mean_of_kept),
        masked(1, 0, 0, 0),
        ROWS,
        others={"DDP": local_counts(mean_of_kept)},
    ),
    "balanced experts, padding": Program(
        "Megatron-LM #7452, finding 10",
        gradient(balance),
        masked(3, 2, 2, 1),
        ROWS,
        others={"by hand": count_of_all_for_own},
    ),
    "norm that heads share": Program(
        "Megatron-LM #7452, finding 11",
        gradient(gated_norm),
        drawn((4,), (6, 8, 4), (6, 8, 4)),
        ("_", "_ x _", "_ x _"),
        others={"by hand": own_heads},
    ),
}


def by_others() -> dict[tuple[str, str], Tensor | str]:
    """Return each program's result by each system, on these processes, or the error."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of speed
    found: dict[tuple[str, str], Tensor | str] = {}
    for name, program in PROGRAMS.items():
        mesh = init_device_mesh("cpu", (*program.mesh.values(),), mesh_dim_names=(*program.mesh,))
        for system, run in program.systems().items():
            try:
                given = (program, mesh) if run is Program.by_loss_parallel else (mesh,)
                result = run(*given, *program.arguments())
                result = result.full_tensor() if isinstance(result, DTensor) else result
                found[name, system] = result.detach()
            except Exception as error:  # the row says which
                found[name, system] = type(error).__name__
    return found


def difference(found: Tensor | str, expected: Tensor) -> str:
    if isinstance(found, str):
        return found
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}"
    gap = (found - expected).abs().max().item()
    return "0" if gap < 1e-5 * expected.abs().max().item() + 1e-6 else f"{gap:.3g}"


def planned(program: Program, mesh: Mapping[str, int]) -> gspmd.Plan:
    return gspmd.plan(
        program.function, *program.arguments(), mesh=gspmd.Mesh(**mesh), in_specs=program.specs
    )


def rows() -> list[tuple[str, ...]]:
    """Return a row for each program."""
    theirs, table = gspmd.launch(by_others, DEVICES)[0], []
    assert isinstance(theirs, dict)
    for name, program in PROGRAMS.items():
        expected, plan = program.function(*program.arguments()), planned(program, program.mesh)
        ours = difference(plan.simulate(*program.arguments()), expected)
        size = f"{expected.abs().max().item():.3g}"
        first, *others = [
            ("" if system == "DTensor" else f"{system}: ")
            + difference(theirs[name, system], expected)
            for system in program.systems()
        ]
        certificate = str(plan.verify()).split(",")[0]
        table.append((name, program.report, size, first, "; ".join(others), ours, certificate))
    return table


if __name__ == "__main__":
    print(f"torch {torch.__version__.split('+')[0]}")
    print("| program | report | one device | DTensor | others | torchgspmd | certificate |")
    print("|---|---|---|---|---|---|---|")
    for row in rows():
        print(f"| {' | '.join(row)} |")
