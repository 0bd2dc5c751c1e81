"""Argument sizes that may differ between runs of one program.

    x [2, a], mask [2, a + 1]       two dimensions with one size, a
    x.unflatten(0, (-1, 2))         a size that every run divides evenly: its unit is 2

In a trace they are symbols in torch's ShapeEnv, as are sizes that depend on values. Sizes 0 and 1
have programs of their own: they broadcast, and programs branch on them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import aten
from ..compat.private_apis import GuardOnDataDependentSymNode, ShapeEnv
from ..errors import ShardingError, user_line
from ..layout.open_sizes import RATIOS

LEAST = 2


@dataclass(frozen=True)
class ArgumentSizes:
    """The dimensions of tensor arguments whose size a run decides.

    dims: for (tensor, dimension) its size's name, and a number that is added to it. units: by size
    name, the number that divides it in every run; others have 1. Shards have whole units. bounds:
    by size name, the least and the greatest size for which the program's branches are right.
    """

    dims: Mapping[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(tuple(self.dims.items()))

    def shapes(
        self, tensors: Sequence[Tensor], first: int, env: AssumingShapeEnv
    ) -> list[Sequence[Any]]:
        """Return the shapes of a trace's inputs, with symbols for dynamic sizes.

        first: the first argument's position among the tensors.
        """
        symbols: dict[str, Any] = {}
        shapes: list[Any] = [list(t.shape) for t in tensors]
        with env.ignore_fresh_unbacked_symbols():  # they come with the inputs, from no operation
            for (tensor, dim), (name, added) in self.dims.items():
                shape = shapes[first + tensor]
                if name not in symbols:
                    symbols[name] = env.create_unbacked_symint()
                    symbol = symbols[name].node.expr
                    env.near[symbol] = shape[dim] - added
                    # A size without a ratio stays dynamic, but axes cannot shard it.
                    if len(symbols) <= len(RATIOS):
                        env.ratios[symbol] = RATIOS[len(symbols) - 1]
                shape[dim] = symbols[name] + added
                # Sizes 0 and 1 have other programs.
                torch._check(shape[dim] >= LEAST)
        return shapes

    def values(self, shapes: Sequence[Sequence[int]], least: int = LEAST) -> dict[str, int] | None:
        """Return a call's sizes by name; None if it needs another program."""
        sizes: dict[str, int] = {}
        for (tensor, dim), (name, added) in self.dims.items():
            size = shapes[tensor][dim]
            # Dimensions with one name have to agree.
            if size < least or sizes.setdefault(name, size - added) != size - added:
                return None
        return sizes

    def of_trace(self, units: Sequence[int], env: AssumingShapeEnv) -> ArgumentSizes:
        """Return the same with the bounds of a trace, and with units, in the order of its sizes."""
        names = dict.fromkeys(name for name, _ in self.dims.values())
        bounds = {name: env.bounds[s] for name, s in zip(names, env.near) if s in env.bounds}
        units_of = {name: n for name, n in zip(names, units) if n > 1}
        return replace(self, units=units_of, bounds=bounds)

    def has_branches_of(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Return whether the program's branches are those of a call with these shapes."""
        return not self.bounds or all(
            low <= shapes[tensor][dim] - added <= high
            for (tensor, dim), (name, added) in self.dims.items()
            if name in self.bounds
            for low, high in (self.bounds[name],)
        )

    def numbers(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return by name the number of units in each size, for a call with these shapes."""
        numbers: dict[str, int] = {}
        for name, size in (self.values(shapes, least=0) or {}).items():
            unit = self.units.get(name, 1)
            if size % unit:
                raise ShardingError.here(
                    f"size {name} is {size}, and the program divides it into {unit} equal parts",
                    fix=f"give a multiple of {unit}",
                )
            numbers[f"{name}_by_{unit}" if unit > 1 else name] = size // unit
        return numbers

    def without_small(self, shapes: Sequence[Sequence[int]]) -> ArgumentSizes | None:
        """Return the sizes that are symbols in the program for a call with small ones.

        None if all are symbols there, or if sizes with one name differ.
        """
        sizes: dict[str, int] = {}
        small = set()
        for (tensor, dim), (name, added) in self.dims.items():
            size = shapes[tensor][dim]
            if sizes.setdefault(name, size - added) != size - added:
                return None
            small |= {name} if size < LEAST else set()
        rest = {dim: size for dim, size in self.dims.items() if size[0] not in small}
        return ArgumentSizes(rest) if small else None

    def fits(self, tensor: int, shape: Sequence[int], planned: Sequence[int]) -> bool:
        """Return whether a tensor has the planned shape, but for dynamic sizes."""
        return len(shape) == len(planned) and all(
            size == other or (tensor, dim) in self.dims
            for dim, (size, other) in enumerate(zip(shape, planned))
        )

    def check(self, shapes: Sequence[Sequence[int]], least: int = LEAST) -> None:
        """Raise ShardingError if sizes with one name differ, or are smaller than `least`."""
        if self.values(shapes, least) is None:
            sizes = {
                f"{name}{f' + {n}' * bool(n)}": shapes[tensor][dim]
                for (tensor, dim), (name, n) in self.dims.items()
            }
            raise ShardingError.here(
                f"the arguments have sizes that the plan takes for one, or smaller than {LEAST}: "
                + ", ".join(f"{name} is {size}" for name, size in sizes.items()),
                fix='give sizes that differ different names: dynamic={"tokens": {1: "length"}}',
            )
        if not self.has_branches_of(shapes):
            ranges = [
                f"{name} from {low}" + f" to {high}" * (high < UNBOUNDED)
                for name, (low, high) in self.bounds.items()
            ]
            raise ShardingError.here(
                f"the plan is for sizes {', '.join(ranges)}",
                why="forward compares a size with a number, and takes another branch here",
                fix="make a plan for these sizes",
            )


Dims = int | Iterable[int] | Mapping[int, str]


def sizes_of(
    dynamic: Mapping[str, Dims] | None,
    names: Sequence[str],
    leaves: Sequence[object],
    programs_for_small: bool = False,
) -> ArgumentSizes:
    """Return the sizes that `plan(dynamic=)` names. names: one for each leaf.

    programs_for_small: leave out sizes 0 and 1, which have programs of their own.
    """
    tensors = [(name, x) for name, x in zip(names, leaves) if isinstance(x, Tensor)]
    dims: dict[tuple[int, int], tuple[str, int]] = {}
    for pattern, asked in (dynamic or {}).items():
        chosen = [i for i, (name, _) in enumerate(tensors) if fnmatchcase(name, str(pattern))]
        if not chosen:
            raise ShardingError.here(
                f"dynamic names '{pattern}', which is no tensor among the arguments",
                fix=f"name one of these tensors: {', '.join(name for name, _ in tensors)}",
            )
        for i in chosen:
            for dim, size in _named(asked, *tensors[i]).items():
                dims[i, dim] = size
    # A size without a name is known by its number so far; equal numbers get one name.
    numbers = [name for name, _ in dims.values() if name.isdigit()]
    named = {number: f"n{i}" for i, number in enumerate(dict.fromkeys(numbers))}
    dims = {dim: (named.get(name, name), added) for dim, (name, added) in dims.items()}
    sizes, shapes = ArgumentSizes(dims), [t.shape for _, t in tensors]
    sizes.check(shapes, least=0)
    return programs_for_small and sizes.without_small(shapes) or sizes


def _named(asked: Dims, name: str, tensor: Tensor) -> dict[int, tuple[str, int]]:
    """Return each dimension's size; those with one size now have one name."""
    if not isinstance(asked, Mapping):
        asked = dict.fromkeys([asked] if isinstance(asked, int) else asked, "")
    rank, named = tensor.dim(), {}
    for dim, size in asked.items():
        if not -rank <= dim < rank:
            raise ShardingError.here(f"dynamic names dimension {dim} of '{name}', which has {rank}")
        match = re.fullmatch(r"(\w+)(?: *\+ *(\d+))?", size or str(tensor.shape[dim]))
        if match is None:
            raise ShardingError.here(
                f"dynamic names the size '{size}' of dimension {dim} of '{name}'",
                fix="give a name, or a name and a number, as 'length + 1'",
            )
        named[dim % rank] = match[1], int(match[2] or 0)
    return named


# Branches on value-dependent sizes, where all sizes but 0 and 1 have the same outcome.
#
# rows = x[mask]                  a size that only a run knows
# if len(rows) == 0:              taken as False, and every run checks that it is
#     return None
# if rows.shape[0] > 7:           an error: sizes of 2 and more have both outcomes
# assert tokens.shape[1] <= 1024  an argument's size: a guard, so 1025 tokens have another program

# Sizes, in parts, to try: a condition with one outcome for these has it for all sizes.
_SIZES = (2, 3, 1009, 1013)
UNBOUNDED = 2**62  # the greatest size
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
