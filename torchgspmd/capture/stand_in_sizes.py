"""Numbers that stand for value-dependent sizes in the passes.

    nonzero(x)  [u0, 2]         val: [496, 2], other: [1616, 2]
    split       [u1, 8]         val: [592, 8], other: [1648, 8], as well as u1 + u2 == 12
    cat         [u1 + u2, 8]    val: [12, 8]
    unflatten   [n // 2, 2]     n is 2 p, and p has the stand-ins: every run has an even n

Each size has two numbers. So a rule or a constant that depends on one is seen: with the other
number it differs. They are multiples of 16, since programs split such dimensions into 2, 4
and 8 groups. None occurs in the program. An argument size's first number is near its present
size, which gives the costs, and is a multiple of the device count. Its second number is the first
times a prime (layout/open_sizes.py), so that products of such sizes are seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..compat.fx_nodes import reached
from ..compat.operators import draws
from ..compat.private_apis import ShapeEnv
from ..compat.private_apis import _pytree as pytree
from ..layout.open_sizes import GROUP, factors_of

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # known only when the program runs
# Stand-ins are multiples of primes from these on.
_FIRST, _SECOND = 31, 101
# The largest divisor for which all row counts are tried.
_MOST_PARTS = 4096


class StandInSizes:
    """The stand-ins for all symbols in one program."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = [node for node in graph.nodes if _symbols_in(node.meta.get("val"))]
        self.solved: dict[Any, Any] = {}  # symbol -> the expression in others that determines it
        self.reduced: dict[Any, Any] = {}  # expression -> the same without these
        self.stand_ins: dict[Any, tuple[int, int]] = {}  # reduced expression -> its numbers
        self.units: list[int] = []  # for arguments' sizes, in their order
        if not nodes:
            return
        # A stand-in that equals a number in the program could be mistaken for it.
        self.taken = set(_integers(graph))
        self._merge(graph, nodes)
        self.env = _shape_env(nodes[0].meta["val"])
        self._solve(self.env)
        self._take_units()
        tensors = (t for n in nodes for t in pytree.tree_leaves(n.meta["val"]))
        shapes = [t.shape for t in tensors if isinstance(t, Tensor)]
        self.sizes = {self._reduced(n) for s in shapes for n in s if isinstance(n, torch.SymInt)}
        # Argument sizes that axes may shard. A size with parts in the program, such as n // 2, is
        # none: by numbers, 8 (n // 2) is 4 n.
        parts = (e for size in self.sizes for e in size.find(_is_part))
        in_parts = {symbol for part in parts for symbol in part.free_symbols}
        self.ratios = {s: ratio for s, ratio in self.ratios.items() if s not in in_parts}
        self.primes = [_primes(_FIRST), _primes(_SECOND)]

    def _take_units(self) -> None:
        """Replace sizes that every run divides evenly by multiples of new symbols."""
        equations = [e for e in _asserted(self.env) if _is_equation(e)]
        self.ratios, self.near = dict[Any, int](), dict(getattr(self.env, "near", {}))
        for symbol, ratio in getattr(self.env, "ratios", {}).items():
            unit = 1 if symbol in self.solved else _unit(symbol, equations)
            self.units.append(unit)
            if unit > 1:
                parts = type(symbol)(f"{symbol}_parts", integer=True, positive=True)
                self.solved[symbol], self.near[parts] = unit * parts, self.near[symbol] // unit
                symbol = parts
            self.ratios[symbol] = ratio

    def values(self, value: Any) -> tuple[Any, Any]:
        """Return a node's result with each stand-in in place of symbols.

        Both are the same object if there are no symbols.
        """
        if not self._depends(value):
            one = self._replace(value, 0)
            return one, one
        return self._replace(value, 0), self._replace(value, 1)

    def constant(self, value: Any) -> Any:
        """Return a number's value if it is the same in all runs, else None."""
        if not isinstance(value, NUMBERS) or self._depends(value):
            return None
        return self._replace(value, 0)

    def _depends(self, value: Any) -> bool:
        """Return whether a value has a number that differs between runs."""
        if isinstance(value, (tuple, list)):
            return any(map(self._depends, value))
        if isinstance(value, Tensor):
            return any(map(self._depends, value.shape))
        return isinstance(value, NUMBERS) and bool(self._reduced(value).free_symbols)

    def _reduced(self, number: Any) -> Any:
        """Return a number's expression, without symbols that others determine."""
        expression = number.node.expr
        if expression not in self.reduced:
            self.reduced[expression] = _substitute(expression, self.solved)
        return self.reduced[expression]

    def _merge(self, graph: fx.Graph, nodes: list[fx.Node]) -> None:
        """Merge symbols that come from equal computations, such as two `n.tolist()`."""
        first: dict[Any, fx.Node] = {}
        same: dict[fx.Node, int] = {}  # node -> number of its computation
        needed = {*reached(nodes)}
        for node in graph.nodes:
            if node not in needed:
                continue
            key: Any = node
            if node.op == "call_function" and not draws(node.target):
                key = (
                    node.target,
                    repr(fx.map_arg((node.args, dict(node.kwargs)), same.__getitem__)),
                )
            earlier = first.setdefault(key, node)
            same[node] = id(earlier)
            if earlier is not node:
                pairs = zip(*(_symbols(each.meta.get("val")) for each in (node, earlier)))
                self.solved.update((a, b) for a, b in pairs if a != b)

    def _solve(self, env: Any) -> None:
        """Find symbols that sums determine, as in u0 + u1 == 12, and u0 == min(u0, 16)."""
        for equation in filter(_is_equation, _asserted(env)):
            one, two = (_substitute(e, self.solved) for e in (equation.lhs, equation.rhs))
            if one.is_Symbol and two.is_Function and two.has(one):
                self.solved[two] = one
                continue
            rest = (one - two).expand()
            for symbol in sorted(rest.free_symbols, key=str, reverse=True):
                factor = rest.coeff(symbol)
                others = rest - factor * symbol
                # Another factor would make the solution a fraction.
                if abs(factor) == 1 and not others.has(symbol):
                    self.solved[symbol] = -others / factor
                    break

    def _number(self, number: Any) -> tuple[Any, Any]:
        """Return both stand-ins for a number; two equal ones if it is constant."""
        expression = self._reduced(number)
        if isinstance(number, torch.SymBool):
            # Two different truths, so that a program that depends on one is seen.
            value = bool(expression) if not expression.free_symbols else True
            return value, value and not expression.free_symbols
        if isinstance(number, torch.SymFloat):
            value = float(expression) if not expression.free_symbols else 0.5
            return value, value + bool(expression.free_symbols)
        if not expression.free_symbols:
            return int(expression), int(expression)
        if expression not in self.stand_ins:
            self.stand_ins[expression] = self._evaluate(expression)
        return self.stand_ins[expression]

    def _evaluate(self, expression: Any) -> tuple[int, int]:
        """Return two numbers for an expression: by its symbols' numbers, or else new ones.

        It gets new ones if both are the same, as in min(u0, 8), or cannot be sizes. The second is
        negative if the number may be: an index from the end has another meaning.
        """
        if not expression.is_Symbol:
            symbols = sorted(expression.free_symbols, key=str)
            for symbol in symbols:
                if symbol not in self.stand_ins:
                    self.stand_ins[symbol] = self._evaluate(symbol)
            pairs = {symbol: self.stand_ins[symbol] for symbol in symbols}
            one, other = (
                int(expression.subs({symbol: pair[i] for symbol, pair in pairs.items()}))
                for i in (0, 1)
            )
            if min(one, other) > 0 and one != other and one not in self.taken:
                # The numbers of a sum may look like a product, whose passes would then misread it.
                if self._is_product(expression) or not factors_of(one, other):
                    return self._take(one, other)
        elif ratio := self.ratios.get(expression):
            one = self._next(0, self.near[expression], self.env.multiple, ratio)
            self.taken.add(one)  # Three times n may be n's second number: no pass takes one for it.
            return one, one * ratio
        is_size = expression in self.sizes or self.env.bound_sympy(expression).lower >= 0
        one = self._next(0, self.near.get(expression, 0))
        self.taken.add(one)  # The second number's primes come to the first one's in the end.
        return self._take(one, self._next(1) * (1 if is_size else -1))

    def _is_product(self, expression: Any) -> bool:
        """Return whether an expression is a product of argument sizes and a whole number."""
        number, rest = expression.as_coeff_Mul()
        powers = rest.as_powers_dict()
        return number.is_Integer and all(
            base in self.ratios and power.is_Integer and power > 0 for base, power in powers.items()
        )

    def _take(self, one: int, other: int) -> tuple[int, int]:
        """Return two numbers, and use them for nothing else."""
        self.taken |= {one, other}
        return one, other

    def _next(self, which: int, near: int = 0, multiple: int = GROUP, ratio: int = 1) -> int:
        """Return a number >= `near` that does not occur in the program, nor does its multiple.

        ratio: the factor for the multiple.
        """
        group = math.lcm(multiple, GROUP)
        if near > _FIRST * group:
            primes = _primes(-(-near // group))
        else:
            primes = self.primes[which]
        return next(n * group for n in primes if not {n * group, n * group * ratio} & self.taken)

    def _replace(self, value: Any, which: int) -> Any:
        if isinstance(value, NUMBERS):
            return self._number(value)[which]
        if isinstance(value, (tuple, list)):
            return type(value)(self._replace(each, which) for each in value)
        if not _symbols_in(value):
            return value
        shape = [self._number(n)[which] if isinstance(n, NUMBERS) else n for n in value.shape]
        with cast(Any, value).fake_mode:
            return torch.empty(shape, dtype=value.dtype, device=value.device)


def _asserted(env: Any) -> list[Any]:
    groups = env.deferred_runtime_asserts.values()
    return [*dict.fromkeys(each.expr for group in groups for each in group)]


def _is_equation(condition: Any) -> bool:
    return type(condition).__name__ == "Equality"


def _unit(symbol: Any, equations: list[Any]) -> int:
    """Return the largest number that divides a size in every run: 2, if n == 2 * (n // 2)."""
    own = [e for e in equations if symbol in e.free_symbols]
    parts = [part for e in own for part in e.find(_is_quotient)]
    period = math.lcm(*(int(part.args[1]) for part in parts))
    if period > _MOST_PARTS:
        return 1
    sizes = range(period, 3 * period)  # Remainders repeat, and so do the equations' outcomes.
    found = set[int]()
    for number in (period, _SECOND * period + 1):  # other sizes, which divide evenly or do not
        others = {s: number for e in own for s in e.free_symbols - {symbol}}
        asked = [e.subs(others) for e in own]
        solved = {n for n in sizes if all(bool(e.subs(symbol, n)) for e in asked)}
        if not solved:
            return 1
        found |= solved
    return math.gcd(*found)


def _is_quotient(expression: Any) -> bool:
    return type(expression).__name__ == "FloorDiv" and expression.args[1].is_Integer


def _is_part(expression: Any) -> bool:
    return type(expression).__name__ in ("FloorDiv", "CeilToInt", "FloorToInt", "TruncToInt")


def _substitute(expression: Any, values: dict[Any, Any]) -> Any:
    """Return the expression with values in place of symbols, again for symbols in these."""
    while (after := expression.subs(values)) != expression:
        expression = after
    return expression


def expression_of(size: Any) -> Any:
    """Return a size as a number or an expression, which compare without a guess."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether sizes are known to be equal."""
    return [*map(expression_of, a)] == [*map(expression_of, b)]


def _symbols(value: Any) -> list[Any]:
    """Return the symbols that are a number, or a tensor's size, by themselves."""
    numbers = [
        number
        for leaf in pytree.tree_leaves(value)
        for number in (leaf.shape if isinstance(leaf, Tensor) else [leaf])
    ]
    return [n.node.expr for n in numbers if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol]


def _symbols_in(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_symbols_in, value))
    if isinstance(value, Tensor):
        # A slice of known size keeps the strides of its open operand.
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
    return isinstance(value, NUMBERS)


def _shape_env(value: Any) -> ShapeEnv:
    """Return the environment that has a result's symbols."""
    leaf = next(filter(_symbols_in, pytree.tree_leaves(value)))
    if isinstance(leaf, Tensor):
        sizes = (*leaf.shape, *leaf.stride())
        leaf = next(n for n in sizes if isinstance(n, torch.SymInt))
    return leaf.node.shape_env


def _integers(graph: fx.Graph) -> Iterator[int]:
    for node in graph.nodes:
        values = pytree.tree_leaves((node.args, dict(node.kwargs), node.meta.get("val")))
        for value in values:
            yield from (
                (n for n in value.shape if isinstance(n, int))
                if isinstance(value, Tensor)
                else ((value,) if isinstance(value, int) else ())
            )


def _primes(first: int) -> Iterator[int]:
    n = first
    while True:
        if all(n % k for k in range(2, int(n**0.5) + 1)):
            yield n
        n += 1
