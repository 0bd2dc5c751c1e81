"""The rows that attention adds to the tables of the core; PIPELINE places its passes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import register_flop_formula

from ...capture.trace_context import PATCHES, always, around
from ...comm.kinds import add_kinds
from ...compat.patches import Patch
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...rules.rewrites import rewrite
from . import capture, passes, repeated_heads, rule, written  # noqa: F401 (rows of RULES and REWRITES)
from .call import AttentionCall, Gradients, Results, of_backward
from .flex_capture import flexible_attention, options_with_returns
from .products import attention_by_products, gradients_by_products
from .ring import ring_attention, ring_attention_backward
from .ring_keys import RINGS

ours = torch.ops.torchgspmd
_FLEX = "flex_attention is compiled; it is traced as one operation, or as a softmax of scores"
_RETURNS = "its statistics are differentiable; an operation does not know whether they are returned"

add_kinds(ring_attention, ring_attention_backward)
FEATURE_PASSES |= {
    "balance_attention": FeaturePass(passes.balance_attention, RINGS),
    "ring_keys": FeaturePass(passes.ring_keys, RINGS),
    "attention_rings": FeaturePass(passes.attention_rings, RINGS),
    "attention_kernels": FeaturePass(passes.attention_kernels, passes.IN_BLOCKS),
}
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


def _attention_flops(q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    # Two products, each a multiplication and an addition: scores, and weights times v.
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    # Five products: the scores again, and the gradients for weights, v, q and k.
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


register_flop_formula([ours.attention, ours.attention_parts, ours.zigzag_attention])(
    _attention_flops
)
register_flop_formula(ours.flex_attention)(_attention_flops)
register_flop_formula(ours.flex_attention_backward)(_attention_backward_flops)
register_flop_formula([ours.attention_backward, ours.zigzag_attention_backward])(
    _attention_backward_flops
)
