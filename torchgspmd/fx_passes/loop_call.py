"""LoopCall: a loop in one device's program; a node's target.

%loop = loop_1x8([%h0], [%ws], [%x])        carries, stacked rows, values of outside
%end  = %loop[0]                            last carries, then stacked results, then totals
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, fx

from ..comm.local_ops import add_rows, copy_rows
from ..comm.profiled_code import ProfiledCode
from ..compat.fx_nodes import reached
from ..layout.mesh import Mesh
from ..rules.custom_ops.loops import Loop

T = TypeVar("T")
RunBody = Callable[[fx.Graph, Sequence[list], Mapping[int, Sequence[int]]], list[list]]
"""Runs a graph on all devices: inputs are lists over the devices, results are those of each.

The mapping has the devices with their own work, and the iteration that each is at; two, where the
backward's nodes are of another one than the forward's.
"""


def as_code(graph: fx.Graph) -> Callable[..., object]:
    """Return a function that runs a graph, operation by operation."""
    return ProfiledCode(fx.GraphModule(torch.nn.Module(), graph).forward)


class InnerProgram:
    """A program in a program. compile: makes a graph's function when it first runs."""

    graph: fx.Graph
    compile: Callable[[fx.Graph], Callable[..., Any]] = staticmethod(as_code)

    @property
    def __name__(self) -> str:
        raise NotImplementedError


class BodyReader(NamedTuple):
    """How a BodyCall reads its parts from a plan file; each raises ValueError or the like.

    graph, value: decode a graph, and any other value. natural: returns a number that is no less
    than 0. loop: parses a loop. has_axis: whether the mesh has an axis with this name.
    """

    graph: Callable[[Any], fx.Graph]
    value: Callable[[Any], Any]
    natural: Callable[[Any], int]
    loop: Callable[[Any], Loop]
    has_axis: Callable[[str], bool]


class BodyCall:
    """A node's target that runs inner programs, its bodies. loop: how often.

    sends: whether it communicates by itself, besides its bodies.
    """

    loop: Loop
    sends = False

    @property
    def __name__(self) -> str:
        raise NotImplementedError

    @property
    def times(self) -> str:
        """How often it runs, in words."""
        return f"x {self.loop.length}"

    @property
    def bodies(self) -> Sequence[InnerProgram]:
        raise NotImplementedError

    def runs_of(self, body: Any) -> int:
        """Return how often a body runs."""
        return self.loop.length

    def copy(self) -> BodyCall:
        """Return a copy with its own graphs, down to the loops in them."""
        raise NotImplementedError

    def simulate(self, mesh: Mesh, arguments: Sequence[Sequence], run_body: RunBody) -> list[Any]:
        """Return all devices' results. arguments: the call's, each as a list over devices."""
        raise NotImplementedError

    def connect(self, groups: object) -> None:
        """Take the running rank's process groups (comm/process_groups.py)."""

    def iteration_bytes(self, own_bytes: Callable[[fx.Graph], int]) -> int:
        """Return the most bytes that an iteration allocates. own_bytes: counts a body's."""
        raise NotImplementedError

    def summary(self) -> Iterator[str]:
        """Yield lines for a plan's summary."""
        yield from ()

    def picture(self) -> str | None:
        """Return an SVG with each device's work over time, for calls that have one."""
        return None

    def encode(
        self, graph: Callable[[fx.Graph], object], value: Callable[[object], object]
    ) -> list[Any]:
        """Return the parts as JSON, a tag first. graph, value: encode a graph, any other value."""
        raise NotImplementedError

    @classmethod
    def decode(cls, parts: list[object], read: BodyReader) -> BodyCall:
        """Return the call that these parts describe. Its fields may have wrong types."""
        raise NotImplementedError

    @property
    def checked(self) -> Sequence[Any]:
        """The dataclasses whose fields are compared with their declared types after `decode`."""
        return (self,)


@dataclass(frozen=True)
class LoopOperands:
    """A loop's arguments: first carries, stacked rows, values from outside."""

    carries: list[fx.Node]
    rows: list[fx.Node]
    others: list[fx.Node]

    @classmethod
    def of(cls, node: fx.Node) -> LoopOperands:
        """Read them from a node whose target is a LoopCall."""
        return cls(*node.args)  # pyright: ignore[reportArgumentType]

    @property
    def args(self) -> tuple[list[fx.Node], ...]:
        """The arguments in the call's order."""
        return self.carries, self.rows, self.others


@dataclass(frozen=True)
class BodyInputs(Generic[T]):
    """A loop body's inputs, in their order; LoopCall describes them."""

    coordinates: list[T]
    carries: list[T]
    held: list[T]
    rows: list[T]
    others: list[T]


