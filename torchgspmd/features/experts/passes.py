"""The experts' pass, as its row in PIPELINE calls it."""

from __future__ import annotations

from torch import fx

from ...fx_passes.expand.split_fused import block_ops_to_split
from ...fx_passes.program import Program
from .group_choices import group_choices
from .split_groups import keep_blocks


def split_groups(program: Program) -> fx.Graph | None:
    """Compute row groups, such as those for experts, where their matrices are."""
    splitting = block_ops_to_split(program.graph, program.layouts, program.rules)
    shards = {node: request.shards for node, request in splitting.items()}
    chosen = group_choices(program.graph, program.layouts, program.rules, shards)
    if not chosen and not splitting:
        return None
    return keep_blocks(program.request.expand(program.graph, splitting), program.rules)
