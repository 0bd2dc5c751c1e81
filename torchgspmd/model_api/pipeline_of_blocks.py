"""pipeline: blocks as stages, after a check of the schedule's options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ShardingError, did_you_mean
from ..features.pipelines.list_scheduler import DUAL, Order
from ..features.pipelines.schedule import check_schedule
from ..layout.layout_rules import mesh_of
from ..layout.mesh import Mesh
from .pipelined_blocks import Loss, Pipeline


def pipeline(
    blocks: Iterable[nn.Module],
    mesh: Mesh | DeviceMesh,
    axis: str = "stage",
    *,
    microbatches: int,
    schedule: str = "auto",
    repeats: int = 1,
    recompute: bool = False,
    loss: Loss | None = None,
    memory: int | None = None,
    rows: Sequence[str] | None = None,
) -> nn.Module:
    """Return a module that computes `for block in blocks: x = block(x)` as a pipeline.

    On one device it is that loop. Its state_dict has the names that nn.ModuleList(blocks) has.

    Args:
        blocks: Modules with the same parameters and code, or of several kinds in an order that
            gives all stages one program. Each takes the previous one's result: a tensor, or tuples,
            lists and dicts of tensors, with the batch in dimension 0.
        mesh: The devices, also as torch's DeviceMesh.
        axis: The axis whose devices are the stages.
        microbatches: Number of parts into which the batch is divided.
        schedule: "gpipe": a stage has neighboring blocks. "circular": a stage has `repeats` groups
            of blocks, and each microbatch goes round `repeats` times; less time is lost at the
            start and the end. "auto": circular if there are repeats.
        repeats: How often a microbatch passes each stage.
        recompute: Whether the backward computes the stages again, so that only values between
            stages are kept.
        loss: The part behind the blocks. It takes the last block's result for a microbatch, and the
            microbatch's part of the call's keyword arguments, and returns a loss. The module
            returns the mean over the microbatches then, and backwards run between forwards: "1f1b",
            "zero_bubble" (weight gradients fill gaps), "gpipe" (all forwards first). "auto" is the
            zero-bubble schedule that loses least time within `memory`. With two repeats 1F1B is
            interleaved, and zero-bubble is a V: the second round goes back. "dualpipev" is such a V
            in which a forward is beside another microbatch's backward (DeepSeek-V3).
        memory: With a loss, the bytes that a device may keep for backwards; None: with "auto" and
            "zero_bubble" 1F1B's activations, one for each stage.
        rows: Names of further arguments that have a row for each batch row, such as a padding mask:
            a stage gets its microbatch's rows.

    Returns:
        A module that is called with the batch, and with further arguments that all blocks get
        (masks, rotary tables). With a loss these are positional.

    Raises:
        ShardingError: Stages would differ, the mesh lacks the axis, or the batch is not divided by
            the microbatches.

    Example:
        >>> from torchgspmd import Mesh, plan
        >>> blocks = [torch.nn.Linear(8, 8) for _ in range(4)]
        >>> model = pipeline(blocks, Mesh(stage=4), microbatches=8)
        >>> x = torch.ones(16, 8)
        >>> [(c.kind, c.count) for c in plan(model, x, mesh=Mesh(stage=4)).collectives][0]
        ('permute', 11)
    """
    mesh = mesh_of(mesh)
    if axis not in mesh.names:
        raise ShardingError.here(
            f"pipeline names axis '{axis}', which mesh {mesh} does not have",
            fix=did_you_mean(axis, mesh.names),
        )
    check_schedule(schedule, repeats, microbatches, loss, memory)
    stages = mesh.count((axis,))
    if repeats > 1 and microbatches < stages:
        raise ShardingError.here(
            f"a circular pipeline has {stages} stages and {microbatches} microbatches",
            why="a microbatch comes round when all others have been begun",
            fix="use as many microbatches as stages, or more",
        )
    if schedule == DUAL:
        repeats = _repeats_of_dual_pipe(stages, microbatches, repeats)
    vee = loss is not None and schedule in ("auto", "zero_bubble", DUAL) and repeats == 2
    order = Order(
        schedule,
        stages,
        microbatches,
        memory=memory or 0,
        recompute=recompute,
        rounds=repeats,
        vee=vee,
    )
    return Pipeline(list(blocks), mesh, axis, order, loss, rows)


def _repeats_of_dual_pipe(stages: int, microbatches: int, repeats: int) -> int:
    """Return the number of stages that a device has; raise a ShardingError if there is no order."""
    if repeats <= 2 and microbatches >= 2 * stages:
        return 2
    raise ShardingError.here(
        f"schedule '{DUAL}' is used with {repeats} repeats and {microbatches} microbatches on "
        f"{stages} devices",
        why="a device has two stages, and pairs the forward of one microbatch with the backward of "
        "another",
        fix=f"use {2 * stages} microbatches or more, and no other repeats than 2; "
        "or schedule='zero_bubble'",
    )
