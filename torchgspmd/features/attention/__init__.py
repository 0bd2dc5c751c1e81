"""Attention: one operation, sharded along batch, heads, queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import register_flop_formula

from ...capture.trace_context import PATCHES, always, around
from ...comm.kinds import add_kinds
from ...compat.patches import Patch
from ...fx_passes.partition.cost_constants import CostConstants
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...fx_passes.program import Program, Request
from ...rules.rewrites import rewrite
from . import capture, rule, written  # noqa: F401 (rows of RULES and REWRITES)
from .balance_attention import balance
from .call import AttentionCall, Gradients, Results, backward_flops, flops, of_backward
from .flex_capture import flexible_attention, options_with_returns
from .flex_op import BACKWARDS
from .mask_shares import Masks, price_masks
from .op import attention, attention_backward, attention_backward_in_blocks, attention_in_blocks
from .position_masks import READ, position_masks
from .ring import ring_attention, ring_attention_backward
from .ring_keys import RINGS, mark_rings, replace_by_rings
from .tiles import attention_by_products, gradients_by_products

ours = torch.ops.torchgspmd
_FLEX = "flex_attention is compiled; it is traced as one operation, or as a softmax of scores"
_RETURNS = "the maximum is differentiable; an operation does not know whether it is returned"

add_kinds(ring_attention, ring_attention_backward)
PATCHES += [
    Patch(flex_attention, name, replace, why, feature="attention")
    for name, replace, why in (
        ("flex_attention_hop", always(flexible_attention), _FLEX),
        ("_apply_kernel_options", around(options_with_returns), _RETURNS),
        ("_validate_device", always(lambda *_: None), _FLEX),
    )
]


@rewrite("xla", ours.attention.default)
def _attention_on_xla(*args: Any) -> Results:
    return attention_by_products(AttentionCall(*args))  # has no dropout: see capture.py


@rewrite("xla", ours.attention_backward.default)
def _attention_backward_on_xla(*args: object) -> Gradients:
    return gradients_by_products(*of_backward(*args))


register_flop_formula(
    [ours.attention, ours.attention_parts, ours.zigzag_attention, ours.flex_attention]
)(flops)
register_flop_formula(
    [ours.attention_backward, ours.zigzag_attention_backward]
    + [op._opoverload.overloadpacket for op in BACKWARDS]
)(backward_flops)


# Direct calls, which skip the overhead of PyTorch's operator registry.
_IN_BLOCKS = {
    attention._opoverload: attention_in_blocks,
    attention_backward._opoverload: attention_backward_in_blocks,
}


def _balance_attention(program: Program) -> fx.Graph | None:
    """Bound masks; reorder tokens so that devices have the same work under a causal mask."""
    request, lends = program.request, _lends(program.request)
    parts = program.graph, program.layouts, program.rules
    constants = _constants(request)
    masks = Masks(request.captured.constants, constants.link_flops_per_byte)
    priced = lends and price_masks(*parts, masks)
    changed = balance(*parts, constants, masks, lends)
    return program.graph if changed or priced else None


def _ring_keys(program: Program) -> fx.Graph | None:
    """Mark attention whose keys travel round a ring."""
    request = program.request
    # With regather="all" memory counts alone, so no ring has to hide its transfers.
    changed = request.regather != "never" and mark_rings(
        program.graph,
        program.mesh,
        Masks(request.captured.constants, _constants(request).link_flops_per_byte),
        memory=request.regather == "all",
        lends=_lends(request),
    )
    return program.graph if changed else None


def _constants(request: Request) -> CostConstants:
    """Return the constants, with the rates of named hardware unless the user has set them."""
    constants, hardware = request.constants, request.hardware
    if hardware is None or constants.link_flops_per_byte != CostConstants().link_flops_per_byte:
        return constants
    link = hardware.link(request.mesh, request.mesh.names, relayed=False)
    rate = hardware.rate(2) * hardware.efficiency / link.bandwidth
    return replace(constants, link_flops_per_byte=rate) if rate else constants


def _lends(request: Request) -> bool:
    """Return whether late devices of a ring may lend queries to early ones."""
    skipped = request.skip_passes & {"balance_attention", "attention_rings"}
    return request.regather != "never" and not skipped


def attention_kernels(program: Program) -> fx.Graph:
    """Call PyTorch's kernels block by block, past its operator registry."""
    for node in program.graph.nodes if program.request.device in ("cpu", "cuda") else ():
        if node.target in _IN_BLOCKS:
            names = [argument.name for argument in node.target._schema.arguments]
            # Dropout is computed tile by tile, which a compiler should not trace.
            if not any(node.args[names.index("seed") :]):
                node.target = _IN_BLOCKS[node.target]
    return program.graph


FEATURE_PASSES |= {
    "position_masks": FeaturePass(position_masks, READ),
    "balance_attention": FeaturePass(_balance_attention, RINGS),
    "ring_keys": FeaturePass(_ring_keys, RINGS),
    "attention_rings": FeaturePass(lambda p: replace_by_rings(p.graph), RINGS),
    "attention_kernels": FeaturePass(attention_kernels, _IN_BLOCKS),
}
