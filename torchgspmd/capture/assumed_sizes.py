"""Branches on value-dependent sizes, where all sizes but 0 and 1 have the same outcome.

rows = x[mask]                  a size that only a run knows
if len(rows) == 0:              taken as False, and every run checks that it is
    return None                 a run in which it is True ends there, and runs another program
if rows.shape[0] > 7:           an error: sizes of 2 and more have both outcomes
assert tokens.shape[1] <= 1024  an argument's size: a guard, so 1025 tokens have another program
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..compat.fx_nodes import fake_mode, reached
from ..compat.operators import aten
from ..compat.private_apis import GuardOnDataDependentSymNode, ShapeEnv
from ..errors import ShardingError, user_line
from ..rules.custom_ops.loops import ENTRIES

# Sizes, in parts, to try: a condition with one outcome for these has it for all sizes.
_SIZES = (2, 3, 1009, 1013)
UNBOUNDED = 2**62  # the greatest size
# Set where a branch on no rows changes nothing: the sizes that such branches take for more.
EMPTY_IS_NOTHING: ContextVar[set[Any] | None] = ContextVar("empty is nothing", default=None)
_SYMBOL = re.compile(r"\b[uzs]\d+\b")
# The most programs that a call runs until one is right.
MOST_TRIES = 16


class Sides(NamedTuple):
    """The sizes that a program takes for few. few: by the branches on them. tries: so far."""

    few: frozenset[str] = frozenset()
    tries: int = 0


_ALL_MANY = Sides()
SIDES: ContextVar[Sides] = ContextVar("sides", default=_ALL_MANY)


class OtherSide(ShardingError):
    """A run's size has the other outcome of a branch than the program. branch: which one."""

    def __init__(self, branch: str, *texts: str, **places: str | None) -> None:
        super().__init__(*texts, **places)
        self.branch = branch

    @contextmanager
    def turned(self) -> Iterator[None]:
        """Trace and run the other side of the branch; raise this error after many tries."""
        sides = SIDES.get()
        if not self.branch or sides.tries == MOST_TRIES:
            raise self
        token = SIDES.set(Sides(sides.few ^ {self.branch}, sides.tries + 1))
        try:
            yield
        finally:
            SIDES.reset(token)


class AssumingShapeEnv(ShapeEnv):
    """A ShapeEnv that assumes sizes to be neither 0 nor 1 where a program branches on that."""

    def __init__(self, devices: int = 1) -> None:
        super().__init__()
        self.multiple = devices  # divides the stand-ins for arguments' sizes
        self.ratios: dict[Any, int] = {}  # symbol for an argument's size -> its stand-ins' ratio
        # symbol -> the least value for which the program is right, the line that says so, and the
        # branch there
        self.lower_bounds: dict[Any, tuple[int, str | None, str]] = {}
        # The same for the greatest value, of sizes that are few.
        self.upper_bounds: dict[Any, tuple[int, str | None, str]] = {}
        self.branches: dict[str, list[Any]] = {}  # the sizes that a condition on a line compares
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
        if not getattr(condition, "is_Relational", False) or not symbols:
            return None
        if not all(self._is_size(symbol) for symbol in symbols):
            return None
        if (of_size := _of_size(condition, symbols)) is None:
            return None
        size, holds = of_size
        parts = _parts(condition)
        # For each size, the least and the greatest remainder that divisions can leave.
        sizes = [parts * size + rest for size in _SIZES for rest in {0, parts - 1}]
        if len({holds(number) for number in sizes}) > 1:
            return None
        # The bound goes down as long as the outcome stays the same.
        low = _begin_of_range(holds, 2 * parts)
        if low == 1 and (assumed := EMPTY_IS_NOTHING.get()) is not None:
            assumed.update(symbols)
            return holds(low)
        return self._bounded(size, holds, low, self._branch(condition, size))

    def _bounded(self, size: Any, holds: Callable[[int], Any], least: int, name: str) -> Any:
        """Return a condition's outcome, and bound the size to where it has this outcome.

        name: of the range from `least` on. SIDES has the names of the ranges that a program does
        not take, from many rows to few.
        """
        where, most, above = user_line(), UNBOUNDED, ""
        before = self.lower_bounds.get(size, (0, None, ""))
        greatest = self.upper_bounds.get(size, (UNBOUNDED,))[0]
        while least > 0 and (name in SIDES.get().few or least > greatest):
            most = least - 1
            least = _begin_of_range(holds, most)
            above, name = name, f"{name} below {most + 1}"
        # The strictest condition on a size decides, and is named in the error.
        self.lower_bounds[size] = max(before, (least, where, name), key=lambda row: row[0])
        if most < greatest:
            self.upper_bounds[size] = most, where, above
        return holds(least)

    def _branch(self, condition: Any, size: Any) -> str:
        """Return a name for a branch on a size, the same in each trace."""
        text = f"{user_line()} {_SYMBOL.sub('n', str(condition))}"
        sizes = self.branches.setdefault(text, [])
        if size not in sizes:
            sizes.append(size)
        return f"{text} {sizes.index(size)}"

    def _is_size(self, symbol: object) -> bool:
        """Return whether a symbol is a dimension's size, or was required to be a possible one."""
        bounds = self.var_to_range.get(symbol)
        return bounds is not None and bounds.lower >= 0 and bounds.upper > 1


