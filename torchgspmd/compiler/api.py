"""Compile a function or module for a mesh: capture, the passes, a plan."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..capture import (
    BUFFER,
    PARAMETER,
    ArgumentSizes,
    Captured,
    capture_sized,
    leaf_names,
    opened,
    sizes_of,
)
from ..capture.trace_context import without_gc
from ..comm.hardware import Hardware
from ..compat.private_apis import PLAN, check_torch
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, did_you_mean, is_misspelt
from ..fx_passes.boundary import start_program
from ..fx_passes.partition.cost_constants import CostConstants
from ..fx_passes.pass_runner import dump_level, dump_text
from ..fx_passes.pipeline import is_default, run, skippable
from ..fx_passes.printer import program_text
from ..fx_passes.program import Request, Shared
from ..fx_passes.replication_report import data_axes
from ..fx_passes.schedule.liveness import check_budget
from ..fx_passes.stages import SCHEDULED, verifies
from ..layout.layout_rules import MeshLayout, bound, mesh_of
from ..layout.mark import is_free_state, layout_of
from ..layout.mesh import Mesh
from ..layout.prefix_specs import spread_inputs
from ..shard_spec import ShardSpec
from .agreement import Agreement
from .fix_candidates import check_communication, report_replicated
from .options import NAMED, Options, check_choice, documented, is_an_option, rows_for
from .plan import Plan
from .plan_summary import idle_axes_text
from .planned_call import OtherSizes, PlannedCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .option_types import PlanOptions

MUCH_LESS = 2  # times fewer bytes; for less, the batch stays divided
ABOUT = 1.05  # times the bytes; for them, states in parts may save work


@documented("plan")
def plan(
    fn: Callable | nn.Module,
    *args: object,
    mesh: Mesh | DeviceMesh | MeshLayout,
    in_specs: object = None,
    out_specs: object = None,
    **kwargs: Unpack[PlanOptions],
) -> Plan:
    """Compile a function or module for a mesh, without devices.

    A module's plan reads the state in the module's attributes now, and does not change it.
    Plan.simulate does change it.

    Args:
        fn: The function or module to compile.
        args: Positional arguments for fn. Tensors are real, fake or meta, with global shapes.
        mesh: The devices, also as torch's DeviceMesh, or a Layout on a mesh: specs have logical
            names then.
        in_specs: Layouts for the arguments, as a pytree prefix for args. A mapping gives all
            arguments by name. Leaves are specs in string form, or None where propagation decides.
            "auto": the batch axes ("data", "dp", ...) divide all leading dimensions.
        out_specs: Layouts for the result, as a pytree prefix. None: a module's results are whole,
            as `parallelize` returns them, and a function's stay as they are computed. "same": as
            they are computed.
        {options}
        kwargs: Keyword arguments for fn.

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
    asked = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    chosen, keywords = _options_among(kwargs, fn)
    options = Options.read("plan", chosen)
    if options.shard_updates:
        raise ShardingError.here(
            f"shard_updates={options.shard_updates!r} marks weights, and a plan changes no model",
            fix="pass it to parallelize; for a plan, mark the weights with that axis",
        )
    layout = layout_of(fn, mesh)
    if isinstance(mesh, MeshLayout):
        in_specs, out_specs = mesh.spec(in_specs), mesh.spec(out_specs)
    mesh = mesh_of(mesh)
    # Before capture, which already needs private parts of torch.
    check_torch(PLAN)
    if not isinstance(fn, nn.Module):
        _check_of_function(options)
    args, keywords = opened((args, keywords))
    specs = spread_inputs(in_specs, args, keywords, mesh, fn)
    start = time.perf_counter()
    leaves = pytree.tree_leaves((args, keywords))
    sizes = options.dynamic
    if not isinstance(sizes, ArgumentSizes):
        named = sizes if isinstance(sizes, Mapping) else None
        sizes = sizes_of(named, leaf_names(fn, args, keywords), leaves)
    with bound(layout):
        captured = capture_sized(
            fn,
            args,
            keywords,
            mesh,
            grad=options.grad,
            param_dtype=options.param_dtype,
            dynamic=sizes,
            microbatches=options.microbatches,
        )
    seconds = time.perf_counter() - start
    if layout is not None:
        layout.check_used()
    # Weights on meta have no device to tell: such a plan is for GPUs, where large models run.
    has_meta_tensor = any(isinstance(t, Tensor) and t.is_meta for t in (*captured.tensors, *leaves))
    result = compile_plan(
        captured,
        mesh,
        [*specs, *[None for _ in captured.state_inputs]],
        options,
        out_specs=out_specs,
        of_module=isinstance(fn, nn.Module),
        device="meta" if has_meta_tensor else None,
    )
    result.seconds = {"capture": seconds, **result.seconds}
    changes = "microbatches=" * (options.microbatches > 1) or "param_dtype=" * bool(
        options.param_dtype
    )
    result.planned_call = PlannedCall(fn, args, keywords, changes, PlannedCall.modes_now())
    # Marks by in_specs show that the user thought about the arguments: then no warning.
    if in_specs is None:
        for line in idle_axes_text(mesh, result.idle_axes):
            warnings.warn(line, stacklevel=2)
    # Sizes 0 and 1 broadcast, so calls with them need programs of their own, planned on demand.
    result._other_sizes = OtherSizes(
        captured,
        lambda sizes, args, keywords: plan(
            fn, *args, **{**asked, **chosen, "dynamic": sizes, **keywords}
        ),
    )
    return result


