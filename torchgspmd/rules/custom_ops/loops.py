"""Loops in a flat graph: operations that mark where values enter a loop's body and leave it.

    %h   = carry(%h0, 1x8)             f32[4, 16]      h0 in the first iteration, then %again
    %w   = row(%ws, 1x8)               f32[16, 16]     of f32[8, 16, 16]: one row an iteration
    %y   = tanh(einsum(%h, %w))                        the body, once
    %end = next(%y, %y, %h, 1x8)       f32[4, 16]      of the last iteration
    %ys  = stack(%y, 1x8)              f32[8, 4, 16]   of all iterations
    %g   = total(%y, 1x8)              f32[4, 16]      their sum

`next(x, again, carry)`: x leaves the loop, `again` is the next iteration's carry; both are one
value at global shapes, in two layouts. Operations that depend on an entry and not on an exit are in
the body. All else is outside, wherever it stands: it is computed once. So every pass sees one
iteration, one program. A loop becomes a call once the one-device program exists.

A loop's text has those around it, outermost first: `1x4/2x-8` is a loop of eight iterations, last
row first, in a loop of four. `2.1` walks loop 2's rows again, as its backward does.

A loop may end by a value: its first carry is a bool, and it runs as long as that is true. `1x*` is
a while_loop; costs count one iteration. `1x?` runs once or not at all: a branch's side. There

    %x = const(%x0, 1x?)               f32[4, 16]      a value of outside, used if the side runs

is an entry, too. A side's operations depend on one, and so are not computed before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.fx
from torch import Tensor

from ...compat.operators import custom_op


@dataclass(frozen=True)
class Loop:
    """A loop. visit: tells apart loops that walk the same rows. reverse: the last row is first.

    ends: "*" if a value ends it, "?" if it also runs once at most. Then the length is 1.
    """

    number: int
    visit: int
    length: int
    reverse: bool
    ends: str = ""

    def __str__(self) -> str:
        visit = f".{self.visit}" if self.visit else ""
        return f"{self.number}{visit}x{'-' if self.reverse else ''}{self.ends or self.length}"

    @classmethod
    def parse(cls, text: str) -> Loop:
        name, _, length = text.partition("x")
        number, _, visit = name.partition(".")
        count, reverse = length.removeprefix("-"), length.startswith("-")
        ends = count if count in ("?", "*") else ""
        return cls(int(number), int(visit or 0), 1 if ends else int(count), reverse, ends)


Nest = tuple[Loop, ...]  # loops in one another, outermost first


@cache
def nest_of(text: str) -> Nest:
    return tuple(map(Loop.parse, text.split("/")))


def nest_text(nest: Nest) -> str:
    return "/".join(map(str, nest))


def _length(loop: str) -> int:
    return nest_of(loop)[-1].length


@custom_op("loop_const")
def loop_const(x: Tensor, loop: str) -> Tensor:
    """Return x: a value from outside, whose gradient is a total. Graphs have it in branches."""
    return x.clone()


@custom_op("loop_carry")
def loop_carry(x: Tensor, loop: str) -> Tensor:
    """Return an iteration's carry; x is the first one's."""
    return x.clone()


@custom_op("loop_row")
def loop_row(xs: Tensor, loop: str) -> Tensor:
    """Return an iteration's row."""
    return xs[0].clone()


@custom_op("loop_next")
def loop_next(x: Tensor, again: Tensor, carry: Tensor, loop: str) -> Tensor:
    """Return the last iteration's x. again: the next one's carry. carry: the entry."""
    return x.clone()


@custom_op("loop_stack")
def loop_stack(x: Tensor, loop: str) -> Tensor:
    """Stack x over all iterations, in the order of their rows."""
    return x.unsqueeze(0).repeat(_length(loop), *[1] * x.dim())


@custom_op("loop_total")
def loop_total(x: Tensor, loop: str) -> Tensor:
    """Sum x over all iterations."""
    return x * _length(loop)


def _alike(x: Tensor, *_: object) -> Tensor:
    # A factory: torch would compute empty_like of a constant, and take its memory for a value.
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


for _op in (loop_const, loop_carry, loop_next, loop_total):
    _op.register_fake(_alike)


@loop_row.register_fake
def _(xs: Tensor, loop: str) -> Tensor:
    return xs.new_empty(xs.shape[1:])