def _parts(condition: Any) -> int:
    """Return the number of parts into which sizes are divided: 4 for n // 2 and n // 4."""
    divisions = condition.find(lambda each: type(each).__name__ == "FloorDiv")
    return math.lcm(*(int(each.args[1]) for each in divisions if each.args[1].is_Integer))


def _of_size(condition: Any, symbols: Sequence[Any]) -> tuple[Any, Callable[[int], Any]] | None:
    """Return the size that a condition is about, and a function from it to the outcome.

    The size may be a sum or product, as the number of elements of the boxes of several levels, or
    the greatest, as that of rows which are padded.
    """
    difference = (condition.lhs - condition.rhs).expand()
    factors = difference.as_coefficients_dict()
    rest = factors.pop(difference**0, 0)  # of the term without a size
    if all(_is_part(part) and n.is_Integer for part, n in factors.items()) and rest == int(rest):
        if len({n > 0 for n in factors.values()}) == 1:
            unit = math.gcd(*map(int, factors.values()))
            unit *= 1 if min(factors.values()) > 0 else -1
            size: Any = sum(n / unit * part for part, n in factors.items())
            return size, lambda number: condition.func(unit * number + rest, 0)
    if len(symbols) > 1:
        return None
    return symbols[0], lambda number: condition.subs(symbols[0], number)


def _is_part(size: Any) -> bool:
    """Return whether an expression is a product of sizes, or the greatest of sums of these."""
    if size.is_Mul:
        return all(map(_is_part, size.args))
    if type(size).__name__ != "Max":
        return size.is_Symbol
    terms = [term for each in size.args for term in each.as_coefficients_dict().items()]
    return all(n > 0 and (part.is_Integer or _is_part(part)) for part, n in terms)


def _begin_of_range(holds: Callable[[int], Any], number: int) -> int:
    """Return the least size from which on, up to a number, the outcome is the same."""
    outcome = holds(number)
    while number > 0 and holds(number - 1) == outcome:
        number -= 1
    return number


def insert_checks(graph: fx.Graph, env: AssumingShapeEnv) -> list[fx.Node]:
    """Insert checks in every run for the sizes that the trace assumed.

    Return the sizes that nothing else needs, as tensors [], which must be computed all the same.
    """
    rows = [(size, at_least, row) for size, row in env.lower_bounds.items() if row[0] > 0]
    rows += [(size, at_most, row) for size, row in env.upper_bounds.items()]
    # A later line may have found two sizes to be one.
    rows = [(env.replace(size), check, row) for size, check, row in rows]
    checks = [node for row in rows if (node := _insert_check(graph, *row)) is not None]
    assert len(checks) == len(rows), "a size is in no node of the graph"
    used = {*reached([graph.output_node()])}
    alone = [node for node in checks if node not in used]
    for node in alone:
        if any(n.target in ENTRIES for n in reached([node])):
            raise ShardingError(
                "a branch on a size that depends on values stands in another branch or a loop, "
                "where nothing else needs the size",
                where=node.args[2],
                why="a run computes needed values alone, and would not compare the size",
                fix="compute the size before the branch or loop",
            )
    return [_as_tensor(graph, node) for node in alone]


