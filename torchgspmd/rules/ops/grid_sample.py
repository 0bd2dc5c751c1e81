"""Operations that read or count at computed positions.

They are grids, bags of embeddings, histograms, CTC losses and groups of rows.
"""

from __future__ import annotations

import operator

import torch

from ...compat.operators import aten
from ...custom_ops import nd  # noqa: F401 (registers ctc_losses)
from ..local_builder import LocalBuilder
from ..notation import Call, Rule, make_rule
from ..registry import rule, rule_for

rule(aten.grid_sampler_2d.default, "n c h w, n u v r -> n c u v", whole="h w r", linear=[[0]])
rule(
    aten.grid_sampler_3d.default, "n c d h w, n t u v r -> n c t u v", whole="d h w r", linear=[[0]]
)


@rule_for(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def _grid_backward(call: Call) -> Rule:
    """Return the rule of the gradients of image and grid.

    The grid's gradient is a sum over channels, the image's a sum over the grid.
    """
    grad, image, grid = call.tensors
    inner, outer = (
        [(f"x{i}",) for i in range(image.dim() - 2)],
        [(f"h{i}",) for i in range(image.dim() - 2)],
    )
    head = [("n",), ("c",)]
    dims = [[*head, *outer], [*head, *inner], [("n",), *outer, ("t",)]]
    sizes = {
        name[0]: size
        for names, tensor in zip(dims, call.tensors)
        for name, size in zip(names, tensor.shape)
    }
    results = [dims[1 if r.shape == image.shape else 2] for r in call.results]
    if len(results) == 2:
        results = dims[1:]
    return make_rule(
        dims,
        results,
        sizes,
        whole=" ".join(n[0] for n in [*inner, ("t",)]),
        reduce=" ".join(["c", *(n[0] for n in outer)]),
    )


@rule_for(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(call: Call) -> Rule:
    """Return a rule in which only the columns of the table may be sharded."""
    sizes, dims = {"e": call.tensors[0].shape[1]}, []
    for i, tensor in enumerate((*call.tensors, *call.results)):
        row = [(f"w{i}_{d}",) for d in range(tensor.dim())]
        if tensor.dim() == 2:
            row[1] = ("e",)
        sizes.update({name[0]: n for name, n in zip(row, tensor.shape) if name[0] != "e"})
        dims.append(row)
    count = len(call.tensors)
    return make_rule(
        dims[:count], dims[count:], sizes, whole=" ".join(name for name in sizes if name != "e")
    )


@rule_for(aten.histc.default)
def _histogram(call: Call) -> Rule | None:
    """Return the rule of a histogram with fixed borders: every device counts its own values.

    Padding is filled with a value outside of the borders.
    """
    low, high = call.argument(2, "min", 0), call.argument(3, "max", 0)
    if low == high:
        return None
    x = call.tensors[0]
    names = [(f"d{i}",) for i in range(x.dim())]
    factors = " ".join(n[0] for n in names)
    return make_rule(
        [names],
        [[("b",)]],
        {"b": call.results[0].shape[0]} | {n[0]: s for n, s in zip(names, x.shape)},
        whole="b",
        reduce=factors,
        special=factors,
        emit=_emit_histogram,
    )


def _emit_histogram(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    x, bins, low, high = (*args, 100, 0, 0)[:4] if len(args) < 4 else args
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    for d in range(len(local.rule.operands[0])):
        for factor in local.rule.operands[0][d]:
            x = local.masked(x, d, factor, low - 1)
    return [local.call(aten.histc.default, x, kwargs.get("bins", bins), low, high)]


@rule_for(torch.ops.torchgspmd.ctc_losses.default)
def _ctc(call: Call) -> Rule:
    """Return a rule in which the batch may be sharded, unless its targets are concatenated."""
    log_probs, targets = call.tensors[:2]
    dims = [
        [("t",), ("n",), ("c",)],
        [("n",), ("s",)] if targets.dim() == 2 else [("s",)],
        [("n",)],
        [("n",)],
    ]
    sizes = {
        "t": log_probs.shape[0],
        "n": log_probs.shape[1],
        "c": log_probs.shape[2],
        "s": targets.shape[-1],
    }
    return make_rule(
        dims,
        [[("n",)], dims[0]],
        sizes,
        whole="t c s" if targets.dim() == 2 else "t c s n",
        padding=dict.fromkeys(range(4), 0.0),
    )


def _emit_groups(local: LocalBuilder, args: tuple, kwargs: dict) -> list:
    """Multiply the device's rows. The ends of the groups count from its first row."""
    rows, weight, ends, *rest = args
    size = local.size("t")
    ends = local.call(
        aten.clamp.default, local.call(aten.sub.Tensor, ends, local.index("t") * size), 0, size
    )
    result = local.call(local.node.target, rows, weight, ends, *rest)
    return (
        [local.call(operator.getitem, result, i) for i in range(len(local.results))]
        if rest
        else [result]
    )


# Products of groups of rows [t, k] with one matrix each [e, k, n], from the package transformers.
# They are registered by name, because it may not be installed.
_GROUPS = {"whole": "e", "special": "t", "emit": _emit_groups, "contraction": True}
rule("transformers::grouped_mm_fallback", "t k, e k n, e -> t n", reduce="k", **_GROUPS)
rule(
    "transformers::grouped_mm_fallback_backward",
    "t k, e k n, e, t n -> t k, e k n",
    reduce="n t",
    **_GROUPS,
)