def _options_among(
    given: Mapping[str, object], fn: Callable | nn.Module
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into plan's options and fn's own arguments."""
    names = [row.name for row in rows_for("plan")]
    try:
        function = fn.forward if isinstance(fn, nn.Module) else fn
        takes = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C: nobody knows its arguments
        takes = None
    options = {n: v for n, v in given.items() if is_an_option(n, v, n in (takes or ()))}
    keywords = {name: value for name, value in given.items() if name not in options}
    for name in keywords:
        known = [*NAMED["plan"], *names]
        if takes is None and is_misspelt(name, known):
            takes = {}
        if takes is None or name in takes or any(p.kind == p.VAR_KEYWORD for p in takes.values()):
            continue
        raise ShardingError.here(
            f"plan has no option '{name}', and the function no such argument",
            fix=did_you_mean(name, [*known, *takes]),
        )
    return options, keywords


def _check_of_function(options: Options) -> None:
    """Raise ShardingError for options that only modules have."""
    if options.grad:
        raise ShardingError.here(
            "plan(grad=True) takes a module", fix="call torch.autograd.grad inside of the function"
        )
    if options.param_dtype or options.reduce_dtype:
        raise ShardingError.here(
            "param_dtype and reduce_dtype are options for modules: a function has no parameters",
            fix="pass the module, or cast inside of the function",
        )


@without_gc()
def compile_plan(
    captured: Captured,
    mesh: Mesh,
    arguments: list[ShardSpec | None],
    options: Options = Options(),
    out_specs: object = None,
    stored: Mapping[str, ShardSpec] | None = None,
    plain: Sequence[bool] = (),
    device: str | None = None,
    shared: Shared | None = None,
    hosts: int = 0,
    bound: frozenset[str] = frozenset(),
    of_module: bool = False,
) -> Plan:
    """Run the passes over a captured program.

    arguments: a spec, or None, for each argument. of_module: results without a spec are whole, as
    parallelize returns them. stored: parameter and buffer layouts, by name. plain: for each
    argument whether every rank has the whole tensor; its gradient is whole then. device: the device
    type to plan for ("meta": GPUs); by default the input tensors' type. shared: results that equal
    programs' plans share, filled here. hosts: the devices on a host, if there are several hosts and
    options do not say it. bound: as in Request.
    """
    advanced, memory = options.advanced, options.memory
    for name in advanced.skip_passes:
        check_choice("pass", name, skippable())
    axis, hardware = options.shard_updates, options.hardware
    request = Request(
        captured=captured,
        mesh=mesh,
        arguments=arguments,
        out_specs=out_specs,
        stored=stored if stored is not None else _stored_unmarked(captured, options),
        bound=bound,
        of_module=of_module,
        plain=plain,
        rng=advanced.rng,
        regather=advanced.regather,
        skip_passes=frozenset(advanced.skip_passes),
        constants=CostConstants().override(advanced.costs),
        device=device or _device_of(captured),
        reduce_dtype=options.reduce_dtype,
        stored_over=frozenset([axis] if axis else []),
        states=_free_states(captured) - bound if axis is not False else frozenset(),
        hardware=None if hardware is None else Hardware.of(hardware),
        hosts=hosts,
        recompute=memory.recompute,
        offload=memory.offload,
        memory_budget=memory.bytes,
        captures=options.captures,
        shared=shared or Shared(),
    )
    result = _plan(request)
    _dump(result)
    if options.strict and result.replicated_ops:
        raise report_replicated(result, partial(_replan, request))
    if isinstance(options.communication, Agreement):
        check_communication(options.communication, result, partial(_replan, request))
    # Without Shared: a plan may live long, and would keep the caches of its planning alive.
    result._replanner = partial(_replanner, replace(request, shared=Shared()))
    certificate = result.verify() if options.check.verify or verifies(2) else None
    if options.check.verify and certificate is not None and not certificate.complete:
        warnings.warn(f"verify: {certificate}", stacklevel=2)
    return result


def _replanner(request: Request) -> Callable[[Captured], Plan]:
    """Return a function that replans a request's program with other marks.

    Its plans share as much as they can; the request, which a plan holds, shares nothing.
    """
    return partial(_replan, replace(request, shared=Shared()))


def _replan(request: Request, marked: Captured) -> Plan:
    marks = {
        new.name: new.mark
        for old, new in zip(request.captured.inputs, marked.inputs)
        if new.mark is not None and new.mark != old.mark
    }
    # The new marks become required layouts: `stored` stands above a mark.
    return _plan(replace(request, captured=marked, stored={**request.stored, **marks}))


def _plan(request: Request) -> Plan:
    """Plan, with the batch where marks or in_specs divide it, unless few rows save much."""
    result = _planned(request)
    if not result.overruled_marks:
        return result
    later = dict.fromkeys(axis for axis, _ in result.overruled_marks)
    inputs = [
        replace(each, mark=_after_batch(each.mark, [*later]))
        if each.kind == PARAMETER and each.mark is not None
        else each
        for each in request.captured.inputs
    ]
    try:
        kept = _planned(replace(request, captured=replace(request.captured, inputs=inputs)))
    except ShardingError:  # it exceeds the memory budget
        return result
    is_kept = not kept.overruled_marks and kept.sent_bytes < MUCH_LESS * result.sent_bytes
    return kept if is_kept else result


def _after_batch(mark: ShardSpec, axes: Sequence[str]) -> ShardSpec:
    """Return a weight's mark whose dimensions on these axes are propagated behind the batch."""
    dims = zip(mark.dims, mark.priorities or (0,) * len(mark.dims))
    return mark.with_priorities(tuple(p or int(not {*d}.isdisjoint(axes)) for d, p in dims))


def _planned(request: Request) -> Plan:
    """Run the passes up to the program for one device; states are in parts if it sends less."""
    result = _program(request)
    if all("chosen" not in node.meta for node in result.sharded.find_nodes(op="placeholder")):
        return result
    try:
        kept = _program(replace(request, states=frozenset()))
    except ShardingError:  # it exceeds the memory budget
        return result
    sent, most = result.sent_bytes, kept.sent_bytes
    # By propagation alone it may have states in parts, too, which parallelize would not choose.
    rows = zip(kept.captured.inputs, kept.input_layouts)
    in_parts = any(i.name in request.states and s != i.mark and s.sharding_axes for i, s in rows)
    is_better = sent < most or sent <= ABOUT * most and _price(result) < _price(kept)
    return result if is_better or in_parts and sent <= most else kept


def _price(plan: Plan) -> float:
    """Return the bytes that a device sends, and those that a link would send while it works."""
    constants = plan.request.constants if plan.request else CostConstants()
    decisions = plan.sharded.output_node().meta["decisions"]
    work = sum(strategy.work for strategy in decisions.strategies.values())
    return plan.sent_bytes + work * constants.flops_per_byte / constants.link_flops_per_byte


def _program(request: Request) -> Plan:
    program = run(start_program(request), until=SCHEDULED)
    if request.has_budget:
        check_budget(program)
    result = Plan(
        mesh=request.mesh,
        captured=request.captured,
        sharded=program.sharded,
        program=program.graph,
        layouts=program.layouts,
        seconds=program.seconds,
        data_axes=data_axes(request.captured, request.arguments) | request.stored_over,
        counts=program.counts,
    )
    # Only the default passes can be named in a file; others leave a plan that no file can replan.
    result.request = replace(request, shared=Shared()) if is_default() else None
    result._gathers_by_default = request.of_module and request.out_specs is None
    return result


Plan._plan_again = staticmethod(_plan)  # the passes stand above Plan


def _device_of(captured: Captured) -> str:
    inputs = captured.graph.find_nodes(op="placeholder")
    # In alphabetical order cpu, cuda, meta: one input on a GPU makes it a program for GPUs.
    return max((n.meta["val"].device.type for n in inputs), default="cpu")


def _stored_unmarked(captured: Captured, options: Options) -> dict[str, ShardSpec]:
    """Return layouts, by name, for weights without a mark, if the options ask for any."""
    weights = [each for each in captured.inputs if each.kind in (PARAMETER, BUFFER)]
    if options.advanced.unmarked == "propagated":
        states = _free_states(captured) if options.shard_updates is False else ()
        weights = [each for each in weights if each.name in states]
    return {w.name: ShardSpec.replicated(len(w.shape)) for w in weights if w.mark is None}


def _free_states(captured: Captured) -> frozenset[str]:
    """Return the names of optimizer states that the planner may store in parts."""
    pairs = zip(captured.inputs, captured.module_tensors())
    return frozenset(inp.name for inp, tensor in pairs if is_free_state(tensor))


def _dump(plan: Plan) -> None:
    """Print a plan on standard error, at the level TORCHGSPMD_DUMP sets."""
    level = dump_level()
    if level:
        dump_text(plan.text(full=True), "the plan")
    if level > 1:
        dump_text(
            program_text(plan.program_graph),
            "what each device runs, where communication begins and is waited for",
        )
    if level > 2:
        lines = [line for value in plan.layouts.spec for line in plan.layouts.explain(value)]
        dump_text("\n".join(lines), "who sharded what, and why")