@loop_stack.register_fake
def _(x: Tensor, loop: str) -> Tensor:
    return x.new_empty([_length(loop), *x.shape])


CONST, CARRY, ROW, NEXT, STACK, TOTAL = (
    op._opoverload for op in (loop_const, loop_carry, loop_row, loop_next, loop_stack, loop_total)
)
ENTRIES = frozenset({CARRY, ROW, CONST})
EXITS = frozenset({NEXT, STACK, TOTAL})
# Operations in a body -> the argument that names a mesh axis whose devices run the body at
# different times: no value of the body moves along it. Features add theirs.
APART: dict[Any, int] = {}
# Operations in a body whose values reach the carries of several -> a key, equal for those that do:
# all of these carries have one layout. Features add theirs.
DELIVERED: dict[Any, Callable[[torch.fx.Node], tuple]] = {}
LOOP_MARKS = {*ENTRIES, *EXITS}  # the program of one device has them as they are; features add
# Marks that carry all sizes of the run into the body, as a last argument. Features add theirs.
SIZED_MARKS: set[Any] = set()
torch.fx.node.has_side_effect(NEXT)  # a carry is used by the next iteration


class LoopMark(NamedTuple):
    """The operands that a loop's entry or exit has.

    value: the value that enters or leaves. loop: the loops, as text. again: in `next`, the next
    iteration's carry. carry: in `next`, the entry.
    """

    value: torch.fx.Node
    loop: str
    again: torch.fx.Node | None = None
    carry: torch.fx.Node | None = None

    @property
    def nest(self) -> Nest:
        return nest_of(self.loop)

    @property
    def ends_by_value(self) -> bool:
        return bool(self.nest[-1].ends)

    @property
    def args(self) -> tuple[torch.fx.Node | str | None, ...]:
        """The operands in the operator's order."""
        inner = () if self.carry is None else (self.again, self.carry)
        return (self.value, *inner, self.loop)

    @classmethod
    def of(cls, args: Sequence[object]) -> LoopMark:
        value, *others, loop = args
        return cls(*cast(Any, (value, loop, *others)))


def mark_of(node: torch.fx.Node) -> LoopMark:
    return LoopMark.of(node.args)


def end_of(carry: torch.fx.Node) -> torch.fx.Node | None:
    """Return a carry's `next`, once the graph has it."""
    return next((u for u in carry.users if u.target is NEXT and mark_of(u).carry is carry), None)


def nests(graph: torch.fx.Graph) -> dict[torch.fx.Node, Nest]:
    """Return the loops around each node in a graph."""
    result: dict[torch.fx.Node, Nest] = {}
    for node in graph.nodes:
        if node.target in ENTRIES:
            result[node] = mark_of(node).nest
        elif node.target in EXITS:
            # An exit's value is outside its own loop, inside those around it.
            result[node] = mark_of(node).nest[:-1]
        else:
            # A value is as deep as its deepest operand; loops are nested, so the longest wins.
            result[node] = max((result[x] for x in node.all_input_nodes), key=len, default=())
    return result


def axes_apart(nest: dict[torch.fx.Node, Nest]) -> dict[Nest, str]:
    """Return the mesh axis along which a loop body's values stay, for loops that have one.

    nest: the loops around each node.
    """
    return {
        loops: str(node.args[APART[node.target]])
        for node, loops in nest.items()
        if node.target in APART
    }


def delivered_alike(nest: dict[torch.fx.Node, Nest]) -> list[list[torch.fx.Node]]:
    """Return carries that need one layout, with all that is sent to them; a carry is first.

    nest: the loops around each node.
    """
    groups: dict[tuple, list[torch.fx.Node]] = {}
    for node, loops in nest.items():
        if node.target in DELIVERED:
            ends = [user for user in node.users if user.target is NEXT]
            carries = [carry for end in ends if (carry := mark_of(end).carry)]
            group = groups.setdefault((loops, *DELIVERED[node.target](node)), [])
            group += [*carries, node, *ends]
    return [group for group in groups.values() if sum(n.target is CARRY for n in group) > 1]


def runs_of(nest: Nest) -> int:
    """Return how often the innermost loop's body runs."""
    return math.prod(loop.length for loop in nest)
