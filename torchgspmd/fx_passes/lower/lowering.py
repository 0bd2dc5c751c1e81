"""LOWERING: the second half of PIPELINE, from a Plan's program to the one that a rank runs."""

from __future__ import annotations

from ..pass_types import Pass, feature_pass, on_graph
from ..program import Program
from ..stages import LOWERED, RUNNABLE, SCHEDULED
from .convert_boundary import convert_inputs, convert_outputs, split_halves
from .insert_rank_check import insert_rank_check
from .local_rewrites import (
    elide_copies,
    fold_views,
    functional_reductions,
    index_rows,
    nll_backward,
    separate_sums,
)
from .lower_collectives import gloo_all_to_all, host_levels, lower_collectives, wire_dtypes
from .lower_einsum import lower_einsum
from .reduce_in_bucket import interleave_rows, reduce_in_bucket
from .reuse_buffers import changed_inputs, reuse_memory
from .torch_bindings import torch_bindings
from .verify_in_flight import verify_owned


def _is_torch(p: Program) -> bool:
    return p.rank.backend == "torch"


def _is_inductor(p: Program) -> bool:
    return p.rank.backend == "inductor"


# A Plan's text is the same for all ranks. Now for one of them.
LOWERING = (
    Pass(
        "elide_copies",
        on_graph(elide_copies),
        SCHEDULED,
        in_loops=True,
        before=("lower_collectives",),
        because="a lowered reduction writes over its operand, which must share no memory",
    ),
    Pass(
        "lower_collectives",
        lambda p: lower_collectives(p.graph, p.rank.groups, p.rank.carriers),
        SCHEDULED,
        LOWERED,
        in_loops=True,
    ),
    feature_pass(
        "attention",
        "attention_kernels",
        LOWERED,
        in_loops=True,
        before=("reuse_buffers",),
        because="reuse_buffers writes over operands of operators, not of these functions",
    ),
    Pass(
        "lower_einsum",
        on_graph(lower_einsum),
        LOWERED,
        in_loops=True,
        before=("fold_views",),
        because="a product of matrices comes with views that fold_views removes",
    ),
    Pass("fold_views", on_graph(fold_views), LOWERED, in_loops=True),
    feature_pass(
        "loops",
        "list_rows",
        LOWERED,
        before=("split_joint",),
        because="a loop of the forward stacks rows for a loop of the backward",
    ),
    Pass("convert_inputs", convert_inputs, LOWERED),
    Pass("convert_outputs", convert_outputs, LOWERED),
    Pass(
        "split_joint",
        split_halves,
        LOWERED,
        after=("convert_inputs", "convert_outputs"),
        because="both halves share the converted inputs",
    ),
    # The forward and the backward, each by itself.
    Pass(
        "insert_rank_check",
        insert_rank_check,
        LOWERED,
        when=_is_torch,
        after=("split_joint",),
        because="the check rides on the first collective of the forward",
    ),
    Pass(
        "nll_backward",
        on_graph(nll_backward),
        LOWERED,
        when=_is_torch,
        in_loops=True,
        before=("reuse_buffers",),
        because="reuse_buffers then writes its products over their operands",
    ),
    Pass("index_rows", on_graph(index_rows), LOWERED, when=_is_torch, in_loops=True),
    Pass("reuse_buffers", reuse_memory, LOWERED, RUNNABLE, when=_is_torch, in_loops=True),
    Pass(
        "functional_reductions",
        on_graph(functional_reductions),
        LOWERED,
        RUNNABLE,
        when=_is_inductor,
        in_loops=True,
    ),
    Pass("separate_sums", on_graph(separate_sums), RUNNABLE, when=_is_inductor, in_loops=True),
    Pass(
        "reduce_in_bucket",
        on_graph(reduce_in_bucket),
        RUNNABLE,
        when=_is_torch,
        before=("host_levels", "gloo_all_to_all"),
        because="it looks for reductions, which these replace",
    ),
    Pass(
        "host_levels",
        lambda p: host_levels(p.graph, p.rank.groups),
        RUNNABLE,
        in_loops=True,
        before=("gloo_all_to_all",),
        because="each of its collectives becomes messages of gloo as others do",
    ),
    Pass(
        "gloo_all_to_all",
        lambda p: gloo_all_to_all(p.graph, p.rank.groups),
        RUNNABLE,
        in_loops=True,
        before=("wire_dtypes",),
        because="gloo has no all_to_all of its own; its messages get their dtypes afterwards",
    ),
    Pass("wire_dtypes", on_graph(wire_dtypes), RUNNABLE, in_loops=True),
    Pass(
        "interleave_rows",
        on_graph(interleave_rows),
        RUNNABLE,
        when=_is_torch,
        in_loops=True,
        after=("reuse_buffers",),
        because="weights that are freed one by one can be written over one by one",
    ),
    Pass(
        "verify_owned",
        lambda p: verify_owned(p.graph, changed_inputs(p)),
        RUNNABLE,
        in_loops=True,
        after=(
            "reduce_in_bucket",
            "host_levels",
            "gloo_all_to_all",
            "wire_dtypes",
            "interleave_rows",
        ),
        because="it checks the writes that they add, by the schemas of their operations",
    ),
    Pass(
        "torch_bindings",
        on_graph(torch_bindings),
        RUNNABLE,
        when=_is_torch,
        in_loops=True,
        after=("reduce_in_bucket", "host_levels", "gloo_all_to_all", "wire_dtypes", "verify_owned"),
        because="no pass that looks for an operation of torch.ops comes after it",
    ),
)
