"""Bound a mask over blocks of queries and keys, without computing it for each pair.

    mask      aten.ge.Tensor(q, k)
    blocks    queries [8, 16), keys [0, 8)      ->  all pairs are seen
              queries [8, 16), keys [16, 24)    ->  none is

Interval arithmetic: each value of an expression is a pair, the least and the greatest that it may
have in a block. A truth value may be false, true or either. Of a buffer that positions index, a
table has the extremes of all ranges whose length is a power of two. An operation without a row
below may have any value, so a block is never called empty, or full, in error.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat.operators import aten, find


class Interval(NamedTuple):
    """The least and the greatest value in each block [b, h, blocks of q, blocks of k].

    An exact value has the same object twice.
    """

    low: Any
    high: Any

    @property
    def exact(self) -> bool:
        return self.low is self.high


class Visible(NamedTuple):
    """Which blocks [blocks of q, blocks of k] may have a pair that is seen, and have only such."""

    some: Tensor
    whole: Tensor


# Entries of a table whose rectangles are counted, at most: sums have 4 bytes for each.
LARGEST = 1 << 26
# A value of which nothing is known.
Known = Interval | None


def blocks_seen(
    text: str,
    buffers: Sequence[Tensor | None],
    lead: tuple[Tensor, Tensor],
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
) -> Visible:
    """Bound a mask for all b and h, whose values are `lead`.

    buffers: None for one that is not known. queries, keys: [start, stop) of blocks.
    """
    shape = (len(lead[0]), len(lead[1]), len(queries), len(keys))
    device = lead[0].device
    batch, heads = lead[0].view(-1, 1, 1, 1), lead[1].view(-1, 1, 1)
    places = [torch.tensor(x, device=device).view(-1, 2) for x in (queries, keys)]
    names: dict[str, Known] = {
        "b": Interval(batch, batch),
        "h": Interval(heads, heads),
        "q": Interval(places[0][:, :1], places[0][:, 1:] - 1),
        "k": Interval(places[1][:, 0], places[1][:, 1] - 1),
    }
    # One dimension, as in Flex: a tensor without dimensions would be promoted to another dtype.
    known = {f"u{i}": x if x.dim() else x.view(1) for i, x in enumerate(buffers) if x is not None}
    names |= {name: Interval(x, x) for name, x in known.items()}
    # Numbers become tensors on this device, whichever default the caller has set.
    with torch.device(device):
        found = _Evaluation(names).of(ast.parse(text, mode="eval").body)
        if found is None or not _is_truth(found):
            found = Interval(False, True)
        some, whole = (torch.as_tensor(x).expand(shape) for x in (found.high, found.low))
    return Visible(some.flatten(0, 1).any(0), whole.flatten(0, 1).all(0))


def _is_truth(*values: Known) -> bool:
    """Return whether values are truth values."""
    parts = [x for value in values if value is not None for x in value]
    types = [x.dtype if isinstance(x, Tensor) else type(x) for x in parts]
    return len(parts) == 2 * len(values) and all(t in (torch.bool, bool) for t in types)


def _has_nan(value: Interval) -> bool:
    """Return whether a value may be NaN, which compares with nothing."""
    real = [x for x in value if isinstance(x, Tensor) and x.is_floating_point()]
    return any(bool(x.isnan().any()) for x in real)


class _Evaluation:
    def __init__(self, names: dict[str, Known]) -> None:
        self.names = names

    def of(self, node: ast.AST) -> Known:
        if isinstance(node, ast.Name):
            found = self.names.get(node.id)
            return None if found is None or _has_nan(found) else found
        if isinstance(node, ast.NamedExpr):
            self.names[node.target.id] = value = self.of(node.value)
            return value
        if isinstance(node, ast.Call):
            found = self._call(node)
            return None if found is None or _has_nan(found) else found
        try:
            value = ast.literal_eval(node)
        except ValueError:  # -inf
            return None
        return Interval(value, value)

    def _call(self, node: ast.Call) -> Known:
        _, name, overload = ast.unparse(node.func).split(".")
        if name == "index" and isinstance(node.args[1], ast.List):
            return _entries(self.of(node.args[0]), [self.of(x) for x in node.args[1].elts])
        args = [self.of(x) for x in node.args]
        options = {str(x.arg): _option(x.value) for x in node.keywords}
        if any(x is None for x in args) and name not in _OF_TRUTH:
            return None
        if all(x is not None and x.exact for x in args):
            value = find("aten", name, overload)(*(x.low for x in args if x), **options)
            return Interval(value, value)
        if name in _MONOTONE:
            first = args[0]
            # Every number but 0 is True, so truth is in no order.
            truth = options.get("dtype") is torch.bool and not _is_truth(first)
            if first is None or truth or not all(x is not None and x.exact for x in args[1:]):
                return None
            op, rest = find("aten", name, overload), [x.low for x in args[1:] if x]
            found = Interval(*(op(torch.as_tensor(x), *rest, **options) for x in first))
            return found if name != "_to_copy" or _fits(found, _wide(first)) else None
        # Rounding towards 0 is rounding down where nothing is negative.
        rounding = options.pop("rounding_mode", None) if name == "div" else None
        if rounding is not None and args[0] is not None:
            least = torch.as_tensor(args[0].low)
            name = "floor_divide" if rounding == "floor" or bool((least >= 0).all()) else ""
        function = _INTERVALS.get(name)
        # A third operand would be a factor of the second one.
        if function is None or options or len(args) > 2 and name != "where":
            return None
        return function(*args)


def _option(node: ast.AST) -> Any:
    if isinstance(node, ast.Attribute):
        return getattr(torch, node.attr)  # a dtype: flex_op has checked the text
    return ast.literal_eval(node)


# ------------------------------------------------------------------------------- entries of buffers


def _entries(buffer: Known, index: list[Known]) -> Known:
    """Bound a buffer's entries; one index may be a range, and the others are exact.

    In a buffer of truth values two may be ranges: sums over rectangles count the true entries.
    """
    if buffer is None or not buffer.exact or any(x is None for x in index):
        return None
    at = [x for x in index if x is not None]
    ranges = [i for i, x in enumerate(at) if not x.exact]
    table = torch.as_tensor(buffer.low)
    if not ranges:
        value = aten.index.Tensor(table, [x.low for x in at])
        return Interval(value, value)
    if not table.numel() or table.is_complex():
        return None
    if len(ranges) == 2 and table.dtype == torch.bool and table.numel() <= LARGEST:
        return _rectangles(table, at, ranges)
    if len(ranges) > 1:
        return Interval(table.amin(), table.amax())
    (range_dim,) = ranges
    others = [x.low for i, x in enumerate(at) if i != range_dim]
    rows, (low, high) = table.movedim(range_dim, -1), at[range_dim]
    size = rows.shape[-1]
    if bool((low < 0).any()) or bool((high >= size).any()):
        return Interval(table.amin(), table.amax())  # a negative index counts from the end
    # Two ranges whose length is a power of two cover any range.
    level = (high - low + 1).double().log2().floor().long()
    second = high + 1 - 2**level
    return Interval(
        *(
            extreme(
                levels[(level, *others, low)],
                levels[(level, *others, second)],
            )
            for extreme in (torch.minimum, torch.maximum)
            for levels in [_levels(rows, extreme, int(level.max()))]
        )
    )


def _rectangles(table: Tensor, index: list[Interval], ranges: list[int]) -> Interval:
    """Bound the truth values in rectangles. ranges: the two dimensions with ranges."""
    others = [torch.as_tensor(x.low) for i, x in enumerate(index) if i not in ranges]
    table = table.movedim(ranges, (-2, -1))
    ends = [(index[i].low, index[i].high, table.shape[j - 2]) for j, i in enumerate(ranges)]
    if any(bool((low < 0).any()) or bool((high >= size).any()) for low, high, size in ends):
        return Interval(table.amin(), table.amax())  # a negative index counts from the end
    # Entry i, j: how many are true before row i and column j.
    sums = table.cumsum(-2, dtype=torch.int32).cumsum(-1, dtype=torch.int32)
    sums = torch.nn.functional.pad(sums, (1, 0, 1, 0))
    (top, bottom, _), (left, right, _) = ends
    at = lambda row, column: sums[(*others, row, column)]  # noqa: E731
    true = at(bottom + 1, right + 1) - at(top, right + 1) - at(bottom + 1, left) + at(top, left)
    return Interval(true == (bottom + 1 - top) * (right + 1 - left), true > 0)


def _levels(rows: Tensor, extreme: Callable[..., Tensor], last: int) -> Tensor:
    """Return the extremes of the 2**i entries from each on, [levels, ..., entries]."""
    levels, size = [rows], rows.shape[-1]
    for i in range(last):
        step = min(1 << i, size)
        # Behind the end nothing is looked up.
        ahead = torch.cat([levels[-1][..., step:], levels[-1][..., size - step :]], -1)
        levels.append(extreme(levels[-1], ahead))
    return torch.stack(levels)


# --------------------------------------------------------------------------------------- operations


def _four(a: Interval, b: Interval, function: Callable[..., Any]) -> Interval:
    """Bound a function that is monotone in each operand, rising or falling."""
    corners = [torch.as_tensor(function(x, y)) for x in a for y in b]
    low = high = corners[0]
    for corner in corners[1:]:
        low, high = torch.minimum(low, corner), torch.maximum(high, corner)
    return Interval(low, high)


def _wide(a: Interval) -> Interval:
    low = torch.as_tensor(a.low).double()
    return Interval(low, low if a.exact else torch.as_tensor(a.high).double())


def _fits(found: Interval, wide: Interval) -> bool:
    """Return whether no integer has wrapped around. wide: the same in double precision."""
    pairs = [(torch.as_tensor(x), y) for x, y in zip(found, wide, strict=True)]
    return all(x.is_floating_point() or bool(((x.double() - y).abs() < 1).all()) for x, y in pairs)


def _of_numbers(function: Callable[..., Known]) -> Callable[..., Known]:
    """Return arithmetic that knows nothing of infinite operands, or where integers wrap around.

    Between infinite ends a sum may be NaN, which compares with nothing.
    """

    def bounds(*args: Interval) -> Known:
        wide = [*map(_wide, args)]
        if len(args) == 2 and args[0] is args[1]:
            wide[1] = wide[0]
        if not all(bool(x.isfinite().all()) for each in wide for x in each):
            return None
        found, expected = function(*args), function(*wide)
        fits = found is not None and expected is not None and _fits(found, expected)
        return found if fits else None

    return bounds


def _multiplied(a: Interval, b: Interval) -> Known:
    if a is b and not _is_truth(a):
        return _powers(a, Interval(2, 2))
    both = _OF_TRUTH["logical_and"](a, b)
    return _four(a, b, lambda x, y: x * y) if both is None else both


def _powers(a: Interval, b: Interval) -> Known:
    if type(b.low) is not int or b.low < 0:
        return None
    base = a if b.low % 2 else _absolute(a)
    return Interval(*(torch.as_tensor(x) ** b.low for x in base))


def _divided(a: Interval, b: Interval) -> Known:
    positive = b.exact and bool((torch.as_tensor(b.low) > 0).all())
    return Interval(a.low / b.low, a.high / b.low) if positive else None


def _floored(a: Interval, b: Interval) -> Known:
    positive = b.exact and bool((torch.as_tensor(b.low) > 0).all())
    return Interval(a.low // b.low, a.high // b.low) if positive else None


def _remainder(a: Interval, b: Interval) -> Known:
    round_number = _floored(a, b)
    if round_number is None:
        return None
    same = round_number.low == round_number.high
    return Interval(torch.where(same, a.low % b.low, 0), torch.where(same, a.high % b.low, b.low))


def _absolute(a: Interval) -> Interval:
    ends = [torch.as_tensor(x).abs() for x in a]
    apart = (torch.as_tensor(a.low) > 0) | (torch.as_tensor(a.high) < 0)
    return Interval(torch.where(apart, torch.minimum(*ends), 0), torch.maximum(*ends))


def _equal(a: Interval, b: Interval) -> Interval:
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Interval(same, (a.low <= b.high) & (b.low <= a.high))


def _not(a: Known) -> Known:
    return Interval(a.high == 0, a.low == 0) if a is not None and _is_truth(a) else None


def _negated(function: Callable[..., Interval]) -> Callable[..., Known]:
    return lambda a, b: _not(function(a, b))


def _less(a: Interval, b: Interval) -> Interval:
    return Interval(a.high < b.low, a.low < b.high)


def _at_most(a: Interval, b: Interval) -> Interval:
    return Interval(a.high <= b.low, a.low <= b.high)


def _of_truth(function: Callable[..., Known], known: int) -> Callable[..., Known]:
    """Return a function of truth values. known: how many have to be; others may be numbers."""

    def bounds(*args: Known) -> Known:
        if sum(x is not None for x in args) < known:
            return None
        args = tuple(Interval(False, True) if x is None else x for x in args)
        return function(*args) if _is_truth(*args) else None

    return bounds


def _where(condition: Known, a: Known, b: Known) -> Known:
    if a is None or b is None or condition is None or not _is_truth(condition):
        return None
    always, never = torch.as_tensor(condition.low), ~torch.as_tensor(condition.high)
    low, high = (
        torch.where(always, x, torch.where(never, y, extreme(*map(torch.as_tensor, (x, y)))))
        for x, y, extreme in zip(a, b, (torch.minimum, torch.maximum))
    )
    return Interval(low, high)


def _xor(a: Interval, b: Interval) -> Interval:
    return Interval(
        (a.low & (b.high == 0)) | (b.low & (a.high == 0)),
        (a.high & (b.low == 0)) | (b.high & (a.low == 0)),
    )


_JOINS: dict[str, tuple[Callable[..., Known], int]] = {
    "and": (lambda a, b: Interval(a.low & b.low, a.high & b.high), 1),
    "or": (lambda a, b: Interval(a.low | b.low, a.high | b.high), 2),
    "xor": (_xor, 2),
}
_OF_TRUTH = {f"logical_{name}": _of_truth(join, 0) for name, (join, _) in _JOINS.items()}
_OF_TRUTH |= {f"bitwise_{name}": _of_truth(*join) for name, join in _JOINS.items()}
_INTERVALS: dict[str, Callable[..., Known]] = {
    **_OF_TRUTH,
    "bitwise_not": _not,
    "logical_not": _not,
    "where": _where,
    "eq": _equal,
    "ne": _negated(_equal),
    "lt": _less,
    "le": _at_most,
    "gt": _negated(_at_most),
    "ge": _negated(_less),
    "add": _of_numbers(lambda a, b: Interval(a.low + b.low, a.high + b.high)),
    "sub": _of_numbers(lambda a, b: Interval(a.low - b.high, a.high - b.low)),
    "rsub": _of_numbers(lambda a, b: Interval(b.low - a.high, b.high - a.low)),
    "neg": _of_numbers(lambda a: Interval(-a.high, -a.low)),
    "mul": _of_numbers(_multiplied),
    "div": _of_numbers(_divided),
    "floor_divide": _of_numbers(_floored),
    "pow": _of_numbers(_powers),
    "remainder": _of_numbers(_remainder),
    "abs": _of_numbers(_absolute),
    "minimum": lambda a, b: Interval(*map(torch.minimum, a, b)),
    "maximum": lambda a, b: Interval(*map(torch.maximum, a, b)),
}
# Functions that rise with their first operand, or keep it.
_MONOTONE = {
    *("_to_copy", "alias", "clamp", "clamp_max", "clamp_min", "clone", "detach", "lift_fresh_copy"),
    *("ceil", "exp", "exp2", "floor", "log", "log2", "relu", "round", "sqrt", "trunc"),
}
