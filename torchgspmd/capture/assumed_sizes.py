"""Branches on value-dependent sizes, where all sizes but 0 and 1 have the same outcome.

rows = x[mask]                  a size that only a run knows
if len(rows) == 0:              taken as False, and every run checks that it is
    return None
if rows.shape[0] > 7:           an error: sizes of 2 and more have both outcomes
assert tokens.shape[1] <= 1024  an argument's size: a guard, so 1025 tokens have another program
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import aten
from ..compat.private_apis import GuardOnDataDependentSymNode, ShapeEnv
from ..errors import ShardingError, user_line

# Sizes, in parts, to try: a condition with one outcome for these has it for all sizes.
_SIZES = (2, 3, 1009, 1013)
UNBOUNDED = 2**62  # the greatest size
# Set where a branch on no rows changes nothing: the sizes that such branches take for more.
EMPTY_IS_NOTHING: ContextVar[set[Any] | None] = ContextVar("empty is nothing", default=None)
# The most sizes in one condition.
_MOST = 3


class AssumingShapeEnv(ShapeEnv):
    """A ShapeEnv that assumes sizes to be neither 0 nor 1 where a program branches on that."""

    def __init__(self, devices: int = 1) -> None:
        super().__init__()
        self.multiple = devices  # divides the stand-ins for arguments' sizes
        self.ratios: dict[Any, int] = {}  # symbol for an argument's size -> its stand-ins' ratio
        # symbol -> the least value for which the program is right, and the line that says so
        self.lower_bounds: dict[Any, tuple[int, str | None]] = {}
        self.near: dict[Any, int] = {}  # symbol -> the argument's size in this trace
        # symbol for an argument's size -> the least and the greatest that the program is right for
        self.bounds: dict[Any, tuple[int, int]] = {}

    def evaluate_expr(self, *args: object, **kwargs: object) -> Any:
        try:
            return super().evaluate_expr(*args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            outcome = self._assume(error.cond)
            if outcome is None:
                outcome = self._guard(error.cond)
            if outcome is None:
                raise
            return outcome

    def _guard(self, condition: Any) -> Any:
        """Return an inequality's outcome for an argument's size in this trace, and bound that size.

        None for other conditions: an equation would give each size a program.
        """
        symbols = condition.free_symbols & {*self.near}
        if getattr(condition, "rel_op", None) not in ("<", "<=", ">", ">=") or len(symbols) != 1:
            return None
        (symbol,) = symbols
        difference = (condition.lhs - condition.rhs).expand()
        factor = difference.coeff(symbol)
        rest = difference - factor * symbol
        if not factor.is_Integer or not rest.is_Integer or factor == 0:
            return None

        def holds(size: int) -> bool:
            return bool(condition.subs(symbol, size))

        outcome, turn = holds(self.near[symbol]), int(-rest // factor)
        same = [size for size in range(turn - 1, turn + 3) if holds(size) == outcome]
        low, high = self.bounds.get(symbol, (0, UNBOUNDED))
        if holds(UNBOUNDED) == outcome:
            self.bounds[symbol] = max(low, same[0]), high
        else:
            self.bounds[symbol] = low, min(high, same[-1])
        return outcome

    def _assume(self, condition: Any) -> Any:
        """Return a condition's outcome for all sizes from 2 on; None if there are several."""
        symbols = sorted(condition.free_symbols, key=str)
        if not getattr(condition, "is_Relational", False) or not 0 < len(symbols) <= _MOST:
            return None
        if not all(self._is_size(symbol) for symbol in symbols):
            return None
        parts = _parts(condition)
        # For each size, the least and the greatest remainder that divisions can leave.
        sizes = [parts * size + rest for size in _SIZES for rest in {0, parts - 1}]
        if (outcome := _outcome(condition, symbols, sizes)) is None:
            return None
        # The bound goes down as long as the outcome stays the same.
        low = 2 * parts
        while low > 0 and _outcome(condition, symbols, (low - 1, *sizes)) is not None:
            low -= 1
        if low == 1 and (assumed := EMPTY_IS_NOTHING.get()) is not None:
            assumed.update(symbols)
            return outcome
        for symbol in symbols:
            before = self.lower_bounds.get(symbol, (0, None))
            # The strictest condition on a size decides, and is named in the error.
            self.lower_bounds[symbol] = max(before, (low, user_line()), key=lambda pair: pair[0])
        return outcome

    def _is_size(self, symbol: object) -> bool:
        """Return whether a symbol is a dimension's size, or was required to be a possible one."""
        bounds = self.var_to_range.get(symbol)
        return bounds is not None and bounds.lower >= 0 and bounds.upper > 1


def _parts(condition: Any) -> int:
    """Return the number of parts into which sizes are divided: 4 for n // 2 and n // 4."""
    divisions = condition.find(lambda each: type(each).__name__ == "FloorDiv")
    return math.lcm(*(int(each.args[1]) for each in divisions if each.args[1].is_Integer))


def _outcome(condition: Any, symbols: list, sizes: Sequence[int]) -> Any:
    """Return a condition's outcome if it is the same for all these sizes, else None."""
    outcomes = {
        condition.subs(dict(zip(symbols, values)))
        for values in itertools.product(sizes, repeat=len(symbols))
    }
    return outcomes.pop() if len(outcomes) == 1 else None


def insert_checks(graph: fx.Graph, env: AssumingShapeEnv) -> None:
    """Insert checks in every run for the sizes that the trace assumed."""
    for symbol, (low, where) in env.lower_bounds.items():
        if low > 0:
            _insert_check(graph, symbol, low, where)


def _insert_check(graph: fx.Graph, symbol: object, low: int, where: str | None) -> None:
    """Pass a size through a check, from the first node that has it."""
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr == symbol:
            with graph.inserting_after(node):
                checked = graph.call_function(at_least, (node, low, where))
            checked.meta = dict(node.meta)
            node.replace_all_uses_with(checked, lambda user, checked=checked: user is not checked)
            return
        dims = [
            d
            for d, size in enumerate(val.shape if isinstance(val, Tensor) else ())
            if isinstance(size, torch.SymInt) and size.node.expr == symbol
        ]
        if dims and node.op == "call_function":
            _check_rows(graph, node, dims[0], low, where)
            return


def _check_rows(graph: fx.Graph, node: fx.Node, dim: int, low: int, where: str | None) -> None:
    """Take all rows of a tensor by a number that has been checked."""
    val = node.meta["val"]
    with graph.inserting_after(node):
        size = graph.call_function(aten.sym_size.int, (node, dim))
    with graph.inserting_after(size):
        checked = graph.call_function(at_least, (size, low, where))
    with graph.inserting_after(checked):
        # Expanding to the checked size makes every later user depend on the check.
        shape = [checked if d == dim else -1 for d in range(val.dim())]
        rows = graph.call_function(aten.expand.default, (node, shape))
    size.meta, checked.meta = ({**node.meta, "val": val.shape[dim]} for _ in range(2))
    rows.meta = dict(node.meta)
    node.replace_all_uses_with(rows, lambda user: user not in (size, rows))


def at_least(number: int, low: int, where: str | None) -> int:
    """Return a number, or raise ShardingError if the program was not made for one so small."""
    if number < low:
        raise ShardingError(
            f"a size that depends on values is {number}, and the program was made for {low} and "
            "more",
            where=where,
            why="forward branches on whether it is, and one program is made for all values",
            fix="leave such a batch out, or pad it to more",
        )
    return number