@dataclass(frozen=True)
class BodyResults(Generic[T]):
    """A loop body's results, in their order.

    again: the next iteration's carries. held: for it. ends: the carries as they leave the loop.
    stacks, totals: results to be stacked, and to be added up.
    """

    again: list[T]
    held: list[T]
    ends: list[T]
    stacks: list[T]
    totals: list[T]

    @property
    def returned(self) -> list[T]:
        """An iteration's values for the loop's results, in their order."""
        return [*self.ends, *self.stacks, *self.totals]


def _cut(values: Sequence[T], *counts: int) -> Iterator[list[T]]:
    """Yield so many values each, then the rest."""
    at = 0
    for count_ in counts:
        yield [*values[at : at + count_]]
        at += count_
    yield [*values[at:]]


BODY_CALLS: dict[str, type[BodyCall]] = {}  # by the tag in files of plans; features add rows


@dataclass(eq=False)
class LoopCall(InnerProgram, BodyCall):
    """A loop over the rows of tensors, with its body's program.

    graph: from the coordinates (if a program has them), the carries, held values, one row per
    stacked tensor, and outer values. It returns the next iteration's carries, values held for it,
    the carries as they leave the loop, the results to be stacked, and those to be added up. held:
    how many values an iteration computes for the next one, from rows and outer values. ahead: how
    many stacked tensors, the last ones, give a body the next iteration's row. empty: shapes and
    dtypes for stacked or summed results, if a value ends the loop at once. listed: stacks that are
    lists. turned_rows, turned_stacks: how many stacked tensors, and stacked results, the last ones,
    the loop goes through from the other end.
    """

    loop: Loop
    graph: fx.Graph
    carries: int
    rows: int
    others: int
    stacks: int
    empty: Sequence[tuple[Sequence[int], torch.dtype]] = ()
    ahead: int = 0
    held: int = 0
    listed: frozenset[int] = frozenset()
    turned_rows: int = 0
    turned_stacks: int = 0

    @property
    def __name__(self) -> str:
        return f"loop_{self.loop}"

    @property
    def times(self) -> str:
        """How often it runs, in words."""
        if not self.loop.ends:
            return f"x {self.loop.length}"
        return f"{'if' if self.loop.ends == '?' else 'while'} its first carry is true"

    @property
    def bodies(self) -> Sequence[LoopCall]:
        return (self,)

    @property
    def body_inputs(self) -> BodyInputs[fx.Node]:
        inputs = self.graph.find_nodes(op="placeholder")
        counts = self.carries, self.held, self.rows
        return BodyInputs(*_cut(inputs, len(inputs) - sum(counts) - self.others, *counts))

    @property
    def body_results(self) -> BodyResults[fx.Node]:
        return self.split(self.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]

    def split(self, values: Sequence[T], held: int | None = None) -> BodyResults[T]:
        """Return an iteration's results by name. held: how many it has for the next one."""
        held = self.held if held is None else held
        return BodyResults(*_cut(values, self.carries, held, self.carries, self.stacks))

    def is_carry(self, result: int) -> bool:
        """Return whether a loop result, by number, is a last carry."""
        return result < self.carries

    def is_stack(self, result: int) -> bool:
        """Return whether a loop result, by number, is stacked."""
        return self.carries <= result < self.carries + self.stacks

    def copy(self) -> LoopCall:
        """Return a copy with its own graph, down to the loops in it."""
        return replace(self, graph=copy_of(self.graph))

    def graphs(self) -> tuple[fx.Graph, fx.Graph, fx.Graph]:
        """Return the graphs that run before the first iteration, in each one, and in the last.

        The first computes the body's values for the next iteration, and the last does not.
        """
        if not self.held:
            return self.graph, self.graph, self.graph
        results = self.split(range(len(self.graph.output_node().args[0])))  # pyright: ignore
        first = _copy_returning(self.graph, results.held)
        return first, self.graph, _copy_returning(self.graph, [*results.again, *results.returned])

    @cached_property
    def compiled(self) -> list[Callable[..., Any]]:
        """The compiled graphs."""
        return [self.compile(graph) for graph in self.graphs()]

    def __call__(
        self, carries: Sequence[Tensor], rows: Sequence[Tensor], others: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        runs = self.runs(carries, rows, others)
        try:
            which, inputs = next(runs)
            while True:
                which, inputs = runs.send(self.compiled[which](*inputs))
        except StopIteration as done:
            return done.value

    def runs(
        self, carries: Sequence[Tensor], rows: Sequence[Tensor], others: Sequence[object]
    ) -> Generator[tuple[int, list[Any]], Sequence[Tensor], tuple[Tensor, ...]]:
        """Yield a graph's number and its inputs; take its results. Return the loop's."""
        now, ahead = rows[: len(rows) - self.ahead], rows[len(rows) - self.ahead :]
        step = -1 if self.loop.reverse else 1
        held, last, results = list[Any](), carries, list[Any]()

        def inputs(row: int, following: int) -> list[Any]:
            turned = len(now) - self.turned_rows
            last_row = self.loop.length - 1
            chosen = [x[row if k < turned else last_row - row] for k, x in enumerate(now)]
            chosen += [x[following] for x in ahead]
            return [*carries, *(held or [None] * self.held), *chosen, *others]

        if self.held:
            first = self.loop.length - 1 if self.loop.reverse else 0
            held = [*(yield 0, inputs(first, first))]
        for i in self.order(rows):
            # A while_loop's first carry is its condition.
            if self.loop.ends and not carries[0]:
                break
            # Behind the last row there is nothing to compute ahead.
            is_last = self.held > 0 and not 0 <= i + step < self.loop.length
            values = yield 2 if is_last else 1, inputs(i, i if is_last else i + step)
            now_ = self.split(values, 0 if is_last else None)
            carries, held, last = now_.again, now_.held, now_.ends
            stacked, summed = now_.stacks, now_.totals
            if not results:
                length = 0 if self.loop.ends == "*" else self.loop.length
                results += [
                    [None] * length if k in self.listed else x.new_empty([length, *x.shape])
                    for k, x in enumerate(stacked)
                ]
                results += map(copy_rows, summed)
            else:
                for total, x in zip(results[self.stacks :], summed):
                    add_rows(total, x)
            for k, x in enumerate(stacked):
                if self.loop.ends == "*":
                    # Only a run knows how many rows there will be.
                    results[k] = torch.cat([results[k], x[None]])
                elif k < self.stacks - self.turned_stacks:
                    results[k][i] = x
                else:
                    results[k][self.loop.length - 1 - i] = x
        return (*last, *(results or self._without_iterations((*others, *carries))))

    def order(self, rows: Sequence[Tensor]) -> Iterable[int]:
        """Return the rows, in iteration order. A while_loop stacks those it has had."""
        if self.loop.ends == "*" and not rows:
            return count()
        order = range(len(rows[0]) if self.loop.ends == "*" else self.loop.length)
        return order[::-1] if self.loop.reverse else order

    def _without_iterations(self, values: Sequence[object]) -> list[Tensor]:
        """Return stacks and sums for a loop without iterations, on the device of `values`."""
        # Nothing ran that could say where its results are.
        device = next(x.device for x in values if isinstance(x, Tensor))
        return [
            torch.zeros(
                [self.loop.length] * (i < self.stacks) + [*shape], dtype=dtype, device=device
            )
            for i, (shape, dtype) in enumerate(self.empty)
        ]


def _copy_returning(graph: fx.Graph, returned: Sequence[int]) -> fx.Graph:
    """Return a graph's copy with some results, without the nodes that only others need."""
    copy = copy_of(graph)
    output = copy.output_node()
    values: Any = output.args[0]
    rest = [values[i] for i in returned]
    output.args = (tuple(rest),)
    needless = {*reached(v for v in values if isinstance(v, fx.Node) and v not in rest)}
    # A result of an inner loop that nobody reads still is a user of the loop.
    below = set(needless)
    for node in copy.nodes:
        if not below.isdisjoint(node.all_input_nodes) and not cast(Any, node).is_impure():
            below.add(node)
    # Backwards: users go before their operands.
    for node in reversed(copy.nodes):
        if node in below and not node.users and node.op == "call_function":
            copy.erase_node(node)
    return copy


def loop_calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, BodyCall]]:
    """Yield the loops and pipelines in one device's program, without those inside them."""
    for node in graph.nodes:
        if isinstance(node.target, BodyCall):
            yield node, node.target


def copy_of(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    copied.output_node().meta = dict(graph.output_node().meta)
    copy_loops(copied)
    return copied


def copy_loops(graph: fx.Graph) -> None:
    """Give a copied graph its own loops."""
    for node, call in loop_calls(graph):
        node.target = call.copy()


def with_bodies(code: str, graph: fx.Graph) -> str:
    """Return the code of one device's program, with its loops' bodies behind it."""
    inner = [body.graph for _, call in loop_calls(graph) for body in call.bodies]
    return "\n".join((code, *(with_bodies(str(each), each) for each in inner)))
