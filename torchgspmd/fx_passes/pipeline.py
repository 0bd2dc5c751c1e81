"""PIPELINE: a program's way from capture to a rank, to be read from top to bottom.

A pass takes a program from the stage that it needs to the stage that it ensures. stages.py has the
invariants, and pass_runner.py runs the rows. If a pass with `again` changes a program, those passes
run once more. Alternatives run with all their passes and without one, and the cheaper is taken.

A row names the feature that it belongs to, which adds the pass itself (FEATURE_PASSES). `after` and
`before` say which rows it has to follow and to precede, and `because` says why; a test checks
them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from ..errors import ShardingError, did_you_mean
from ..rules import natively
from .boundary import partition_program, propagate_program
from .expand.keep_dims import keep_dims, keeps_dims
from .expand.reduce_dtype import reduce_dtype
from .expand.split_axes import merge_axes, split_axes
from .expand.split_fused import split_fused
from .expand.split_products import split_products, splits_products
from .expand.store_parts import store_parts
from .expand.store_states import store_states
from .expand.undivided import has_pairs, has_sharded_parts, work_of
from .localize.localize_graph import localize_program
from .loop_call import copy_loops
from .lower.lowering import LOWERING
from .partition.insert_collectives import hierarchical_sums, regather_weights
from .pass_runner import run_steps
from .pass_types import (
    Alternatives,
    Pass,
    Step,
    feature_pass,
    fits_device,
    has_hosts,
    on_graph,
    price,
    rows_of,
    sent_bytes,
    with_row,
    without_rows,
    work,
)
from .program import Program, Rank, Request, RunnablePlan
from .schedule.bucket import bucket, start_wait
from .schedule.collective_matmul import collective_matmul
from .schedule.overlap import overlap_program
from .schedule.recompute import recompute
from .stages import (
    ANNOTATED,
    CAPTURED,
    EXPANDED,
    LOCAL,
    PARTITIONED,
    SCHEDULED,
    Stage,
)


def _is_native(p: Program) -> bool:
    return p.request.rng == "native"


_KEPT = "regather_weights"  # the pass that is left out where weights are kept
_REGATHER = {"auto": (_KEPT, None), "always": (None,), "all": (None,), "never": (_KEPT,)}

_PROPAGATE = ("propagate", "split_fused", "keep_dims")  # again, for layouts of parts
_TRIED = "split_sequences batch_lanes split_products split_groups split_vectors keep_dims".split()

PIPELINE: tuple[Step, ...] = (
    # Layouts and collectives. A product whose result is cut may be computed piece by piece, groups
    # of rows where their matrices are, and a sort or a transform of a vector by exchanges.
    Alternatives(
        order=lambda p: (None, *_TRIED),
        enough=lambda p: not p.changed & {*_TRIED},
        cost=sent_bytes,
        passes=(
            Pass("decompose_ops", lambda p: p.request.expand(p.graph), CAPTURED, EXPANDED),
            Pass("propagate", propagate_program, EXPANDED, ANNOTATED),
            Pass(
                "store_parts",
                store_parts,
                ANNOTATED,
                again=("propagate",),
                before=("keep_dims", "split_products"),
                because="the parts are dimensions that keep_dims keeps, and leave no slice to move",
            ),
            Pass(
                "store_states",
                store_states,
                ANNOTATED,
                when=lambda p: bool(p.request.states),
                again=("propagate",),
                before=("batch_lanes",),
                because="lanes are exchanged between the layouts in which their states are stored",
            ),
            feature_pass(
                "recurrences",
                "split_sequences",
                ANNOTATED,
                has_work=has_sharded_parts,
                again=("propagate",),
                before=("split_fused",),
                because="a scan inside of a part needs no decomposition once parts are not cut",
            ),
            feature_pass(
                "lanes",
                "batch_lanes",
                ANNOTATED,
                has_work=lambda p: work_of(p).has_twins(),
                again=("propagate",),
                limit=price,
                before=("split_fused",),
                because="an operation on whole matrices that lanes divide needs no decomposition",
            ),
            feature_pass(
                "attention",
                "position_masks",
                ANNOTATED,
                optional=("position_masks",),
                again=("propagate",),
                before=("balance_attention",),
                because="it is a mask of flex_attention that planning bounds, and tokens follow",
            ),
            feature_pass(
                "pairs",
                "ring_pairs",
                ANNOTATED,
                has_work=has_pairs,
                optional=("ring_pairs",),
                again=("propagate", "ring_pairs"),
                before=("split_fused",),
                because="blocks need no decomposition of what is whole in each of them",
            ),
            feature_pass(
                "experts",
                "split_groups",
                ANNOTATED,
                again=("propagate",),
                before=("split_fused",),
                because="split_fused would decompose the blocked products of these groups",
            ),
            Pass("split_fused", split_fused, ANNOTATED, again=("propagate",)),
            # Behind it: sums of a loss are simplified on the operations that the program has. By
            # bytes alone, a way with gathered token ids and a replicated model would win.
            Pass(
                "keep_dims",
                keep_dims,
                ANNOTATED,
                again=_PROPAGATE,
                changes=keeps_dims,
                limit=work,
            ),
            Pass("split_vectors", partial(split_fused, tried=True), ANNOTATED, again=_PROPAGATE),
            feature_pass(
                "attention",
                "balance_attention",
                ANNOTATED,
                optional=("balance_attention",),
                again=("propagate",),
                after=("split_fused",),
                because="its cut needs the operations as they will run",
            ),
            Pass(
                "split_products",
                lambda p: split_products(p.graph, p.layouts, p.rules),
                ANNOTATED,
                again=("propagate",),
                changes=lambda p: splits_products(p.graph, p.layouts, p.rules),
                after=("split_fused",),
                before=("split_axes",),
                because="a product that is cut blocks no axis, so no axis is split for it",
            ),
            Pass(
                "split_axes",
                split_axes,
                ANNOTATED,
                again=("propagate", "split_axes"),
                before=("partition",),
                because="the partition chooses among the parts of an axis",
            ),
            Pass(
                "reduce_dtype",
                reduce_dtype,
                ANNOTATED,
                when=lambda p: p.request.reduce_dtype is not None,
                again=("propagate",),
                before=("partition",),
                because="the partition counts the bytes of a sum in the dtype in which it is sent",
            ),
            Pass("partition", partition_program, ANNOTATED, PARTITIONED),
            Pass(
                "merge_axes",
                merge_axes,
                PARTITIONED,
                after=("partition",),
                because="the partition may use a part of an axis; later passes see whole ones",
            ),
            feature_pass(
                "pipelines",
                "stage_sends",
                PARTITIONED,
                after=("merge_axes",),
                because="a step names an axis of the mesh that the user asked for",
            ),
        ),
    ),
    Pass("draw_natively", on_graph(natively), PARTITIONED, when=_is_native),
    # The program of one device. Weights are gathered again if a GPU's memory would not suffice.
    Alternatives(
        order=lambda p: _REGATHER[p.request.regather],
        enough=fits_device,
        cost=None,
        passes=(
            Pass(
                "hierarchical_sums",
                lambda p: hierarchical_sums(p.graph, p.mesh, p.hardware),
                PARTITIONED,
                when=has_hosts,
            ),
            Pass(
                "regather_weights",
                lambda p: regather_weights(p.graph, p.request.regather == "all"),
                PARTITIONED,
            ),
            feature_pass(
                "pipelines",
                "regather_in_stages",
                PARTITIONED,
                after=("regather_weights",),
                because="stages gather in each microbatch where weights are gathered again",
            ),
            feature_pass(
                "attention",
                "ring_keys",
                PARTITIONED,
                optional=("attention_rings",),
                after=("regather_weights",),
                because="a gather of keys that is repeated already is not repeated again",
            ),
            Pass("localize", localize_program, PARTITIONED, LOCAL),
            feature_pass(
                "attention",
                "attention_rings",
                LOCAL,
                after=("ring_keys",),
                before=("outline_loops", "start_wait"),
                because="it replaces gathers that ring_keys marked, wherever a loop has them",
            ),
            feature_pass(
                "loops",
                "sink_exits",
                LOCAL,
                before=("outline_loops",),
                because="moves at a body's end leave it before it becomes a program of its own",
            ),
            # It copies operations from a loop of the forward to one of the backward.
            Pass("recompute", recompute, LOCAL, when=lambda p: p.request.has_budget),
            feature_pass(
                "loops",
                "outline_loops",
                LOCAL,
                before=("outline_stages", "collective_matmul", "bucket", "start_wait"),
                because="these passes run once on each body",
            ),
            feature_pass(
                "pipelines",
                "outline_stages",
                LOCAL,
                in_loops=True,
                after=("stage_sends", "outline_loops"),
                before=("collective_matmul", "bucket", "start_wait"),
                because="it cuts the body of a loop into pieces, each a program for these passes",
            ),
            feature_pass(
                "pipelines",
                "join_stages",
                LOCAL,
                optional=("join_stages",),
                in_loops=True,
                after=("outline_stages",),
                before=("split_exchanges",),
                because="exchanges need no parts where the other half of a pair hides them",
            ),
            feature_pass(
                "exchanges",
                "split_exchanges",
                LOCAL,
                optional=("split_exchanges",),
                in_loops=True,
                after=("outline_loops", "outline_stages"),
                before=("start_wait",),
                because="it cuts collectives, which have one node until they start",
            ),
            Pass(
                "collective_matmul",
                lambda p: collective_matmul(p.graph, p.mesh, p.hardware),
                LOCAL,
                optional=("collective_matmul",),
                in_loops=True,
                before=("bucket",),
                because="a gather that becomes a ring must not be part of a bucket",
            ),
            Pass(
                "bucket",
                lambda p: bucket(p.graph, p.mesh, p.hardware, p.captured.has_backward),
                LOCAL,
                optional=("bucket",),
                in_loops=True,
                before=("start_wait",),
                because="one start sends a bucket",
            ),
            Pass("start_wait", on_graph(start_wait), LOCAL, SCHEDULED, in_loops=True),
            feature_pass(
                "loops",
                "prefetch_rows",
                SCHEDULED,
                optional=("prefetch",),
                before=("overlap",),
                because="overlap moves the starts that stay in their iteration",
            ),
            Pass("overlap", overlap_program, SCHEDULED, optional=("overlap", "prefetch")),
        ),
    ),
    *LOWERING,
)

_current: ContextVar[tuple[Step, ...]] = ContextVar("pipeline", default=PIPELINE)


def run(
    program: Program, until: Stage | None = None, steps: Sequence[Step] | None = None
) -> Program:
    """Return the program after the steps that follow its stage.

    until: the stage to stop at, as soon as a step reaches it. steps: other ones than PIPELINE.
    """
    return run_steps(program, _current.get() if steps is None else steps, until)


def is_default() -> bool:
    """Return whether no pass was added (with_pass)."""
    return _current.get() is PIPELINE


def passes() -> tuple[Pass, ...]:
    """Return all passes, in pipeline order."""
    return rows_of(_current.get())


def lower_plan(plan: RunnablePlan, rank: Rank, plain: Sequence[bool]) -> Program:
    """Return one rank's program. plain: see Request. The plan's own program stays as it is."""
    graph = plan.local_graph()
    # Passes write into loop bodies, which the plan's graph has, too.
    copy_loops(graph)
    request = Request(plan.captured, plan.mesh, plain=plain, device=rank.groups.device_type)
    program = Program(request, graph, plan.mesh, SCHEDULED, seconds=plan.seconds)
    program.rank, program.boundary = rank, plan.boundary
    return run(program)


def skippable() -> list[str]:
    """Return the names that `skip_passes` takes."""
    return sorted({name for each in passes() for name in each.optional})


@contextmanager
def with_pass(new: Pass, *, after: str) -> Generator[None, None, None]:
    """Run a pass behind the one named `after` while in this context.

    It runs wherever that one does, in alternatives too. docs/adding_a_pass.md has an example.
    """
    names = [each.name for each in passes()]
    if after not in names:
        raise ShardingError.here(f"there is no pass '{after}'", fix=did_you_mean(after, names))
    token = _current.set(tuple(with_row(_current.get(), new, after)))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def without_passes(feature: str) -> Generator[None, None, None]:
    """Remove a feature's rows from the pipeline while in this context."""
    token = _current.set(tuple(without_rows(_current.get(), feature)))
    try:
        yield
    finally:
        _current.reset(token)
