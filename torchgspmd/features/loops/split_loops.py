"""Loops in a pipeline body: weight gradients move to a loop of their own.

`outline_stages` calls it.

    %l = loop([%g], [%ws, %xs], [])   body: %g1 = mm(%g, %w);  %dw = mm(%g, %x);  %g1, %dw

becomes

    %l = loop([%g], [%ws], [])        body: %g1 = mm(%g, %w);  %g1, %g
    %k = loop([], [%xs, %l[1]], [])   body: %dw = mm(%g, %x);  %dw

The first loop computes the needs of its next iteration. It stacks the values that the second one
reads. Both have the same operations, but for views.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from ...compat.fx_nodes import reached
from ...compat.operators import draws
from ...compat.private_apis import OpOverload
from ...fx_passes.loop_call import LoopCall, LoopOperands, loop_calls
from ...fx_passes.schedule.arithmetic import is_view
from ...fx_passes.schedule.liveness import bytes_of


def split_loop(node: fx.Node, first: Collection[int]) -> None:
    """Split a loop in place; keep it if the first loop would have all results.

    first: the numbers of the stacked results and totals that go to the first loop.
    """
    body = _Body(node)
    one, two = ([i for i in body.extra if (i in first) == is_first] for is_first in (True, False))
    if not two or body.call.held or body.call.loop.ends:
        return
    computed = {*reached(body.carried(one))}
    crossing: dict[fx.Node, None] = {}

    def crosses(x: fx.Node) -> bool:
        is_computed = x.op != "placeholder" and _source(x) in computed
        # A carry differs between iterations, so the second loop reads its stacked values.
        if x in body.carries or is_computed and not _is_cheap(x):
            crossing[x] = None
        return x in crossing

    second = map(body.result, two)
    later = {*reached(second, lambda x: () if crosses(x) else x.all_input_nodes)}
    values = [*crossing]
    with node.graph.inserting_before(node):
        before = body.add(computed.union(reached(values)), [*range(body.call.carries)], one, values)
        stacked = {
            x: _stacked(before, body.call.carries + sum(map(body.call.is_stack, one)) + i, x)
            for i, x in enumerate(values)
        }
        after = body.add(later, [], two, (), stacked)
    body.replace_results(before, [*range(body.call.carries)], one, len(values))
    body.replace_results(after, [], two)
    node.graph.erase_node(node)


def drop_unused_results(graph: fx.Graph) -> None:
    """Drop results that nobody reads from a graph's loops."""
    for node, call in list(loop_calls(graph)):
        if not isinstance(call, LoopCall) or call.held or call.loop.ends:
            continue
        for user in [u for u in node.users if not u.users]:
            graph.erase_node(user)
        body, users = _Body(node), {u.args[1] for u in node.users}
        read = [i for i in body.extra if i in users]
        if len(read) < len(body.extra):
            carries = [*range(call.carries)]
            with graph.inserting_before(node):
                new = body.add({*reached(body.carried(read))}, carries, read)
            body.replace_results(new, carries, read)
            graph.erase_node(node)


class _Body:
    """A loop and its body's nodes. extra: the numbers of its results behind the carries."""

    def __init__(self, node: fx.Node) -> None:
        call = node.target
        assert isinstance(call, LoopCall)
        self.node, self.call, self.graph = node, call, call.graph
        self.inputs, self.results = call.body_inputs, call.body_results
        self.carries = self.inputs.carries
        self.extra = range(call.carries, len(self.results.returned))

    def result(self, i: int) -> fx.Node:
        """Return the body's value for a loop result."""
        return self.results.returned[i]

    def carried(self, extra: Iterable[int]) -> list[fx.Node]:
        """Return the values of the next carries, of the last carries and of other results."""
        return [*self.results.again, *self.results.ends, *map(self.result, extra)]

    def add(
        self,
        nodes: Collection[fx.Node],
        carries: Sequence[int],
        extra: Sequence[int],
        stacked: Sequence[fx.Node] = (),
        brought: dict[fx.Node, fx.Node] | None = None,
    ) -> fx.Node:
        """Add a loop with some body nodes, with all carries or none.

        extra: its other results. stacked: nodes that it also stacks. brought: another loop's
        stacked values, by body node.
        """
        brought = brought or {}
        given = LoopOperands.of(self.node)
        rows = {x: arg for x, arg in zip(self.inputs.rows, given.rows) if x in nodes} | brought
        others = {x: arg for x, arg in zip(self.inputs.others, given.others) if x in nodes}
        graph, new = fx.Graph(), {}
        for x in (*self.inputs.coordinates, *(self.carries[i] for i in carries), *rows, *others):
            new[x] = graph.placeholder(x.name)
            new[x].meta = {key: value for key, value in x.meta.items() if key != "step"}
        for x in self.graph.nodes:
            if x in nodes and x not in new:
                new[x] = graph.node_copy(x, new.__getitem__)
        stacks = [*map(self.result, filter(self.call.is_stack, extra)), *stacked]
        totals = [self.result(i) for i in extra if not self.call.is_stack(i)]
        ends = [*self.results.again, *self.results.ends] if carries else []
        graph.output(tuple(new[x] for x in (*ends, *stacks, *totals)))
        call = LoopCall(self.call.loop, graph, len(carries), len(rows), len(others), len(stacks))
        operands = LoopOperands(
            [given.carries[i] for i in carries], [*rows.values()], [*others.values()]
        )
        result = self.node.graph.call_function(call, operands.args)
        result.meta = dict(self.node.meta)
        return result

    def replace_results(
        self, new: fx.Node, carries: Sequence[int], extra: Sequence[int], stacked: int = 0
    ) -> None:
        """Redirect users to another loop's results, as `add` orders them."""
        totals = [i for i in extra if not self.call.is_stack(i)]
        # -1 stands for values stacked for the other loop: no user here reads them.
        numbers = [*carries, *filter(self.call.is_stack, extra), *[-1] * stacked, *totals]
        for user in [*self.node.users]:
            if user.args[1] in numbers:
                user.args = (new, numbers.index(user.args[1]))  # pyright: ignore


def _stacked(loop: fx.Node, i: int, like: fx.Node) -> fx.Node:
    """Add a loop's stacked result. like: one iteration's value."""
    result = loop.graph.call_function(operator.getitem, (loop, i))
    result.meta = {key: value for key, value in like.meta.items() if key != "step"}
    length = loop.target.loop.length  # pyright: ignore
    for name in ("shape", "unknown"):
        if like.meta.get(name) is not None:
            result.meta[name] = (length, *like.meta[name])
    if (spec := like.meta.get("spec")) is not None:
        result.meta["spec"] = spec.stacked()
    return result


def _source(node: fx.Node) -> fx.Node:
    """Return the operation that computes a node."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _is_cheap(node: fx.Node) -> bool:
    """Return whether recomputing a value beats stacking it: a view, a number, a filling."""
    if not isinstance(node.target, OpOverload):
        return node.target is not operator.getitem and not bytes_of(node)
    # A random filling would differ the second time.
    is_random = draws(node.target)
    return is_view(node) or not (is_random or node.all_input_nodes)
