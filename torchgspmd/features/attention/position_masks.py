"""Read masks of positions as flex_attention's, where queries are sharded.

before   %ge = ge(%unsqueeze, %unsqueeze_1)                             of arange(t)
         %eq = eq(%unsqueeze_2, %unsqueeze_3)                           of %documents [b, t]
         %m  = bitwise_and(%ge, %eq)                                    [b, 1, t, t]
         %y, %lse = attention(%q, %k, %v, False, 0.1, %m)               queries: seq
after    %y, %lse = flex_attention(%q, %k, %v, [%documents], "aten.bitwise_and.Tensor(
             aten.ge.Tensor(q, k), aten.eq.Tensor(aten.index.Tensor(u0, [b, q]), ...))", ...)
         %y, %lse = attention(%q, %k, %v, True, 0.1)                    if %m is "q >= k" alone
needs    a propagated graph
ensures  no value has a number for each query and key, unless the program uses it elsewhere

The operations that compute a mask are followed back from an element at (b, h, q, k), through
elementwise operations, views, indices and triangles. They end at positions, numbers, and tensors
without a dimension for one of queries and keys. Masks of 0 and -inf are read, too. What a run
passes in with a dimension for each stays a mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import add_node, origin_of, reached
from ...compat.operators import aten
from ...fx_passes.expand.split_fused import axes_along
from ...fx_passes.program import Program
from .element_views import VIEWS, ZERO, Coordinate, shifted
from .expressions import is_elementwise
from .flex_op import BACKWARDS, flex_attention
from .op import attention, attention_backward

# The operators, and the index of their queries. causal, the scale and the mask follow values.
READ: dict[Any, int] = {attention._opoverload: 0, attention_backward._opoverload: 1}
LONGEST = 20_000  # characters of an expression
CAUSAL = "aten.ge.Tensor(q, k)"
_PLACEMENT = ("device", "pin_memory", "layout", "memory_format")


class _NoExpression(Exception):
    """An element follows from more than its positions and small tensors."""


def position_masks(program: Program) -> fx.Graph | None:
    """Rewrite the calls whose queries are sharded, in place."""
    if program.request.captures:
        return None  # the host reads masks of flex_attention
    layouts = program.layouts
    calls = [op for op in program.rules.ops(program.graph) if op.node.target in READ]
    sharded = [op.node for op in calls if any(axes_along(op, "s", layouts))]
    found = [_rewrite(node, READ[node.target]) for node in sharded]
    masks = [mask for mask in found if mask is not None]
    above = {*reached(masks)}
    for node in reversed(program.graph.nodes):  # users first
        if node in above and not node.users and node.op == "call_function":
            program.graph.erase_node(node)
    return program.graph if masks else None


def _rewrite(node: fx.Node, first: int) -> fx.Node | None:
    """Read a call's mask; return it if it is one of positions. first: the index of the queries."""
    at = 3 + 3 * first
    tensors: Any = node.args[:at]
    causal, scale, *rest = node.args[at:]
    mask, *others = rest or (None,)
    q, k = (x.meta["val"].shape for x in tensors[first : first + 2])
    if not isinstance(mask, fx.Node) or causal or any(x is not None for x in others):
        return None
    if len(q) not in (3, 4) or not all(type(n) is int for n in (*q, *k)):
        return None
    reader = _Reader(q[-2] * k[-2])
    try:
        text = reader.mask(mask, "bhqk"[4 - len(q) :])
    except _NoExpression:
        return None
    if text == CAUSAL and q[-2] == k[-2]:
        node.args = (*tensors, True, scale)
        return mask
    if len(q) == 3:
        tensors = _with_batch(node, tensors)
    node.target = (BACKWARDS[0] if first else flex_attention)._opoverload
    node.args = (*tensors, list(reader.buffers), text, "", "", scale)
    return mask


