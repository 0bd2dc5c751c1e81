"""Experts: products of row groups, each on the device that has the group's matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import register_flop_formula

from ...fx_passes.expand.split_fused import block_ops_to_split
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...fx_passes.program import Program
from ...fx_passes.schedule.arithmetic import SHARED_ROWS
from . import rule  # noqa: F401 (rows of REWRITES and RULES)
from .chosen import ROWS_BY_INDEX, group_choices
from .split_groups import keep_blocks

ours = torch.ops.torchgspmd


@register_flop_formula([ours.grouped_mm, ours.block_mm])
def _mm_flops(x: Any, w: Any, *_: object, **__: object) -> int:
    # A row has one matrix. Rows behind the last group are counted: shapes do not say how many.
    return 2 * math.prod(x) * w[-1]


@register_flop_formula([ours.grouped_outer, ours.block_outer])
def _outer_flops(x: Any, y: Any, *_: object, **__: object) -> int:
    return 2 * math.prod(x) * y[-1]


def _blocks_of_same_rows(node: fx.Node) -> int:
    """Return how many blocks have the same rows, each of which one of them computes."""
    return node.args[3] if any(map(_is_taken, node.args[:2])) else 1


def _is_taken(value: fx.Node) -> bool:
    """Return whether take_blocks made a value's rows, which operations on rows may have changed."""
    rows = _rows_of(value)
    while value.target is not ours.take_blocks.default:
        same = [each for each in value.all_input_nodes if _rows_of(each) == rows]
        if not same:
            return False
        value = same[0]
    return True


def _rows_of(value: fx.Node) -> tuple[object, ...]:
    """Return a value's shape but for its last dimension, in a global or a local program."""
    shape = value.meta.get("shape") or getattr(value.meta.get("val"), "shape", ())
    return tuple(shape)[:-1]


SHARED_ROWS |= dict.fromkeys(
    (ours.block_mm.default, ours.block_outer.default), _blocks_of_same_rows
)


def _split_groups(program: Program) -> fx.Graph | None:
    """Compute row groups, such as those for experts, where their matrices are."""
    splitting = block_ops_to_split(program.graph, program.layouts, program.rules)
    shards = {node: request.shards for node, request in splitting.items()}
    chosen = group_choices(program.graph, program.layouts, program.rules, shards)
    if not chosen and not splitting:
        return None
    return keep_blocks(program.request.expand(program.graph, splitting), program.rules)


FEATURE_PASSES["split_groups"] = FeaturePass(
    _split_groups, {*ROWS_BY_INDEX, ours.grouped_mm.default, ours.grouped_outer.default}
)
