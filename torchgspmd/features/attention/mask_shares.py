"""State how many keys a mask leaves to send, where planning knows it.

before   %y = flex_attention(%q, %k, %v, [%documents], "aten.eq.Tensor(...)", ...)    queries: seq
after    %y = flex_attention(%q, %k, %v, [%documents], "aten.eq.Tensor(...)", ..., 0.25)
needs    a propagated graph, rules
ensures  `ring_keys` sends rows round a ring; the partition keeps the queries' axis if that is least

Known are positions, and buffers that are constants or computed from constants. Which rows travel is
decided when the program runs, by ring_rows.py: buffers may have other values then. The share
decides between layouts, and counts in the plan's bytes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...compat.private_apis import OpOverload
from ...fx_passes.expand.split_fused import axes_along
from ...fx_passes.ir import Rules
from ...fx_passes.propagate.layouts import Layouts
from .flex_op import Flex
from .ring_rows import rows_seen
from .tiles import Place

# The operators, and the index of their queries. Buffers, expressions and the scale follow values.
FLEX = {
    torch.ops.torchgspmd.flex_attention.default: 0,
    torch.ops.torchgspmd.flex_attention_backward.default: 1,
}


def share_masks(graph: fx.Graph, layouts: Layouts, rules: Rules, constants: nn.Module) -> None:
    """Add shares to the calls in a graph, in place. constants: has the graph's constants."""
    known: dict[fx.Node, Any] = {}
    for op in [op for op in rules.ops(graph) if op.node.target in FLEX]:
        node, cuts = op.node, {*axes_along(op, "s", layouts)}
        functions = _functions_of(node)
        if len(cuts) != 1 or not functions[1] or op.node.meta.get("dynamic"):
            continue
        buffers = [_value(x, constants, known) for x in functions[0]]
        axes = cuts.pop()
        q, k = (node.args[FLEX[node.target] + i].meta["val"] for i in range(2))
        share = _share(q, k, Flex(buffers, *functions[1:]), layouts.mesh.count(axes))
        if share >= 1:
            continue
        node.args = (*node.args, share)
        instead = rules.op(node).rule.instead
        count = layouts.mesh.count(axes)
        if instead is not None and instead.sent(count, count) >= instead.sent(count, 1):
            others = (pin for pin in node.meta.get("pinned", ()) if pin[0] not in axes)
            node.meta["pinned"] = (*others, *((axis, (instead.factor,)) for axis in axes))


def _functions_of(node: fx.Node) -> tuple[Any, ...]:
    """Return a call's buffers and expressions."""
    at = 3 + 3 * FLEX[node.target]
    return node.args[at : at + 4]


def _share(q: Tensor, k: Tensor, change: Flex, n: int) -> float:
    """Return the part of other devices' keys that a device sends, or receives, at most."""
    lead, groups = k.shape[:-2], q.shape[-3] // k.shape[-3]
    place = Place((0,) * 5, (*lead, groups, q.shape[-2], k.shape[-2]))
    local = [-(-x.shape[-2] // n) for x in (q, k)]
    seen = rows_seen(change, place, (*lead, groups, *local), n, torch.device("cpu"))
    counts = [
        [0 if i == j else rows.stop - rows.start for j, rows in enumerate(blocks)]
        for i, blocks in enumerate(seen)
    ]
    most = max(map(sum, (*counts, *zip(*counts))))
    return most / ((n - 1) * local[1])


def _value(node: fx.Node, constants: nn.Module, known: dict[fx.Node, Any]) -> Any:
    """Return a node's value on the CPU if it follows from constants alone, else None."""
    if node not in known:
        known[node] = None
        if node.op == "get_attr":
            value = getattr(constants, str(node.target), None)
            is_real = isinstance(value, Tensor) and not value.is_meta
            known[node] = value.cpu() if is_real else None
        elif node.op == "call_function" and _is_pure(node.target):
            operands = {x: _value(x, constants, known) for x in node.all_input_nodes}
            if not any(x is None for x in operands.values()):
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
                here = {"device": torch.device("cpu")} if "device" in kwargs else {}
                known[node] = node.target(*args, **kwargs | here)
    return known[node]


def _is_pure(target: Any) -> bool:
    """Return whether an operation follows from its arguments, and changes none."""
    if target is operator.getitem or not isinstance(target, OpOverload):
        return target is operator.getitem
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return target.namespace in ("aten", "prims") and not draws and not target._schema.is_mutable
