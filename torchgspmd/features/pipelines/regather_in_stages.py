"""Gather weights that lie along the batch's axis in each microbatch, and scatter their gradients.

before   %w_g = all_gather(%w, 1, data)                     outside: kept for all microbatches
         %r   = row(%w_g, 1x8/2x4);  %t = total(%g, 1x8);  %d = reduce_scatter(%t, sum, 1, data)
after    %r_s = row(%w, 1x8/2x4);    %r = all_gather(%r_s, 0, data)
         %g_s = reduce_scatter(%g, sum, 1, data);           %d = total(%g_s, 1x8)
needs    the partitioned program, if weights are gathered again (regather_weights)
ensures  a stage keeps its shards; m microbatches send m times as much
source   ZeRO (arXiv 1910.02054), stage 3, inside of a pipeline

Each microbatch gathers a weight twice if no loop over layers takes it. The second one is for nodes
that follow from the loss, or from a gradient that has arrived.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import fx

from ...compat.fx_nodes import add_node, reached
from ...fx_passes.partition.insert_collectives import gathers
from ...rules.custom_ops.loops import CONST, ROW, TOTAL, Nest, mark_of, nest_text, nests, runs_of
from ...shard_spec import ShardSpec
from .parts import HEAD, SEND


def regather_in_stages(graph: fx.Graph) -> fx.Graph | None:
    """Rewrite the graph in place and return it; None if no pipeline keeps gathered weights."""
    mover = _Mover(graph)
    moved = [mover.move(node) for node in [*graph.nodes]]
    return graph if any(moved) else None


class _Mover:
    """late: nodes that follow from a loss, or from a gradient that has arrived."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.nests = graph, nests(graph)
        sends = graph.find_nodes(op="call_function", target=SEND)
        self.loops = {self.nests[node] for node in sends}
        self.axes = {node.args[3] for node in sends}
        back = [user.args[2] for n in sends if n.args[1] < 0 for user in n.users]
        heads = graph.find_nodes(op="call_function", target=HEAD)
        starts = [x for x in (*back, *heads) if isinstance(x, fx.Node)]
        self.late = {*reached(starts, attrgetter("users"))}
        self.place = {node: i for i, node in enumerate(graph.nodes)}

    def move(self, node: fx.Node) -> bool:
        """Move a collective into its pipeline; return whether it moved."""
        step = node.meta.get("step")
        if step is None or self.nests.get(node) != () or not self.axes.isdisjoint(step.axes):
            return False
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.target is TOTAL and mark_of(source).nest in self.loops:
            axes = (value.meta["spec"].sharding_axes for value in (source, node))
            return {*next(axes)} < {*next(axes)} and self._scatter_each(node, source)
        if not gathers(node) or not all(map(self._pipeline, node.users)):
            return False
        rows = [user for user in node.users if user.target is ROW]
        dim = node.args[1]
        if rows and not (isinstance(dim, int) and dim > 0):
            return False
        users = sorted({*node.users} - {*rows}, key=self.place.__getitem__)
        for row in rows:
            self._gather_row(node, row)
        for loop, is_late in dict.fromkeys((self._pipeline(u), u in self.late) for u in users):
            some = [u for u in users if (self._pipeline(u), u in self.late) == (loop, is_late)]
            self._gather_again(node, loop or (), some)
        self.graph.erase_node(node)
        return True

    def _pipeline(self, node: fx.Node) -> Nest | None:
        """Return the pipeline's loop in which a node is."""
        inside = self.nests.get(node, ())
        return next((loop for loop in self.loops if inside[: len(loop)] == loop), None)

    def _scatter_each(self, node: fx.Node, total: fx.Node) -> bool:
        """Reduce and scatter each microbatch's gradient instead of their sum."""
        if len(total.users) > 1:
            return False
        value, loop = mark_of(total).value, mark_of(total).nest
        with self.graph.inserting_before(total):
            inner = self._add(node.target, (value, *node.args[1:]), node, loop)
        total.update_arg(0, inner)
        total.meta["spec"] = node.meta["spec"]
        for key in ("result_specs", "operand_specs"):
            if key in total.meta:
                total.meta[key] = (node.meta["spec"],)
        node.replace_all_uses_with(total)
        self.graph.erase_node(node)
        return True

    def _gather_row(self, node: fx.Node, row: fx.Node) -> None:
        """Gather a layer's row in place of all rows."""
        (source, dim, *rest), count = node.args, node.meta["val"].shape[0]
        nest = mark_of(row).nest
        with self.graph.inserting_before(row):
            shard = self._entry(ROW, source, nest, row)
            new = self._add(node.target, (shard, dim - 1, *rest), node, nest)  # pyright: ignore
        step, spec = node.meta["step"], row.meta["spec"]
        args = (dim - 1, *rest)  # pyright: ignore
        new.meta["val"], new.meta["spec"] = row.meta["val"], spec
        new.meta["step"] = replace(
            step, args=args, spec=spec, payload=step.payload / count, sent=step.sent / count
        )
        row.replace_all_uses_with(new)
        self.graph.erase_node(row)

    def _gather_again(self, node: fx.Node, loop: Nest, users: list[fx.Node]) -> None:
        """Gather a value in each microbatch, for these users."""
        with self.graph.inserting_before(users[0]):
            shard = self._entry(CONST, node.args[0], loop, node)
            new = self._add(node.target, (shard, *node.args[1:]), node, loop)
        for user in users:
            user.replace_input_with(node, new)

    def _entry(self, target: Any, source: Any, nest: Nest, like: fx.Node) -> fx.Node:
        """Add a loop's entry for a shard."""
        before: ShardSpec = source.meta["spec"]
        spec, val = before, source.meta["val"]
        if target is ROW:
            spec, val = ShardSpec(spec.dims[1:]), val.new_empty(val.shape[1:])
        entry = self._add(target, (source, nest_text(nest)), like, nest)
        entry.meta = {k: v for k, v in entry.meta.items() if k != "step"}
        entry.meta |= {"val": val, "spec": spec, "result_specs": (spec,)}
        entry.meta["operand_specs"] = (before,)
        return entry

    def _add(self, target: Any, args: tuple, like: fx.Node, nest: Nest) -> fx.Node:
        node = add_node(self.graph, "call_function", target, args, {}, like.name)
        node.meta = {**like.meta, "runs": runs_of(nest)}
        self.nests[node] = nest
        return node
