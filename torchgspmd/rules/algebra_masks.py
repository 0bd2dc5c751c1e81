"""Values computed of the elements that a mask selects, without selecting them.

    %i = index(%x, [%m]); %y = mul(%i, 2)
    index_put(%x, [%m], %y)                  where(%m, mul(%x, 2), %x)
    sum(%y)                                  sum(where(%m, mul(%x, 2), 0))
    sym_size(%i, 0)                          _local_scalar_dense(sum(%m)), if nothing else reads %i

How many are selected, only a run knows, so a selection is whole on each device. A choice for each
element is sharded as its operands are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..compat.fx_nodes import drop_unused
from ..compat.operators import aten, draws
from ..compat.private_apis import OpOverload
from .algebra import inserted_call
from .ops.pointwise import named

# (value, mask, both stand-ins of the selection's size, dimensions behind the mask's) -> the value
# for all elements; None if there is none
_Known = dict[tuple[fx.Node, fx.Node, tuple[int, int], int], fx.Node | None]

_SEVERAL = named("log_sigmoid_forward")  # pointwise, with several results
_COPIES = named("clone _to_copy")
_FILLED = {aten.zeros.default: 0, aten.ones.default: 1}
# Of whole numbers they fail for zeros or exponents below, which no selected element may have.
_PARTIAL = {
    *named("div.Tensor_mode floor_divide remainder.Tensor remainder.Scalar_Tensor fmod.Tensor"),
    *named("pow.Tensor_Tensor pow.Scalar"),
}
# operation -> the argument that names its dimensions: it computes each row of the others by itself
_OF_ROWS: dict[Any, int] = {
    **dict.fromkeys(named("_log_softmax _softmax gather scatter.src scatter.value"), 1),
    **dict.fromkeys(named("unsqueeze squeeze.dims sum.dim_IntList amax logsumexp"), 1),
    **dict.fromkeys(named("_log_softmax_backward_data _softmax_backward_data"), 2),
}
_PLACED = {*named("gather scatter.src scatter.value")}
_DEPTH = 32  # operations between a selection and its use
_NEAR = 8  # operations in which two masks are compared


def choose_elements(graph: fx.Graph) -> None:
    """Replace operations on selected elements in place, where all they need is a choice."""
    known: _Known = {}
    for node in list(graph.nodes):
        end = _ENDS.get(node.target)
        if end is not None and (same := end(node, known)) is not None:
            if "captured" in node.meta:
                same.meta.setdefault("captured", node.meta["captured"])
            node.replace_all_uses_with(same)
    drop_unused(graph)
    counts = dict[fx.Node, fx.Node]()
    for index in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        _count_only(index, counts)


def _written(node: fx.Node, known: _Known) -> fx.Node | None:
    """Return a choice for each element in place of a write to selected ones."""
    x, indices, values, *rest = node.args
    mask, index = _mask_of(indices), _selection_before(values)
    if mask is None or index is None or _is_dynamic(x) or not _alike(_mask_of(index.args[1]), mask):
        return None
    trailing = x.meta["val"].dim() - mask.meta["val"].dim()
    dense = _Dense(node, index, trailing, known).of(values)
    if dense is None or dense.meta["val"].dtype != x.meta["val"].dtype:
        return None
    shape = x.meta["val"].shape
    if rest and rest[0]:
        dense = _call(node, aten.add.Tensor, (x, dense), shape)
    return _call(node, aten.where.self, (_wide(node, mask, trailing), dense, x), shape)


def _summed(node: fx.Node, known: _Known) -> fx.Node | None:
    """Return the sum of all elements, with zeros for those that are not selected."""
    values = node.args[0]
    index = _selection_before(values)
    if index is None or _is_dynamic(node) or node.kwargs.keys() - {"dtype"}:
        return None
    mask = _mask_of(index.args[1])
    assert mask is not None
    rank, lead = values.meta["val"].dim(), mask.meta["val"].dim()
    given = node.args[1] if len(node.args) > 1 else None
    dims = [d % rank for d in given or range(rank)]
    dense = _Dense(node, index, rank - 1, known).of(values) if 0 in dims else None
    if dense is None:
        return None
    val = dense.meta["val"]
    shape = [*mask.meta["val"].shape, *values.meta["val"].shape[1:]]
    if [*val.shape] != shape:
        dense = _call(node, aten.expand.default, (dense, shape), shape, val.dtype)
    wide, zero = _wide(node, mask, rank - 1), _number(node, 0, val)
    chosen = _call(node, aten.where.self, (wide, dense, zero), shape, val.dtype)
    summed = [*range(lead), *(d + lead - 1 for d in sorted(dims) if d)]
    result, kept = node.meta["val"], [n for d, n in enumerate(shape) if d not in summed]
    total = _call(node, aten.sum.dim_IntList, (chosen, summed), kept, result.dtype, node.kwargs)
    if [*result.shape] == kept:
        return total
    return _call(node, aten.reshape.default, (total, [*result.shape]), result.shape, result.dtype)


def _size(node: fx.Node, known: _Known) -> fx.Node | None:
    """Return the size of the selection from which a value is computed, if that has as many rows."""
    x, dim = node.args
    index = _selection_before(x) if dim == 0 and x.target is not aten.index.Tensor else None
    if index is None or _rows(x) != _rows(index):
        return None
    with node.graph.inserting_after(index):
        size = node.graph.call_function(aten.sym_size.int, (index, 0))
    size.meta = {key: v for key, v in node.meta.items() if key != "captured"}
    return size


_ENDS: dict[Any, Callable[[fx.Node, _Known], fx.Node | None]] = {
    aten.index_put.default: _written,
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _summed),
    aten.sym_size.int: _size,
}


def _count_only(index: fx.Node, counts: dict[fx.Node, fx.Node]) -> None:
    """Count the elements that a mask selects, if nothing but their number is read.

    counts: by masks, those that the graph has.
    """
    mask, users = _mask_of(index.args[1]), [*index.users]
    if mask is None or any(u.target is not aten.sym_size.int or u.args[1] != 0 for u in users):
        return
    if mask not in counts:
        counts[mask] = _call(index, aten.sum.default, (mask,), [], torch.int64)
    for user in users:
        user.target, user.args = aten._local_scalar_dense.default, (counts[mask],)


class _Dense:
    """Computes values for all elements in place of those that a mask selects.

    node: where calls are inserted. index: the selection. trailing: how many dimensions the values
    have behind the mask's.
    """

    def __init__(self, node: fx.Node, index: fx.Node, trailing: int, known: _Known) -> None:
        self.node, self.index, self.trailing, self.known = node, index, trailing, known
        self.mask, self.count = index.args[1][0], _rows(index)

    def of(self, x: fx.Node, depth: int = 0) -> fx.Node | None:
        """Return a node whose value broadcasts to [*mask, *trailing]; None if there is none."""
        key = x, self.mask, self.count, self.trailing
        if key not in self.known:
            self.known[key] = self._of(x, depth) if depth < _DEPTH else None
        return self.known[key]

    def _of(self, x: fx.Node, depth: int) -> fx.Node | None:
        val = x.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return None
        if not _is_dynamic(x):
            more = val.dim() - self.trailing
            return x if more <= 0 or more == 1 and val.shape[0] == 1 else None
        # As many rows as are selected, and no other size that only a run knows.
        known_sizes = val.shape[1:] == x.meta["other"].shape[1:]
        if val.dim() != self.trailing + 1 or not known_sizes or _rows(x) != self.count:
            return None
        target = x.target
        if target is aten.index.Tensor:
            mask, source = _mask_of(x.args[1]), x.args[0]
            same = mask is not None and _alike(mask, self.mask)
            return source if same and not _is_dynamic(source) else None
        if target is aten.expand.default:
            # A size that a check has passed keeps its check: a run with others raises.
            sizes = {n.target for n in x.all_input_nodes[1:]}
            return self.of(x.args[0], depth + 1) if sizes <= {aten.sym_size.int} else None
        if target is operator.getitem:
            return self._element(x, depth) if x.args[0].target in _SEVERAL else None
        if target in _FILLED or target is aten.full.default:
            number = x.args[1] if target is aten.full.default else _FILLED[target]
            if isinstance(number, fx.Node):
                return None
            return _number(self.node, number, val)
        return self._of_rows(x, depth) if target in _OF_ROWS else self._computed(x, depth)

    def _of_rows(self, x: fx.Node, depth: int) -> fx.Node | None:
        """Return a call that computes each selected row by itself, for all rows."""
        at, (lead, *rest) = _OF_ROWS[x.target], (self.mask.meta["val"].dim(), *x.args)
        named_dims = rest[at]
        dims = named_dims if isinstance(named_dims, (list, tuple)) else [named_dims]
        whole = x if x.target is aten.unsqueeze.default else rest[0]
        places = [d % whole.meta["val"].dim() for d in dims]
        if 0 in places:
            return None
        shape = self.mask.meta["val"].shape
        operands = dict[fx.Node, fx.Node]()
        for n in x.all_input_nodes:
            val = n.meta["val"]
            trailing = val.dim() - 1
            if not _is_dynamic(n) or trailing < 0:
                return None
            dense = _Dense(self.node, self.index, trailing, self.known).of(n, depth + 1)
            if dense is None:
                return None
            full = [*shape, *val.shape[1:]]
            if x.target in _PLACED and n is x.args[2]:  # others may be out of range
                wide, zero = _wide(self.node, self.mask, trailing), _number(self.node, 0, val)
                dense = _call(self.node, aten.where.self, (wide, dense, zero), full, val.dtype)
            elif [*dense.meta["val"].shape] != full:
                dense = _call(self.node, aten.expand.default, (dense, full), full, val.dtype)
            operands[n] = dense
        moved = [d + lead - 1 for d in places]
        rest[at] = moved if isinstance(named_dims, (list, tuple)) else moved[0]
        args, kwargs = fx.map_arg((tuple(rest), dict(x.kwargs)), operands.__getitem__)
        val = x.meta["val"]
        return _call(self.node, x.target, args, [*shape, *val.shape[1:]], val.dtype, kwargs)

    def _element(self, x: fx.Node, depth: int) -> fx.Node | None:
        """Return one of the results of a pointwise call for all elements."""
        several = self._computed(x.args[0], depth)
        if several is None:
            return None
        like = several.meta["val"]
        several.meta["val"] = tuple(
            like.new_empty(like.shape, dtype=v.dtype) for v in x.args[0].meta["val"]
        )
        return _call(
            self.node, operator.getitem, (several, x.args[1]), like.shape, x.meta["val"].dtype
        )

    def _computed(self, x: fx.Node, depth: int) -> fx.Node | None:
        """Return a pointwise call for all elements."""
        target, val = x.target, x.meta["val"]
        val = val[0] if target in _SEVERAL else val
        pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
        if not (pointwise or target in _COPIES or target in _SEVERAL) or draws(target):
            return None
        if target in _PARTIAL and not val.is_floating_point() and not val.is_complex():
            return None
        operands = {n: self.of(n, depth + 1) for n in x.all_input_nodes if "val" in n.meta}
        numbers = {n for n in operands if not isinstance(n.meta["val"], torch.Tensor)}
        if any(new is None and n not in numbers for n, new in operands.items()):
            return None
        args, kwargs = fx.map_arg((x.args, dict(x.kwargs)), lambda n: operands.get(n) or n)
        tensors = [n.meta["val"].shape for n in operands.values() if n is not None]
        shape = torch.broadcast_shapes(*tensors)
        return _call(self.node, target, args, shape, val.dtype, kwargs)


def _selection_before(x: object) -> fx.Node | None:
    """Return a selection by a mask that a value is computed from, else None."""
    stack, seen = [x], set[object]()
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or not _is_dynamic(node) or node in seen:
            continue
        seen.add(node)
        if node.target is not aten.index.Tensor:
            stack += node.all_input_nodes
        elif _mask_of(node.args[1]) is not None:
            return node
    return None


def _mask_of(indices: Any) -> fx.Node | None:
    """Return the mask of leading dimensions that is the only index."""
    if len(indices) != 1 or not isinstance(indices[0], fx.Node) or _is_dynamic(indices[0]):
        return None
    return indices[0] if indices[0].meta["val"].dtype is torch.bool else None


def _wide(node: fx.Node, mask: fx.Node, trailing: int) -> fx.Node:
    """Return the mask with a dimension of size 1 for each one behind it."""
    if not trailing:
        return mask
    shape = [*mask.meta["val"].shape, *[1] * trailing]
    return _call(node, aten.reshape.default, (mask, shape), shape, torch.bool)


def _number(node: fx.Node, number: Any, like: torch.Tensor) -> fx.Node:
    kwargs = {"dtype": like.dtype, "device": like.device}
    return _call(node, aten.full.default, ([], number), [], like.dtype, kwargs)


def _call(
    node: fx.Node,
    op: object,
    args: tuple,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> fx.Node:
    """Insert a call before a node, without sizes that a run knows."""
    call = inserted_call(node, op, args, shape, dtype)
    call.kwargs = dict(kwargs)
    for key in ("other", "dynamic"):
        call.meta.pop(key, None)
    return call


def _rows(x: fx.Node) -> tuple[int, int]:
    """Return both stand-ins of a value's rows: two sizes of a run never have the same pair."""
    return x.meta["val"].shape[0], x.meta.get("other", x.meta["val"]).shape[0]


def _is_dynamic(x: Any) -> bool:
    return isinstance(x, fx.Node) and "other" in x.meta


def _alike(a: object, b: object, depth: int = 0) -> bool:
    """Return whether two arguments are equal, or computed by equal calls."""
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return a is b or type(a) is type(b) and not isinstance(a, fx.Node) and a == b
    if a.op != "call_function" or a.target is not b.target or draws(a.target) or depth > _NEAR:
        return False
    ours, theirs = [a.args, a.kwargs], [b.args, b.kwargs]
    left, right = list[Any](), list[Any]()
    fx.node.map_aggregate(ours, left.append)
    fx.node.map_aggregate(theirs, right.append)
    return len(left) == len(right) and all(_alike(x, y, depth + 1) for x, y in zip(left, right))
