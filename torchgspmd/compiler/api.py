"""Compile a function or module for a mesh: capture, the passes, a plan."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..capture import ArgumentSizes, Captured, capture, check_dtypes, leaf_names, opened, sizes_of
from ..capture.without_gc import without_gc
from ..comm.hardware import Hardware
from ..compat.private_apis import _pytree as pytree
from ..compat.versions import check_plan
from ..errors import ShardingError, user_line
from ..fx_passes.boundary import start_program
from ..fx_passes.dump import dump_level, dump_text
from ..fx_passes.partition.cost_constants import CostConstants
from ..fx_passes.pipeline import is_default, run, skippable
from ..fx_passes.printer import program_text
from ..fx_passes.program import Request, Shared
from ..fx_passes.replication_report import data_axes
from ..fx_passes.stages import SCHEDULED
from ..layout.annotate import layout_of
from ..layout.device_mesh import mesh_of
from ..layout.layout_rules import MeshLayout, bound
from ..layout.mesh import Mesh
from ..layout.prefix_specs import spread_inputs
from ..shard_spec import ShardSpec
from .fix_candidates import report_replicated
from .plan import Plan
from .plan_summary import idle_axes_text
from .small_sizes import SmallSizes


def plan(
    fn: Callable | nn.Module,
    *args: Any,
    mesh: Mesh | DeviceMesh | MeshLayout,
    in_specs: Any = None,
    out_specs: Any = None,
    grad: bool = False,
    strict: bool = False,
    rng: str = "global",
    regather: str = "auto",
    skip_passes: Sequence[str] = (),
    costs: Mapping[str, float] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    dynamic: Mapping[str, Any] | ArgumentSizes | None = None,
    hardware: Hardware | str | None = None,
    **kwargs: Any,
) -> Plan:
    """Compile a function or module for a mesh, without devices.

    A module's plan uses the state that its attributes have now, and changes nothing of it.
    Plan.simulate does change it.

    Args:
        fn: The function or module to compile.
        args: Positional arguments of fn. Tensors are real, fake or meta, of global shape.
        mesh: The devices, also as torch's DeviceMesh, or a Layout on a mesh: specs have logical
            names then.
        in_specs: Layouts of the arguments, as a pytree prefix of args. A mapping is one of all
            arguments by name. Leaves are specs in string form, or None where propagation decides.
            "auto": the axes of the batch ("data", "dp", ...) divide all leading dimensions.
        out_specs: Layouts of the result, as a pytree prefix of it; "same": as it is computed.
        grad: Compile forward and backward together. fn is a module then.
        strict: Raise an error where the plan would list replicated_ops.
        rng: "global" draws the random numbers of a mesh of one device. "native" draws from
            PyTorch's generator: each shard has numbers of its own.
        regather: Whether weights are gathered again for the backward: "always", "never", or
            "auto" (if a GPU's memory would not suffice otherwise). "all": not weights alone.
        skip_passes: Passes to leave out: some of "bucket", "collective_matmul", "overlap" and
            "prefetch".
        costs: Other values for constants of the cost model, by name;
            docs/debugging_a_layout.md has them.
        param_dtype: The dtype that a module computes in: floating parameters and arguments are
            cast to it, parameters before they are gathered. docs/parallelize.md has more.
        reduce_dtype: The dtype in which gradients of parameters are summed over devices.
        dynamic: Dimensions that have another size in each run, by argument, as {"tokens": {1}};
            a name may be a pattern. Sizes that are equal here are one size, unless they have
            names: {"tokens": {1: "length"}}.
        hardware: Speeds and links of the devices, a name ("h100") or a Hardware. Sums over axes of
            which some leave a host are then reduced within hosts first, where that takes less
            time, and collectives are scheduled by these numbers.
        kwargs: Keyword arguments of fn.

    Returns:
        The Plan: layouts, collectives, memory, and the program that every device runs.

    Raises:
        ShardingError: An argument does not fit, fn cannot be captured, a mark does not fit the
            mesh, or strict is not met.

    Example:
        >>> import torch
        >>> from torchgspmd import Mesh, plan
        >>> mesh = Mesh(data=2, model=4)
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> result = plan(torch.matmul, x, w, mesh=mesh, in_specs=("data model", "model _"))
        >>> [(c.kind, c.axes) for c in result.collectives]
        [('all_reduce', ('model',))]
    """
    asked = {
        "mesh": mesh,
        "in_specs": in_specs,
        "out_specs": out_specs,
        "grad": grad,
        "strict": strict,
        "rng": rng,
        "regather": regather,
        "skip_passes": skip_passes,
        "costs": costs,
        "param_dtype": param_dtype,
        "reduce_dtype": reduce_dtype,
        "hardware": hardware,
    }
    layout = layout_of(fn, mesh)
    if isinstance(mesh, MeshLayout):
        in_specs, out_specs = mesh.spec(in_specs), mesh.spec(out_specs)
    mesh = mesh_of(mesh)
    check_plan()
    if grad and not isinstance(fn, nn.Module):
        raise ShardingError(
            "plan(grad=True) takes a module",
            where=user_line(),
            fix="call torch.autograd.grad inside of the function",
        )
    check_dtypes(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    if (param_dtype or reduce_dtype) and not isinstance(fn, nn.Module):
        raise ShardingError(
            "param_dtype and reduce_dtype are of modules: a function has no parameters",
            where=user_line(),
            fix="pass the module, or cast inside of the function",
        )
    args, kwargs = opened((args, kwargs))
    specs = spread_inputs(in_specs, args, kwargs, mesh, fn)
    start = time.perf_counter()
    sizes = (
        dynamic
        if isinstance(dynamic, ArgumentSizes)
        else sizes_of(dynamic, leaf_names(fn, args, kwargs), pytree.tree_leaves((args, kwargs)))
    )
    with bound(layout):
        captured = capture(
            fn, args, kwargs, mesh, grad=grad, param_dtype=param_dtype, dynamic=sizes
        )
    seconds = time.perf_counter() - start
    if layout is not None:
        layout.check_used()
    has_meta_tensor = any(
        isinstance(t, Tensor) and t.is_meta
        for t in (*captured.tensors, *pytree.tree_leaves((args, kwargs)))
    )
    specs += [None for _ in captured.state_inputs]
    result = compile_plan(
        captured,
        mesh,
        specs,
        out_specs,
        strict=strict,
        rng=rng,
        regather=regather,
        skip_passes=skip_passes,
        costs=costs,
        reduce_dtype=reduce_dtype,
        hardware=hardware,
        device="meta" if has_meta_tensor else None,
    )
    result.seconds = {"capture": seconds, **result.seconds}
    if in_specs is None:
        for line in idle_axes_text(mesh, result.idle_axes):
            warnings.warn(line, stacklevel=2)
    if sizes.dims:
        result._small_sizes = SmallSizes(
            captured, lambda sizes, args, kwargs: plan(fn, *args, dynamic=sizes, **asked, **kwargs)
        )
    return result


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
    costs: Mapping[str, float] | None = None,
    device: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    shard_updates: str | None = None,
    hardware: Hardware | str | None = None,
    shared: Shared | None = None,
) -> Plan:
    """Run the passes over a captured program.

    arguments: a spec, or None, for each argument. stored and plain are given for a program that
    runs on real processes; its results without a spec are replicated. stored: the layouts of
    parameters and buffers, by name. plain: for each argument whether it is a whole tensor on every
    rank; its gradient is whole then. device: the type of device that the program is for ("meta":
    GPUs); by default that of the input tensors. shard_updates: the axis over which parameters are
    stored in parts, to be gathered. shared: what plans of like programs share, filled here.
    """
    _check_option("rng", rng, ("global", "native"))
    _check_option("regather", regather, ("auto", "always", "all", "never"))
    for name in skip_passes:
        _check_option("pass", name, skippable())
    request = Request(
        captured,
        mesh,
        arguments,
        out_specs,
        stored or {},
        stored is not None,
        plain,
        rng=rng,
        regather=regather,
        skip_passes=frozenset(skip_passes),
        constants=CostConstants().override(costs),
        device=device or _device_of(captured),
        reduce_dtype=reduce_dtype,
        stored_over=frozenset([shard_updates] if shard_updates else []),
        hardware=None if hardware is None else Hardware.of(hardware),
        shared=shared or Shared(),
    )
    result = _plan(request)
    _dump(result)
    if strict and result.replicated_ops:
        raise report_replicated(result, partial(_replan, request))
    result._replanner = partial(_replanner, replace(request, shared=Shared()))
    return result


def _replanner(request: Request) -> Callable[[Captured], Plan]:
    """Return a function that plans a program of a request anew, with other marks.

    Its plans share what they can; the request, which a plan holds, shares nothing.
    """
    return partial(_replan, replace(request, shared=Shared()))


def _replan(request: Request, marked: Captured) -> Plan:
    """Plan a program of a request anew, with other marks."""
    marks = {
        new.name: new.mark
        for old, new in zip(request.captured.inputs, marked.inputs)
        if new.mark is not None and new.mark != old.mark
    }
    stored = {**request.stored, **marks} if request.on_processes else request.stored
    return _plan(replace(request, captured=marked, stored=stored))


def _plan(request: Request) -> Plan:
    """Run the passes up to the program of one device."""
    program = run(start_program(request), until=SCHEDULED)
    result = Plan(
        request.mesh,
        request.captured,
        program.sharded,
        program.graph,
        program.layouts,
        program.seconds,
        data_axes(request.captured, request.arguments) | request.stored_over,
        counts=program.counts,
    )
    result.request = replace(request, shared=Shared()) if is_default() else None
    return result


Plan._plan_again = staticmethod(_plan)  # the passes stand above Plan


def _device_of(captured: Captured) -> str:
    """Return the type of device of the inputs."""
    inputs = captured.graph.find_nodes(op="placeholder")
    return max((n.meta["val"].device.type for n in inputs), default="cpu")


def _check_option(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ShardingError(
            f"there is no {name} '{value}'; there are {', '.join(map(repr, allowed))}",
            where=user_line(),
        )


def _dump(plan: Plan) -> None:
    """Print a plan on standard error, as TORCHGSPMD_DUMP says."""
    level = dump_level()
    if level:
        dump_text(str(plan), "the plan")
    if level > 1:
        dump_text(
            program_text(plan.program_graph),
            "what each device runs, where communication begins and is waited for",
        )
    if level > 2:
        lines = [line for value in plan.layouts.spec for line in plan.layouts.explain(value)]
        dump_text("\n".join(lines), "who sharded what, and why")
