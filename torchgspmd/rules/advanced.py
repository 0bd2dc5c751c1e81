"""Reading and writing at several indices at once: x[:, i, j] and x[:, i, j] = values, as aten.index and aten.index_put.

Factors: v an indexed dimension, b a dimension of the indices, d any other one.
"""
from __future__ import annotations

import torch

from .indexing import here, zero_outside
from .notation import Call, Rule, make_rule
from .registry import computed
from .scatter import first_only, longer, spare_places

aten = torch.ops.aten


@computed(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> Rule | None:
    found = advanced(call)
    if found is None:
        return None
    x, indices, result, sizes = found
    values, accumulate = call.tensors[-1], call.argument(3, "accumulate", False)
    lead = len(result) - values.dim()
    if lead < 0:
        return None
    value = [name if values.shape[i] == sizes[name[0]] else () for i, name in enumerate(result[lead:])]
    pointed = " ".join(name for name in sizes if name[0] == "b")
    written = " ".join(name for name in sizes if name[0] == "v")
    return make_rule([x, *indices, value], [x], sizes, special=f"{written} {pointed}", reduce=pointed if accumulate else "",
                     whole="" if accumulate else pointed, emit=_emit_index_put, linear=[[0, len(call.tensors) - 1]],
                     positions=frozenset(range(1, len(call.tensors) - 1)))


def _emit_index_put(local, args, kwargs):
    x, indices, values, *accumulate = args
    moved, cut, operand = [], [], 0
    x = first_only(local, x, [f for f in local.rule.sizes if f[0] == "b"], "sum")
    for d, index in enumerate(indices):
        if index is not None:
            operand += 1
            index = natural(local, index, local.rule.sizes.get(f"v{d}", 1))
            for i, factors in enumerate(local.rule.operands[operand]):
                index = local.masked(index, i, factors[0], -1) if factors else index
            index = spare_places(local, index, f"v{d}")
            x, cut = longer(local, x, d), [*cut, d]
        moved.append(index)
    made = local.call(local.node.target, x, moved, values, *accumulate, **kwargs)
    for d in cut:
        made = local.call(aten.slice.Tensor, made, d, 0, local.size(f"v{d}"))
    return [made]


def natural(local, index, size: int):
    """Indices counted from the end as indices from the start."""
    return local.call(aten.where.self, local.call(aten.lt.Scalar, index, 0), local.call(aten.add.Scalar, index, size), index)


def advanced(call: Call) -> tuple[list, list[list], list, dict[str, int]] | None:
    """Factors of x, of each index and of x[indices], with sizes: v an indexed dimension, b one of the indices, d another one."""
    x, given = call.tensors[0], call.args[1]
    tensors = [i for i in given if i is not None]
    if not tensors or any(i.dtype in (torch.bool, torch.uint8) for i in tensors) or not x.numel():
        return None
    shape = torch.broadcast_shapes(*(i.shape for i in tensors))
    places = [d for d, i in enumerate(given) if i is not None]
    table = [(f"v{d}" if d in places else f"d{d}",) for d in range(x.dim())]
    broad = [(f"b{i}",) for i in range(len(shape))]
    sizes = {name[0]: n for name, n in (*zip(table, x.shape), *zip(broad, shape))}
    indices = [[broad[len(shape) - i.dim() + k] if n == shape[len(shape) - i.dim() + k] else () for k, n in enumerate(i.shape)]
               for i in tensors]
    rest = [name for d, name in enumerate(table) if d not in places]
    at = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    return table, indices, [*rest[:at], *broad, *rest[at:]], sizes


@computed(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> Rule | None:
    found = advanced(call)
    if found is None:
        return None
    x, indices, result, sizes = found
    written = " ".join(name for name in sizes if name[0] == "v")
    return make_rule([x, *indices], [result], sizes, special=written, reduce=written, emit=_emit_index, linear=[[0]],
                     positions=frozenset(range(1, len(call.tensors))))


def _emit_index(local, args, kwargs):
    x, indices = args
    moved, hit = [], None
    for d, index in enumerate(indices):
        if index is not None and local.assignment.get(f"v{d}"):
            index, inside = here(local, f"v{d}", natural(local, index, local.rule.sizes[f"v{d}"]))
            hit = inside if hit is None else local.call(aten.logical_and.default, hit, inside)
        moved.append(index)
    rank, places = len(local.rule.operands[0]), [d for d, i in enumerate(indices) if i is not None]
    behind = rank - 1 - places[-1] if places[-1] - places[0] == len(places) - 1 else rank - len(places)
    return [zero_outside(local, hit, local.call(local.node.target, x, moved), behind)]
