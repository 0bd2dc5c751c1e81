"""Normal form for the loops in a captured graph.

before   %p = pow(%y, 2) in loop 1, %q = mul(%g, %p) in the loop that walks its rows backwards
after    %s = stack(%p, 1x8);  %p_1 = row(%s, 1.1x-8);  %q = mul(%g, %p_1)

Forward values that a backward loop needs are stacked. Rows are taken again, and
views are repeated. A carry that is only added to becomes a total:

before   %c = carry(%c0, 1x8);  %n = add(%c, %x);  %end = next(%n, %n, %c, 1x8)
after    %t = total(%x, 1x8);  %end = add(%c0, %t)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.fx_nodes import origin_of, reached
from ..compat.operators import aten, draws
from ..compat.private_apis import FakeTensor, OpOverload
from ..errors import ShardingError
from ..layout.open_sizes import factors_of
from ..rules.custom_ops.loops import (
    CARRY,
    CONST,
    ENTRIES,
    EXITS,
    NEXT,
    ROW,
    STACK,
    TOTAL,
    Nest,
    end_of,
    mark_of,
    nest_of,
    nest_text,
)

_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def loop_form(graph: fx.Graph) -> None:
    """Rewrite a graph's loops in place."""
    for node in graph.find_nodes(op="call_function", target=CONST):
        if mark_of(node).nest[-1].ends != "?":
            node.replace_all_uses_with(mark_of(node).value)
            graph.erase_node(node)
    # Totals first: the carries that they replace need no stacks.
    for node in graph.find_nodes(op="call_function", target=NEXT):
        _add_up(graph, node)
    # A loop that a checkpoint runs again may have no result that is used, but needs an end.
    _erase_unused(graph, but_last_exits=True)
    _number(graph)
    _Residuals(graph).run()
    _erase_unused(graph)


def _number(graph: fx.Graph) -> None:
    """Number the loops from 1 in program order."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        if node.target in ENTRIES | EXITS:
            nest = mark_of(node).nest
            for loop in nest:
                numbers.setdefault(loop.number, len(numbers) + 1)
            nest = tuple(replace(loop, number=numbers[loop.number]) for loop in nest)
            node.args = mark_of(node)._replace(loop=nest_text(nest)).args


def _add_up(graph: fx.Graph, end: fx.Node) -> None:
    """Replace a carry that is only added to by a total."""
    value, text, _, carry = mark_of(end)
    assert carry is not None, "`next` has one"
    first, summand, user = mark_of(carry).value, value, end
    path: list[fx.Node] = []
    while summand is not carry:
        # A further user would see the sum so far, which a total does not have.
        if summand.target is not aten.add.Tensor or summand.kwargs or set(summand.users) != {user}:
            return
        terms = [t for t in summand.args if _reaches(t, carry)]
        # A term that broadcasts or changes the dtype would change the total.
        if len(terms) != 1 or any(not _is_like(t, carry) for t in summand.args):
            return
        path.append(summand)
        summand, user = terms[0], summand
    if set(carry.users) != {end, *path[-1:]}:
        return
    with graph.inserting_before(end):
        if path:
            last = path[-1]
            (rest,) = (t for t in last.args if t is not carry)
            last.replace_all_uses_with(rest)
            total = graph.call_function(TOTAL, (mark_of(end).value, text))
            total.meta = dict(end.meta)
            result = total
            if first.target not in _ZEROS:
                result = graph.call_function(aten.add.Tensor, (first, total))
                result.meta = dict(end.meta)
        else:
            result = first
    end.replace_all_uses_with(result)
    graph.erase_node(end)
    carry.replace_all_uses_with(first)


def _reaches(value: object, carry: fx.Node) -> bool:
    """Return whether a summand is the carry, or a sum with it."""
    while isinstance(value, fx.Node) and value is not carry:
        if value.target is not aten.add.Tensor:
            return False
        value = next((t for t in value.args if t is carry), value.args[0])
    return value is carry


def _is_like(value: object, carry: fx.Node) -> bool:
    """Return whether a term has the carry's shape and dtype."""
    if not isinstance(value, fx.Node) or not isinstance(value.meta["val"], Tensor):
        return False
    one, other = value.meta["val"], carry.meta["val"]
    return one.shape == other.shape and one.dtype == other.dtype


def _erase_unused(graph: fx.Graph, but_last_exits: bool = False) -> None:
    """Erase unused nodes; a carry depends on its next value, and a loop on its end."""
    exits = [node for node in graph.nodes if but_last_exits and node.target in EXITS]
    last_exits = {mark_of(node).loop: node for node in exits}
    conditions: dict[str, fx.Node] = {}  # loop -> the next value for its condition
    for node in graph.find_nodes(op="call_function", target=NEXT):
        if mark_of(node).ends_by_value:
            conditions.setdefault(mark_of(node).loop, node)

    def needed(node: fx.Node) -> Iterator[fx.Node]:
        yield from node.all_input_nodes
        if node.target is CARRY and (end := end_of(node)):
            yield end
        if node.target in ENTRIES and mark_of(node).loop in last_exits:
            yield last_exits[mark_of(node).loop]
        if node.target in EXITS and (loop := mark_of(node).loop) in conditions:
            yield conditions[loop]

    used = {*reached([graph.output_node()], needed)}
    for node in reversed(graph.nodes):
        if node not in used and node.op == "call_function":
            graph.erase_node(node)


