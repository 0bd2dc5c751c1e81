"""The way of a program, from capture to what a rank runs: PIPELINE, to be read from top to bottom.

A pass takes a program from the stage that it needs to the stage that it ensures; stages.py says
what holds there. After each pass `run` adds to the program's seconds, prints what changed
(TORCHGSPMD_DUMP=2) and verifies the graph (TORCHGSPMD_CHECK=1).

If a pass with `again` changes a program, those passes run once more. Alternatives run with one of
their passes and without it, and the cheaper program is taken.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import dropwhile
from typing import Any

from torch import fx

from ..capture.without_gc import without_gc
from ..comm.loop_call import copy_loops, loop_calls
from ..dump import dump_pass
from ..errors import ShardingError, did_you_mean, user_line
from ..plan import Plan
from ..rules import natively
from ..xla_backend.lower import unpartitioned
from .boundary import partition_program, propagate_program, start_program
from .localize.outline_loops import outline_loops
from .localize.outline_stages import outline_stages
from .localize.sink_exits import sink_exits
from .localize.stage_sends import stage_sends
from .lower.convert_boundary import convert_inputs, convert_outputs
from .lower.elide_copies import elide_copies
from .lower.fold_views import fold_views
from .lower.functional_reductions import functional_reductions
from .lower.gloo_all_to_all import gloo_all_to_all
from .lower.insert_rank_check import insert_rank_check
from .lower.list_rows import list_rows
from .lower.lower_collectives import lower_collectives
from .lower.lower_einsum import lower_einsum
from .lower.nll_backward import nll_backward
from .lower.reduce_in_bucket import reduce_in_bucket
from .lower.reuse_buffers import reuse_memory
from .lower.torch_bindings import torch_bindings
from .lower.wire_dtypes import wire_dtypes
from .pass_types import Alternatives, Pass, Step
from .program import Program, Rank, Request
from .program_passes import (
    balance_attention,
    bucket,
    fits_device,
    has_hosts,
    hierarchical_sums,
    localize,
    merge_axes,
    overlap,
    prefetch_rows,
    reduce_dtype,
    regather_weights,
    ring_keys,
    sent_bytes,
    split_axes,
    split_fused,
    split_groups,
    split_joint,
    split_products,
    splits_products,
)
from .schedule.attention_rings import attention_rings
from .schedule.collective_matmul import collective_matmul
from .schedule.start_wait import start_wait
from .stages import (
    ANNOTATED,
    CAPTURED,
    EXPANDED,
    LOCAL,
    LOWERED,
    PARTITIONED,
    RUNNABLE,
    SCHEDULED,
    Stage,
    drop_later_keys,
    verifies,
    verify,
)


def _is_native(p: Program) -> bool:
    return p.request.rng == "native"


def _is_torch(p: Program) -> bool:
    return p.rank.backend == "torch"


def _is_inductor(p: Program) -> bool:
    return p.rank.backend == "inductor"


def _of(run: Callable[[fx.Graph], fx.Graph | None]) -> Callable[[Program], fx.Graph | None]:
    """Return the `run` of a pass that needs nothing but the graph."""
    return lambda p: run(p.graph)


_REGATHER = {
    "auto": ("regather_weights", None),
    "always": (None,),
    "all": (None,),
    "never": ("regather_weights",),
}

PIPELINE: tuple[Step, ...] = (
    # Layouts and collectives. A product whose result is cut may be computed piece by piece, and
    # groups of rows where their matrices are.
    Alternatives(
        order=lambda p: (None, "split_products", "split_groups"),
        enough=lambda p: not p.changed & {"split_products", "split_groups"},
        cost=sent_bytes,
        passes=(
            Pass("decompose_ops", lambda p: p.request.expand(p.graph), CAPTURED, EXPANDED),
            Pass("propagate", propagate_program, EXPANDED, ANNOTATED),
            Pass("split_groups", split_groups, ANNOTATED, ANNOTATED, again=("propagate",)),
            Pass("split_fused", split_fused, ANNOTATED, ANNOTATED, again=("propagate",)),
            Pass(
                "balance_attention",
                balance_attention,
                ANNOTATED,
                ANNOTATED,
                optional=("balance_attention",),
                again=("propagate",),
            ),
            Pass(
                "split_products",
                split_products,
                ANNOTATED,
                ANNOTATED,
                again=("propagate",),
                changes=splits_products,
            ),
            Pass("split_axes", split_axes, ANNOTATED, ANNOTATED, again=("propagate", "split_axes")),
            Pass(
                "reduce_dtype",
                reduce_dtype,
                ANNOTATED,
                ANNOTATED,
                when=lambda p: p.request.reduce_dtype is not None,
                again=("propagate",),
            ),
            Pass("partition", partition_program, ANNOTATED, PARTITIONED),
            Pass("merge_axes", merge_axes, PARTITIONED, PARTITIONED),
            Pass("stage_sends", lambda p: stage_sends(p.graph, p.mesh), PARTITIONED, PARTITIONED),
        ),
    ),
    Pass("draw_natively", _of(natively), PARTITIONED, PARTITIONED, when=_is_native),
    # The program of one device. Weights are gathered again if a GPU's memory would not suffice.
    Alternatives(
        order=lambda p: _REGATHER[p.request.regather],
        enough=fits_device,
        cost=None,
        passes=(
            Pass("hierarchical_sums", hierarchical_sums, PARTITIONED, PARTITIONED, when=has_hosts),
            Pass("regather_weights", regather_weights, PARTITIONED, PARTITIONED),
            Pass("ring_keys", ring_keys, PARTITIONED, PARTITIONED, optional=("attention_rings",)),
            Pass("localize", localize, PARTITIONED, LOCAL),
            Pass("attention_rings", _of(attention_rings), LOCAL, LOCAL),
            Pass("sink_exits", _of(sink_exits), LOCAL, LOCAL),
            Pass("outline_loops", lambda p: outline_loops(p.graph, p.mesh), LOCAL, LOCAL),
            Pass("outline_stages", lambda p: outline_stages(p.graph, p.mesh), LOCAL, LOCAL),
            Pass(
                "collective_matmul",
                lambda p: collective_matmul(p.graph, p.mesh, p.hardware),
                LOCAL,
                LOCAL,
                optional=("collective_matmul",),
                in_loops=True,
            ),
            Pass("bucket", bucket, LOCAL, LOCAL, ("bucket",), in_loops=True),
            Pass("start_wait", _of(start_wait), LOCAL, SCHEDULED, in_loops=True),
            Pass("prefetch_rows", prefetch_rows, SCHEDULED, SCHEDULED, optional=("prefetch",)),
            Pass("overlap", overlap, SCHEDULED, SCHEDULED, optional=("overlap", "prefetch")),
        ),
    ),
    # A Plan has the program up to here; its text is the same for all ranks. Now for one of them.
    Pass("elide_copies", _of(elide_copies), SCHEDULED, SCHEDULED, in_loops=True),
    Pass(
        "lower_collectives",
        lambda p: lower_collectives(p.graph, p.rank.groups),
        SCHEDULED,
        LOWERED,
        in_loops=True,
    ),
    Pass(
        "lower_einsum",
        lambda p: lower_einsum(p.graph, p.request.device),
        LOWERED,
        LOWERED,
        in_loops=True,
    ),
    Pass("fold_views", _of(fold_views), LOWERED, LOWERED, in_loops=True),
    Pass("list_rows", _of(list_rows), LOWERED, LOWERED),
    Pass("convert_inputs", convert_inputs, LOWERED, LOWERED),
    Pass("convert_outputs", convert_outputs, LOWERED, LOWERED),
    Pass("split_joint", split_joint, LOWERED, LOWERED),
    # The forward and the backward, each by itself.
    Pass("insert_rank_check", insert_rank_check, LOWERED, LOWERED, when=_is_torch),
    Pass("nll_backward", _of(nll_backward), LOWERED, LOWERED, when=_is_torch, in_loops=True),
    Pass("reuse_buffers", reuse_memory, LOWERED, RUNNABLE, when=_is_torch, in_loops=True),
    Pass(
        "functional_reductions",
        _of(functional_reductions),
        LOWERED,
        RUNNABLE,
        when=_is_inductor,
        in_loops=True,
    ),
    Pass("reduce_in_bucket", _of(reduce_in_bucket), RUNNABLE, RUNNABLE, when=_is_torch),
    Pass(
        "gloo_all_to_all",
        lambda p: gloo_all_to_all(p.graph, p.rank.groups),
        RUNNABLE,
        RUNNABLE,
        in_loops=True,
    ),
    Pass("wire_dtypes", _of(wire_dtypes), RUNNABLE, RUNNABLE, in_loops=True),
    Pass("torch_bindings", _of(torch_bindings), RUNNABLE, RUNNABLE, when=_is_torch, in_loops=True),
)

_current: ContextVar[tuple[Step, ...]] = ContextVar("pipeline", default=PIPELINE)


# --------------------------------------------------------------------------------------- the runner


@without_gc()
def run(
    program: Program, until: Stage | None = None, steps: Sequence[Step] | None = None
) -> Program:
    """Return the program after the steps that follow its stage.

    until: the stage to stop at, as soon as a step reaches it. steps: other ones than PIPELINE.
    """
    steps = _current.get() if steps is None else steps
    if (first := program.stage) == CAPTURED:
        _inspect(program, "capture")
    for step in dropwhile(lambda step: step.needs != first, steps):
        if program.stage == until:
            break
        if isinstance(step, Pass):
            _run_pass(step, program, steps)
        else:
            program = _run_alternatives(step, program)
    return program


def _run_alternatives(step: Alternatives, program: Program) -> Program:
    """Run the passes with all of them and without one; return the program that is taken."""
    ways: list[Program] = []
    before: dict[str, Program] = {}  # pass -> the program before it, in the first way
    for left_out in step.order(program):
        if ways and left_out is not None and left_out not in ways[0].changed:
            continue
        passes = [each for each in step.passes if each.name != left_out]
        way, done = copy.copy(program), 0
        if left_out is not None and left_out in before:
            way, done = before[left_out], [p.name for p in step.passes].index(left_out)
        for each in passes[done:]:
            if not ways and each.changes(way):
                before[each.name] = way.fork()
            _run_pass(each, way, passes)
        ways.append(way)
        if step.enough(way):
            break
    return min(ways, key=step.cost) if step.cost else ways[-1]


def _run_pass(step: Pass, program: Program, steps: Sequence[Step]) -> None:
    """Run a pass, then the passes that have to run again if it changed the program."""
    if not step.when(program) or step.optional and program.request.skip_passes >= {*step.optional}:
        return
    siblings = [each for each in steps if isinstance(each, Pass)]
    again = [each for name in step.again for each in siblings if each.name == name]
    for half in (*_halves(program), *(_bodies(program) if step.in_loops else ())):
        if half.stage != step.needs:
            raise AssertionError(
                f"{step.name} needs stage {step.needs.name}, not {half.stage.name}"
            )
        begin = time.perf_counter()
        graph = step.run(half)
        program.seconds[step.name] = (
            program.seconds.get(step.name, 0.0) + time.perf_counter() - begin
        )
        half.stage = step.ensures
        if graph is not None:
            if half.call is not None:
                half.call.graph = graph
            half.graph, half.changed = graph, half.changed | {step.name}
            if again:
                half.stage = again[0].needs
                drop_later_keys(graph, half.stage)
    _inspect(program, step.name)
    for each in again if program.stage != step.ensures else ():
        _run_pass(each, program, steps)


def _inspect(program: Program, name: str) -> None:
    """Print and verify a program after the pass of that name, if the environment says so."""
    for half in _halves(program):
        dump_pass(half, name)
        if verifies():
            verify(half.graph, half.stage, half.mesh)


def _halves(program: Program) -> tuple[Program, ...]:
    """Return the forward and the backward, or the program alone while it has both."""
    return (program, program.backward) if program.backward else (program,)


def _bodies(program: Program) -> Iterator[Program]:
    """Yield the bodies of the loops of a program, those in loops first, at its stage."""
    for half in _halves(program):
        for each in (each for _, call in loop_calls(half.graph) for each in call.bodies):
            body = copy.copy(half)
            body.graph, body.call, body.backward = each.graph, each, None
            yield from _bodies(body)
            yield body


# ---------------------------------------------------------------------------- what there is to run


def is_default() -> bool:
    """Return whether no pass was added (with_pass)."""
    return _current.get() is PIPELINE


def passes() -> tuple[Pass, ...]:
    """Return all passes, in the order of the pipeline."""
    steps = _current.get()
    return tuple(p for s in steps for p in (s.passes if isinstance(s, Alternatives) else (s,)))


def lower_plan(plan: Plan, rank: Rank, plain: Sequence[bool]) -> Program:
    """Return the program of one rank. plain: as in Request. The plan's own stays as it is."""
    device = rank.groups.device_type
    graph = plan.local_graph()
    copy_loops(graph)
    request = Request(plan.captured, plan.mesh, plain=plain, device=device)
    program = Program(request, graph, plan.mesh, SCHEDULED, seconds=plan.seconds)
    program.rank, program.boundary = rank, plan.boundary
    return run(program)