def _as_tensor(graph: fx.Graph, number: fx.Node) -> fx.Node:
    with graph.inserting_after(number):
        tensor = graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": torch.int64})
    with fake_mode():
        tensor.meta = {**number.meta, "val": torch.scalar_tensor(0, dtype=torch.int64)}
    return tensor


Check = Callable[..., int]


def _insert_check(graph: fx.Graph, size: Any, check: Check, rest: tuple) -> fx.Node | None:
    """Pass a size through a check, from the first node that has it. rest: its other arguments.

    Return the checked size; None if no node has it.
    """
    if size.is_Symbol and (owner := _owner_of(graph, size)) and owner.dim is not None:
        return _check_rows(graph, owner.node, owner.dim, check, rest)
    if (number := _computed(graph, size)) is None:
        return None
    checked = _after(check, number, *rest)
    number.replace_all_uses_with(checked, lambda user: user is not checked)
    return checked


_OPERATIONS = {"Add": operator.add, "Mul": operator.mul, "Max": torch.sym_max}


def _computed(graph: fx.Graph, size: Any) -> Any:
    """Return the node for a size; None if the graph lacks a number in it."""
    if size.is_Integer:
        return int(size)
    if size.is_Symbol:
        return None if (owner := _owner_of(graph, size)) is None else owner.number()
    values = [_computed(graph, each) for each in size.args]
    operation = _OPERATIONS[type(size).__name__]
    return None if None in values else reduce(partial(_after, operation), values)


class _Owner(NamedTuple):
    """The first node that has a size. dim: of a tensor; None for a number."""

    node: fx.Node
    dim: int | None

    def number(self) -> fx.Node:
        if self.dim is None:
            return self.node
        return _after(aten.sym_size.int, self.node, self.dim)


def _owner_of(graph: fx.Graph, symbol: object) -> _Owner | None:
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr == symbol:
            return _Owner(node, None)
        for dim, size in enumerate(val.shape if isinstance(val, Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                if node.op == "call_function":
                    return _Owner(node, dim)
    return None


def _after(target: Callable[..., Any], *args: Any) -> fx.Node:
    """Return a new number, computed behind the nodes among its arguments."""
    nodes = [each for each in args if isinstance(each, fx.Node)]
    graph = nodes[0].graph
    last = nodes[0] if len(nodes) == 1 else max(nodes, key=[*graph.nodes].index)
    with graph.inserting_after(last):
        node = graph.call_function(target, args)
    values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
    node.meta = {**last.meta, "val": values[0] if target in CHECKS else target(*values)}
    return node


def _check_rows(graph: fx.Graph, node: fx.Node, dim: int, check: Check, rest: tuple) -> fx.Node:
    """Take all rows of a tensor by a number that has been checked; return the number."""
    val, size = node.meta["val"], _after(aten.sym_size.int, node, dim)
    checked = _after(check, size, *rest)
    with graph.inserting_after(checked):
        # Expanding to the checked size makes every later user depend on the check.
        shape = [checked if d == dim else -1 for d in range(val.dim())]
        rows = graph.call_function(aten.expand.default, (node, shape))
    rows.meta = dict(node.meta)
    node.replace_all_uses_with(rows, lambda user: user not in (size, rows))
    return checked


def at_least(number: int, low: int, where: str | None, branch: str = "") -> int:
    """Return a number, or raise OtherSide if the program was not made for one so small."""
    if number < low:
        raise _other(f"{number}, and the program was made for {low} and more", where, branch)
    return number


def at_most(number: int, high: int, where: str | None, branch: str) -> int:
    """Return a number, or raise OtherSide if the program was not made for one so large."""
    if number > high:
        raise _other(f"{number}, and the program was made for {high} at most", where, branch)
    return number


CHECKS = at_least, at_most


def _other(text: str, where: str | None, branch: str) -> OtherSide:
    return OtherSide(
        branch,
        f"a size that depends on values is {text}",
        where=where,
        why="forward branches on whether it is, and one program is made for all values",
        fix="leave such a batch out, or pad it to more",
    )