def regions(graph: fx.Graph) -> Iterator[tuple[fx.Node, Nest]]:
    """Yield a traced graph's nodes, each with the loops in whose bodies it was traced.

    A body begins with its loop's first entry, and ends with the last exit.
    """
    left: dict[Nest, int] = {}
    for node in graph.nodes:
        if node.target in EXITS:
            nest = mark_of(node).nest
            left[nest] = left.get(nest, 0) + 1
    now: Nest = ()
    for node in graph.nodes:
        if node.target in ENTRIES:
            now = max(now, mark_of(node).nest, key=len)
        yield node, now
        if node.target in EXITS:
            nest = mark_of(node).nest
            left[nest] -= 1
            if not left[nest] and now == nest:
                now = nest[:-1]


class _Residuals:
    """Takes values from one loop to another that walks the same rows."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nests: dict[fx.Node, Nest] = {}
        self.first_entry: dict[Nest, fx.Node] = {}
        self.last_exit: dict[Nest, fx.Node] = {}
        self.brought: dict[tuple[fx.Node, Nest], fx.Node] = {}
        self.sizes: dict[int, fx.Node] = {}  # for arguments, by their places

    def run(self) -> None:
        """Stack the values that other loops use."""
        for node in self.graph.nodes:
            if node.target in ENTRIES:
                self.first_entry.setdefault(mark_of(node).nest, node)
            elif node.target in EXITS:
                self.last_exit[mark_of(node).nest] = node
        for node, region in list(regions(self.graph)):
            self.nests[node] = nest = self._nest(node, region)
            operands = mark_of(node).nest if node.target in EXITS else nest
            if node.target in ENTRIES:
                operands = nest[:-1]
            for value in node.all_input_nodes:
                inner = self.nests[value]
                if node.target is NEXT and value is mark_of(node).carry:
                    continue
                if inner == operands[: len(inner)]:
                    continue
                if _loops(inner) != _loops(operands[: len(inner)]):
                    raise self._escape(value, node)
                target = operands[: len(inner)]
                node.replace_input_with(value, self._bring(value, target, node))

    def _nest(self, node: fx.Node, region: Nest) -> Nest:
        """Return the loops around a node, as far as it depends on them."""
        if node.target in ENTRIES:
            return mark_of(node).nest
        if node.target in EXITS:
            return mark_of(node).nest[:-1]
        # A draw differs between iterations, though no operand does.
        if draws(node.target) and region:
            node.meta["loop"] = nest_text(region)
            return region
        depth = 0
        for value in node.all_input_nodes:
            inner = self.nests[value]
            if _loops(inner) == _loops(region[: len(inner)]):
                depth = max(depth, len(inner))
        return region[:depth]

    def _bring(self, value: fx.Node, nest: Nest, user: fx.Node) -> fx.Node:
        """Return a value inside loops that walk the same rows as the loops that compute it."""
        inner = self.nests[value]
        if inner == nest[: len(inner)]:
            return value
        if (value, nest) in self.brought:
            return self.brought[value, nest]
        if value.target in (ROW, CONST):
            stack = mark_of(value).value
            outer = self.nests[stack]
            xs = self._bring(stack, nest[: len(outer)], self.first_entry[nest])
            result = self._add(self.first_entry[nest], value.target, (xs, nest_text(nest)), value)
        # Views are free, so they are repeated, not stacked.
        elif isinstance(value.target, OpOverload) and value.target.is_view:
            with self.graph.inserting_before(user):
                result = self.graph.node_copy(
                    value, lambda n: self._bring(n, nest[: len(self.nests[n])], user)
                )
            result.meta["backward"] = user.meta["backward"]
        elif isinstance(value.meta["val"], int):
            result = self._size(value)
            self.nests[result] = ()
        else:
            result = self._save(value, inner, nest)
        self.nests[result] = self.nests.get(result, nest)
        self.brought[value, nest] = result
        return result

    def _save(self, value: fx.Node, inner: Nest, nest: Nest) -> fx.Node:
        """Return one loop's value in another: it is stacked, and its row is taken."""
        # The loops before this depth are common to both, so they need no stack.
        shared = next(i for i, (a, b) in enumerate(zip(inner, nest)) if a != b)
        # Its number of iterations differs, so rows of an outer stack would differ in size.
        if any(loop.ends == "*" for loop in inner[shared + 1 :]):
            raise ShardingError(
                "the backward of a while_loop cannot run in another loop",
                where=value.meta.get("source"),
                why="it has as many iterations as values say, so that what its backward needs of "
                "them cannot be stacked for all iterations of the loop around",
                fix="use a scan with a fixed number of iterations, and torch.where for the last",
            )
        for depth in range(len(inner), shared, -1):
            loops = inner[:depth]
            value = self._add(
                self.last_exit[loops],
                STACK,
                (value, nest_text(loops)),
                value,
                lambda t, n=inner[depth - 1].length: t.new_empty([n, *t.shape]),
            )
            self.nests[value] = loops[:-1]
        for depth in range(shared + 1, len(nest) + 1):
            loops = nest[:depth]
            value = self._add(
                self.first_entry[loops],
                ROW,
                (value, nest_text(loops)),
                value,
                lambda t: t.new_empty(t.shape[1:]),
            )
            self.nests[value] = loops
        return value

    def _size(self, value: fx.Node) -> fx.Node:
        """Return a loop's number, a product of arguments' sizes, computed before all loops."""
        numbers = value.meta["val"], value.meta.get("other", value.meta["val"])
        nodes = [self._argument_size(which) for which in factors_of(*numbers)]
        if not nodes or None in nodes:
            raise self._escape(value, value)
        first, *rest = [node for node in nodes if node is not None]
        for node in rest:
            first = self._arithmetic(operator.mul, first, node)
        ratio = Fraction(value.meta["val"], first.meta["val"])
        if ratio.numerator > 1:
            first = self._arithmetic(operator.mul, first, ratio.numerator)
        if ratio.denominator > 1:
            first = self._arithmetic(operator.floordiv, first, ratio.denominator)
        return first

    def _argument_size(self, which: int) -> fx.Node | None:
        """Return the node that reads an argument size off the first argument that has it."""
        if which in self.sizes:
            return self.sizes[which]
        for node in self.graph.find_nodes(op="placeholder"):
            val = node.meta["val"]
            other = node.meta.get("other", val)
            for d, numbers in enumerate(zip(val.shape, other.shape)):
                if factors_of(*numbers) == (which,):
                    size = self._number(aten.sym_size.int, (node, d), numbers)
                    self.sizes[which] = size
                    return size
        return None

    def _arithmetic(self, op: Callable[[int, int], int], a: fx.Node, b: fx.Node | int) -> fx.Node:
        pairs = [
            (n.meta["val"], n.meta["other"]) if isinstance(n, fx.Node) else (n, n) for n in (a, b)
        ]
        numbers = tuple(op(x, y) for x, y in zip(*pairs))
        return self._number(op, (a, b), numbers)

    def _number(self, op: Callable[..., object], args: tuple, numbers: tuple[int, ...]) -> fx.Node:
        """Add a number before all loops. numbers: its stand-ins."""
        with self.graph.inserting_before(next(iter(self.first_entry.values()))):
            node = self.graph.call_function(op, args)
        node.meta = {"val": numbers[0], "other": numbers[1], "source": None, "dynamic": True}
        node.meta |= {"backward": False, "captured": node.name}
        self.nests[node] = ()
        return node

    def _add(
        self,
        before: fx.Node,
        target: Any,
        args: tuple,
        like: fx.Node,
        val: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> fx.Node:
        """Add a loop mark before another, for a value like a node's."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        keys = [key for key in ("val", "other") if key in like.meta]
        with getattr(like.meta["val"], "fake_mode", torch.no_grad()):
            values = {key: val(like.meta[key]) for key in keys}
        node.meta = {
            **values,
            **({"dynamic": True} if "other" in values else {}),
            **origin_of(like),
            "backward": before.meta["backward"],
            "captured": node.name,
        }
        return node

    def _escape(self, value: fx.Node, user: fx.Node) -> ShardingError:
        return ShardingError(
            f"a value of one iteration of a loop ({value.name}) is used outside of it",
            where=value.meta.get("source") or user.meta.get("source"),
            why="a loop is captured once, for all iterations",
            fix="return it from the body: as a carry, or as a row of the result",
        )


def _loops(nest: Nest) -> tuple[int, ...]:
    return tuple(loop.number for loop in nest)


def branch_tests(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the first carry of each loop that runs once or never, by the loop's text."""
    carries = {
        str(n.args[1]): n for n in reversed(graph.find_nodes(op="call_function", target=CARRY))
    }
    return {text: node for text, node in carries.items() if _is_branch(text)}


class Branching(fx.Interpreter):
    """Runs a flat graph; of a branch's two sides, the one that is taken gives its results.

    tests: see branch_tests.
    """

    def __init__(self, module: fx.GraphModule, tests: Mapping[str, fx.Node]) -> None:
        super().__init__(module, False)
        self.tests = tests

    def run_node(self, n: Any) -> Any:
        if n.target is NEXT and _is_branch(n.args[3]):
            values: dict[fx.Node, Any] = self.env
            taken = values[self.tests[n.args[3]]]
            if not isinstance(taken, FakeTensor) and not taken:
                return values[n.args[2]]
        return super().run_node(n)


def _is_branch(text: str) -> bool:
    return nest_of(text)[-1].ends == "?"