def _with_batch(node: fx.Node, tensors: Sequence[fx.Node]) -> list[fx.Node]:
    """Give a call's operands and results a batch of one."""

    def added(target: Any, x: fx.Node, val: Tensor) -> fx.Node:
        new = add_node(node.graph, "call_function", target, (x, 0), {}, x.name)
        new.meta = {**origin_of(node), "val": val}
        return new

    with node.graph.inserting_before(node):
        operands = [added(aten.unsqueeze.default, x, x.meta["val"].unsqueeze(0)) for x in tensors]
    for result in node.users:  # getitem
        val = result.meta["val"]
        result.meta["val"] = val.unsqueeze(0)
        users = [*result.users]
        with node.graph.inserting_after(result):
            squeezed = added(aten.squeeze.dim, result, val)
        for user in users:
            user.replace_input_with(result, squeezed)
    if "val" in node.meta:
        node.meta["val"] = tuple(x.unsqueeze(0) for x in node.meta["val"])
    return operands


class _Reader:
    """Writes the expression for an element. pairs: how many queries times keys there are."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self.buffers: dict[fx.Node, str] = {}

    # ------------------------------------------------------------------------------ the mask

    def mask(self, node: fx.Node, names: str) -> str:
        """Return whether a score is seen. node: a mask, or a tensor of 0 and -inf."""
        value = node.meta["val"]
        if value.dim() > len(names):
            raise _NoExpression("a dimension before the batch")
        places: list[Coordinate] = [*names[len(names) - value.dim() :]]
        return self.at(node, places) if value.dtype is torch.bool else self.added(node, places)

    def added(self, node: fx.Node, places: Sequence[Coordinate]) -> str:
        """Return whether an element of 0 and -inf is 0."""
        op: Any = node.target
        args: Any = node.args
        if (moved := self.moved(node, places)) is not None:
            return self.added(*moved)
        if op in (aten._to_copy.default, aten.clone.default, aten.alias.default):
            return self.added(args[0], places)
        if op is aten.masked_fill.Scalar and args[2] == -math.inf:
            hidden = self.operand(args[1], node, places)
            rest = None if _number(args[0]) == 0 else self.added(*self.place(args[0], node, places))
            shown = _not(hidden)
            return shown if rest is None else _and(rest, shown)
        if op in _WHERE:
            numbers = [_number(x) for x in args[1:]]
            condition = self.operand(args[0], node, places)
            if numbers == [0, -math.inf]:
                return condition
            if numbers == [-math.inf, 0]:
                return _not(condition)
        if op is aten.add.Tensor and not node.kwargs:
            parts = [self.added(*self.place(x, node, places)) for x in args]
            return _and(*parts)
        if op in _TRIANGLES and _number(args[0]) == -math.inf:
            return _not(_TRIANGLES[op](places, *args[1:]))
        raise _NoExpression(str(op))

    # -------------------------------------------------------------------------- any element

    def at(self, node: fx.Node, places: Sequence[Coordinate]) -> str:
        """Return the expression of a tensor's element. places: one for each dimension."""
        places = _normal(node, places)
        before = dict(self.buffers)
        try:
            text = self._computed(node, places)
        except _NoExpression:
            self.buffers = before
            return self._entry(node, places)
        # Computed once for each row, instead of for each pair.
        if len(self.buffers) > len(before) and not _has_pairs(places) and _computes(node):
            self.buffers = before
            return self._entry(node, places)
        if len(text) > LONGEST:
            raise _NoExpression("long")
        return text

    def _computed(self, node: fx.Node, places: Sequence[Coordinate]) -> str:
        op: Any = node.target
        args: Any = node.args
        if node.op != "call_function":
            raise _NoExpression(node.op)
        if (moved := self.moved(node, places)) is not None:
            return self.at(*moved)
        value = node.meta["val"]
        if op in _RANGES:
            return _of_range(node, places[0] or ZERO)
        if op in _FILLED:
            return f"aten.scalar_tensor.default({_number(node)!r}, dtype={value.dtype})"
        if op in _TRIANGLES:
            kept = _TRIANGLES[op](places, *args[1:])
            if value.dtype is torch.bool:
                return kept if _number(args[0]) == 1 else _and(self.at(args[0], places), kept)
            zero = f"aten.scalar_tensor.default(0, dtype={value.dtype})"
            return f"aten.where.self({kept}, {self.at(args[0], places)}, {zero})"
        if op is aten.index.Tensor:
            return self._indexed(node, places)
        if not is_elementwise(op) or not isinstance(value, Tensor):
            raise _NoExpression(str(op))
        texts = [self.operand(x, node, places) for x in args]
        kept = {name: x for name, x in node.kwargs.items() if name not in _PLACEMENT}
        texts += [f"{name}={self.operand(x, node, places)}" for name, x in kept.items()]
        return f"{op}({', '.join(texts)})"

    def operand(self, x: Any, node: fx.Node, places: Sequence[Coordinate]) -> str:
        """Return the expression of an operation's operand, which may broadcast."""
        return self.at(*self.place(x, node, places)) if isinstance(x, fx.Node) else _constant(x)

    def place(
        self, x: Any, node: fx.Node, places: Sequence[Coordinate]
    ) -> tuple[fx.Node, Sequence[Coordinate]]:
        value = x.meta.get("val")
        if not isinstance(value, Tensor):
            raise _NoExpression("a number of a run")
        # An operand without dimensions has no say in the dtype of a result.
        if not value.dim() and node.meta["val"].dim() and value.is_floating_point():
            raise _NoExpression("a number of a run")
        return x, places[len(places) - value.dim() :]

    def _indexed(self, node: fx.Node, places: Sequence[Coordinate]) -> str:
        """Return the expression of an entry that other values index, in one step or in several."""
        args: Any = node.args
        table, index = args
        if not isinstance(table, fx.Node) or not isinstance(index, (list, tuple)):
            raise _NoExpression("a number of a run")
        value, own = table.meta["val"], node.meta["val"].dim()
        at = [d for d, x in enumerate(index) if x is not None]
        if at != [*range(at[0], at[-1] + 1)]:
            raise _NoExpression("indices apart")
        sizes = [index[d].meta["val"].dim() for d in at]
        # The indices' own dimensions take the place of those that they index.
        inner = places[at[0] : at[0] + own - value.dim() + len(at)]
        if any(index[d].meta["val"].dtype is torch.bool for d in at) or max(sizes) != len(inner):
            raise _NoExpression("a size of a run")
        texts = [self.at(index[d], inner[len(inner) - n :]) for d, n in zip(at, sizes)]
        entry = [*places[: at[0]], *texts, *places[at[0] + len(inner) :]]
        if 4 * value.numel() <= self.pairs:
            read = ", ".join(place or ZERO for place in entry)
            return f"aten.index.Tensor({self._buffer(table)}, [{read}])"
        if table.target is aten.index.Tensor:
            return self._indexed(table, entry)
        raise _NoExpression("a table with pairs")

    def _entry(self, node: fx.Node, places: Sequence[Coordinate]) -> str:
        """Return an entry of a tensor that is read as it stands."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or _has_pairs(places) or node.target is getitem:
            raise _NoExpression(str(node.target))
        if value.is_complex() or value.requires_grad and value.is_floating_point():
            raise _NoExpression(str(node.target))
        name = self._buffer(node)
        index = ", ".join(place or ZERO for place in places)
        return f"aten.index.Tensor({name}, [{index}])" if places else name

    def _buffer(self, node: fx.Node) -> str:
        return self.buffers.setdefault(node, f"u{len(self.buffers)}")

    # --------------------------------------------------------------------------------- views

    def moved(
        self, node: fx.Node, places: Sequence[Coordinate]
    ) -> tuple[fx.Node, list[Coordinate]] | None:
        """Return the value and the element that a view shows; None for no view."""
        if node.op != "call_function" or not isinstance(node.args[:1] and node.args[0], fx.Node):
            return None
        source: Any = node.args[0]
        value = source.meta.get("val")
        if not isinstance(value, Tensor) or node.target not in VIEWS:
            return None
        shape = tuple(value.shape)
        if not all(type(n) is int for n in (*shape, *node.meta["val"].shape)):
            return None
        found = VIEWS[node.target](shape, tuple(node.meta["val"].shape), places, *node.args[1:])
        return None if found is None else (source, found)


def _normal(node: fx.Node, places: Sequence[Coordinate]) -> list[Coordinate]:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(type(n) is int for n in value.shape):
        raise _NoExpression(node.name)
    return [None if n == 1 else place for n, place in zip(value.shape, places, strict=True)]


def _has_pairs(places: Sequence[Coordinate]) -> bool:
    words = {word for place in places if place for word in re.findall(r"\b[qk]\b", place)}
    return len(words) == 2


def _computes(node: fx.Node) -> bool:
    return is_elementwise(node.target) or node.target is aten.index.Tensor


def _constant(x: object) -> str:
    if isinstance(x, (list, tuple)) or not isinstance(x, (bool, int, float, str, torch.dtype)):
        if x is not None:
            raise _NoExpression(repr(x))
    return repr(x)


def _and(a: str, b: str) -> str:
    return f"aten.bitwise_and.Tensor({a}, {b})"


_OPPOSITE = {"ge": "lt", "lt": "ge", "le": "gt", "gt": "le"}


def _not(text: str) -> str:
    """Return the opposite; of a comparison of positions, the opposite comparison."""
    found = re.fullmatch(r"aten\.(ge|lt|le|gt)\.Tensor\(([qk]), ([qk])\)", text)
    if found is None:
        return f"aten.bitwise_not.default({text})"
    name, *places = found.groups()
    return _compared(_OPPOSITE[name], *places)


def _compared(name: str, a: str, b: str) -> str:
    return f"aten.{name}.Tensor({a}, {b})"


def _number(x: Any) -> float | None:
    """Return the number that all elements of a value are, if the program says it."""
    if isinstance(x, (bool, int, float)):
        return x
    if not isinstance(x, fx.Node) or x.op != "call_function":
        return None
    if x.target in _FILLED:
        number = _FILLED[x.target](x.args)
        return number if isinstance(number, (bool, int, float)) else None
    is_copy = x.target in (*VIEWS, aten._to_copy.default)
    return _number(x.args[0]) if is_copy and x.args else None


_FILLED: dict[Any, Callable[[Sequence[Any]], Any]] = {
    aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
    aten.scalar_tensor.default: lambda args: args[0],
    **dict.fromkeys(
        (aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda args: 1
    ),
    **dict.fromkeys(
        (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda args: 0
    ),
}
_WHERE = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def _of_range(node: fx.Node, place: str) -> str:
    args: Any = node.args
    start = 0 if node.target is aten.arange.default else args[0]
    step = args[2] if len(args) > 2 else 1
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or not all(type(n) is int for n in (start, step)):
        raise _NoExpression("a range of numbers")
    text = shifted(place, start, step)
    return text if dtype is torch.int64 else f"aten._to_copy.default({text}, dtype={dtype})"


def _triangle(lower: bool) -> Callable[..., str]:
    """Return the function that writes which elements a triangle keeps."""

    def kept(places: Sequence[Coordinate], diagonal: int = 0) -> str:
        row, column = (place or ZERO for place in places[-2:])
        if diagonal == 0:
            return _compared("ge" if lower else "le", row, column)
        if diagonal == (-1 if lower else 1):
            return _compared("gt" if lower else "lt", row, column)
        away = f"aten.sub.Tensor({column}, {row})"
        return f"aten.{'le' if lower else 'ge'}.Scalar({away}, {diagonal})"

    return kept


_TRIANGLES = {aten.tril.default: _triangle(True), aten.triu.default: _triangle(False)}
