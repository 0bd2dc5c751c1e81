"""plan and parallelize: capture, the passes, a backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from .annotated_program import decide, lay_out
from .capture import (
    Captured,
    capture,
    opened,
)
from .compat.private_apis import _pytree as pytree
from .compat.versions import check_plan
from .dump import Dump
from .errors import ShardingError, user_line
from .fix_candidates import report_replicated
from .fx_passes import Rules, expand, localize
from .fx_passes import regather_weights as gather_again
from .fx_passes.partition.insert_collectives import inserted
from .fx_passes.partition.partition import Memories
from .fx_passes.schedule.communicate import OPTIONAL, schedule
from .mesh import Mesh
from .plan import Plan
from .prefix_specs import spread_inputs
from .rules import natively
from .shard_spec import ShardSpec
from .without_gc import without_gc


def plan(
    fn: Callable | nn.Module,
    *args: Any,
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    grad: bool = False,
    strict: bool = False,
    rng: str = "global",
    regather: str = "auto",
    skip_passes: Sequence[str] = (),
    **kwargs: Any,
) -> Plan:
    """Compiles a function or module for a mesh, without devices.

    args, kwargs: real, fake or meta tensors of global shape, and whatever else fn takes. in_specs,
    out_specs: pytree prefixes of args and of the result (a mapping as in_specs: of kwargs) whose
    leaves are specs in string form, or None where propagation decides. grad=True, on a module:
    forward and backward together. strict=True: what would be listed as replicated_ops is an error.
    rng="global": random numbers are those of a mesh of one device; "native": from PyTorch's
    generator, other ones in every part. regather, skip_passes: see parallelize. A module's plan is
    of what it keeps in attributes now, and changes nothing of it; `simulate` does. Raises
    ShardingError.
    """
    if not isinstance(mesh, Mesh):
        raise ShardingError(
            f"plan takes a torchgspmd.Mesh, not {type(mesh).__name__}",
            where=user_line(),
            fix="Mesh(data=2, model=4), or Mesh.from_device_mesh(device_mesh)",
        )
    check_plan()
    if grad and not isinstance(fn, nn.Module):
        raise ShardingError(
            "plan(grad=True) takes a module",
            where=user_line(),
            fix="call torch.autograd.grad inside of the function",
        )
    args, kwargs = opened((args, kwargs))
    wanted = spread_inputs(in_specs, args, kwargs, mesh)
    start = time.perf_counter()
    captured = capture(fn, args, kwargs, mesh, grad=grad)
    seconds = time.perf_counter() - start
    unplaced = any(
        isinstance(t, Tensor) and t.is_meta
        for t in (*captured.tensors, *pytree.tree_leaves((args, kwargs)))
    )
    wanted += [None for _ in captured.places]
    made = compile_plan(
        captured,
        mesh,
        wanted,
        out_specs,
        strict=strict,
        rng=rng,
        regather=regather,
        skip_passes=skip_passes,
        device="meta" if unplaced else None,
    )
    made.seconds = {"capture": seconds, **made.seconds}
    return made


@without_gc()
def compile_plan(
    captured: Captured,
    mesh: Mesh,
    arguments: list[ShardSpec | None],
    out_specs: Any = None,
    stored: Mapping[str, ShardSpec] | None = None,
    plain: Sequence[bool] = (),
    strict: bool = False,
    rng: str = "global",
    regather: str = "auto",
    skip_passes: Sequence[str] = (),
    device: str | None = None,
) -> Plan:
    """The passes over a captured program. arguments: a spec or None for each.

    For a program that runs on real processes also, stored: the layouts of parameters and buffers,
    by name; plain: which arguments are whole on every rank, so that their gradients have to be.
    Results without a spec are whole then. device: the type of those that it is for ("meta": GPUs);
    else that of the tensors given.
    """
    _check_option("rng", rng, ("global", "native"))
    _check_option("regather", regather, ("auto", "always", "never"))
    for name in skip_passes:
        _check_option("pass", name, OPTIONAL)
    device = device or max(
        (n.meta["val"].device.type for n in captured.graph.find_nodes(op="placeholder")),
        default="cpu",
    )
    rules, clock, dump = Rules(), _Clock(), Dump(mesh)
    dump("capture", captured.graph)
    options = {
        "whole": stored is not None,
        "parts": True,
        "rules": rules,
        "expand": partial(expand, traced={}),
        "clock": clock,
        "dump": dump,
    }
    made = lay_out(captured, mesh, arguments, out_specs, stored, pieces=True, **options)
    memories: Memories = {}
    sharded = decide(made, plain, rules, memories=memories)
    clock("partition")
    if made.parted:
        other = lay_out(captured, mesh, arguments, out_specs, stored, **options)
        made, sharded = min(
            (made, sharded),
            (other, decide(other, plain, rules, memories=memories)),
            key=lambda way: _sent(way[1]),
        )
    dump("partition", sharded)
    clock("partition")
    if rng == "native":
        natively(sharded)
    plan = _localized(
        made,
        mesh,
        gather_again(sharded) if regather == "always" else sharded,
        device,
        skip_passes,
        clock,
    )
    if regather == "auto" and plan.memory.peak > _device_memory(captured):
        plan = _localized(made, mesh, gather_again(sharded), device, skip_passes, clock)
    clock("localize")
    dump.final(plan)
    if strict and plan.replicated_ops:
        raise report_replicated(
            plan,
            lambda changed: compile_plan(
                changed,
                mesh,
                arguments,
                out_specs,
                stored,
                plain,
                False,
                rng,
                regather,
                skip_passes,
                device,
            ),
        )
    return plan


def _localized(
    made: Annotated,
    mesh: Mesh,
    sharded: fx.Graph,
    device: str,
    skip_passes: Sequence[str],
    clock: _Clock,
) -> Plan:
    program = fx.GraphModule(
        made.captured.constants, schedule(localize(sharded, mesh), mesh, device, skip_passes)
    )
    return Plan(mesh, made.captured, sharded, program, made.layouts, clock.seconds)


def _device_memory(captured: Captured) -> float:
    """Bytes of the GPU that the program is for; no limit elsewhere."""
    on_gpu = any(
        n.meta["val"].device.type == "cuda" for n in captured.graph.find_nodes(op="placeholder")
    )
    return (
        torch.cuda.get_device_properties(0).total_memory
        if on_gpu and torch.cuda.is_available()
        else math.inf
    )


def _check_option(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ShardingError(
            f"there is no {name} '{value}'; there are {', '.join(map(repr, known))}",
            where=user_line(),
        )


def _sent(graph: fx.Graph) -> float:
    """Bytes that a device sends in a partitioned graph."""
    return sum(node.meta["step"].sent for node in inserted(graph))


class _Clock:
    """Seconds between calls, by name; in all, if several calls have one."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = self.seconds.get(name, 0.0) + now - self.last, now