def annotate_for_xla(request: Request, pin: str) -> Program:
    """Return the program that XLA partitions. pin="all": our partitioner chooses all layouts."""
    names = {"decompose_ops", "propagate", "split_fused"}
    if pin == "all":
        names |= {"split_axes", "partition", "merge_axes"}
    request = replace(request, expand=unpartitioned, keep_marks=True)
    return run(start_program(request), steps=[each for each in passes() if each.name in names])


def skippable() -> list[str]:
    """Return the names that `skip_passes` takes."""
    return sorted({name for each in passes() for name in each.optional})


@contextmanager
def with_pass(new: Pass, *, after: str) -> Generator[None, None, None]:
    """Run a pass behind the one of the name `after` while in this context.

    It runs wherever that one does, in alternatives too. docs/adding_a_pass.md has an example.
    """
    names = [each.name for each in passes()]
    if after not in names:
        raise ShardingError(
            f"there is no pass '{after}'", where=user_line(), fix=did_you_mean(after, names)
        )
    token = _current.set(tuple(_with_pass(_current.get(), new, after)))
    try:
        yield
    finally:
        _current.reset(token)


def _with_pass(steps: Sequence[Any], new: Pass, after: str) -> Iterator[Any]:
    for step in steps:
        if isinstance(step, Alternatives):
            yield replace(step, passes=tuple(_with_pass(step.passes, new, after)))
            continue
        yield step
        if step.name == after:
            yield new
