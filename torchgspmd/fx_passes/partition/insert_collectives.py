"""Insert collectives between operations: every value is resharded to its users' layouts.

before   an assignment with a strategy for every operation
after    %mm   : f32[8@data, 64] sum@model = mm(%gelu, %w2)
         %mm_r : f32[8@data, 64]           = all_reduce(%mm, sum, model)
needs    nothing else
ensures  users that require equal layouts share one copy
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ...compat.fx_nodes import copy_node, origin_of
from ...rules.custom_ops.loops import CARRY, NEXT, mark_of
from ...shard_spec import ShardSpec
from ..ir import is_number
from .assignment import Assignment
from .cost_model import CostModel


def insert_collectives(assignment: Assignment, costs: CostModel) -> fx.Graph:
    """Return a new graph, with "spec" on every value and "step" on every inserted node."""
    return _Inserter(assignment, costs).run()


def inserted(graph: fx.Graph) -> Iterable[fx.Node]:
    """Return the inserted steps, in order."""
    return (n for n in graph.nodes if "step" in n.meta)


class _Inserter:
    """Copies a graph to a new one, and inserts the steps between layouts."""

    def __init__(self, assignment: Assignment, costs: CostModel) -> None:
        self.assignment, self.costs, self.graph = assignment, costs, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.copies: dict[fx.Node, dict[ShardSpec, fx.Node]] = {}

    def run(self) -> fx.Graph:
        """Copy all nodes to the new graph, with the steps that their operands need."""
        for node in self.assignment.graph.nodes:
            if node.op == "output":
                # Copy the output node; its values get their layouts.
                specs = [
                    self.assignment.required[v][node, i] if isinstance(v, fx.Node) else None
                    for i, v in enumerate(node.args[0])
                ]
                self.graph.output(
                    tuple(
                        self.value(v, spec, node) if spec is not None else v
                        for v, spec in zip(node.args[0], specs)
                    )
                )
                self.graph.output_node().meta["specs"] = tuple(specs)
            elif node in self.assignment.omitted_marks:
                # Its users take the unmarked value, with the copies that exist or will.
                (value,) = self.assignment.ops[node].operands
                self.new[node] = self.new[value]
                self.copies[node] = self.copies.setdefault(
                    value, {self.assignment.layout_of[value]: self.new[value]}
                )
            else:
                self._copy_node(node)
        self._erase_unused_moves()
        return self.graph

    def _copy_node(self, node: fx.Node) -> None:
        """Copy an operation or an input, with its operands resharded."""
        op, at = self.assignment.ops.get(node), self.assignment
        needs = at.strategy_of[node].operands if op else ()
        if node.target is CARRY:
            needs = needs[:1]  # the next carry does not exist yet
        operands = iter([self.value(v, s, node) for v, s in zip(op.operands, needs)] if op else ())
        after = None
        if node.target is NEXT:
            mark = mark_of(node)
            assert mark.again is not None and mark.carry is not None, "`next` has both"
            again = self.value(mark.again, at.strategy_of[mark.carry].operands[1], node)
            after = {"again": again, "carry": self.new[mark.carry]}
        copy = copy_node(
            self.graph,
            node,
            lambda n: (None if is_number(n) else next(operands, None)) or self.new[n],
        )
        if after is not None:
            copy.args = mark_of(copy)._replace(**after).args
        self.new[node] = copy
        copy.meta = dict(node.meta)
        if after is not None and mark_of(node).ends_by_value:
            self._leave_as_carried(node, copy)
            return
        if op is not None:
            strategy = at.strategy_of[node]
            copy.meta |= {
                "rule": op.rule,
                "assignment": dict(strategy.assignment),
                "result_specs": strategy.results,
                "operand_specs": strategy.operands,
            }
        if node in at.layout_of:
            copy.meta["spec"] = at.layout_of[node]

    def _leave_as_carried(self, node: fx.Node, copy: fx.Node) -> None:
        """Keep a carry's layout where it leaves its loop: perhaps it is the first."""
        strategy = self.assignment.strategy_of[node.args[2]]
        (spec,) = strategy.results
        copy.update_arg(0, copy.args[1])
        copy.meta |= {
            "rule": self.assignment.ops[node].rule,
            "assignment": dict(strategy.assignment),
            "result_specs": (spec,),
            "operand_specs": (spec,),
            "spec": spec,
        }
        self.copies[node] = {spec: copy}

    def _erase_unused_moves(self) -> None:
        """Erase steps without users, and row moves that are used only through windows."""
        # Backwards: erasing a step may leave the one before it without users.
        for node in reversed(self.graph.nodes):
            if (
                node.op == "call_function"
                and not node.users
                and ("step" in node.meta or getattr(node.meta.get("rule"), "moves", False))
            ):
                self.graph.erase_node(node)

    def value(self, value: fx.Node, spec: ShardSpec, user: fx.Node) -> fx.Node:
        """Return the value laid out as `spec`, from the copy that is cheapest to start from."""
        copies = self.copies.setdefault(value, {self.assignment.layout_of[value]: self.new[value]})
        if spec not in copies:
            size, resharder = self.assignment.sizes[value], self.costs.resharder
            start = min(copies, key=lambda s: resharder.cost(*size, s, spec))
            if (copy := self.recompute_windows(value, start, spec, user)) is not None:
                copies[spec] = copy
                return copy
            node = copies[start]
            for step in resharder.steps(*size, start, spec):
                # Another user's path may have passed here: the common steps are sent once.
                if step.spec in copies:
                    node = copies[step.spec]
                    continue
                node = self.graph.create_node(
                    "call_function",
                    step.target,
                    (node, *step.args),
                    name=f"{value.name}_{step.target.suffix}",
                )
                node.meta = {**_step_meta(value, user), "spec": step.spec, "step": step}
                copies[step.spec] = node
        return copies[spec]

    def recompute_windows(
        self, value: fx.Node, start: ShardSpec, spec: ShardSpec, user: fx.Node
    ) -> fx.Node | None:
        """Return a moved value's windows, computed from operand windows.

        None if that sends more than windows of the value itself.
        """
        windows = self.costs.operand_windows(value, spec) if spec.windows else None
        cost = self.costs.resharder.cost(*self.assignment.sizes[value], start, spec)
        if windows is None or self.costs.window_cost(value, spec) > cost:
            return None
        op = self.assignment.ops[value]
        rest = iter([self.value(v, s, user) for v, s in zip(op.operands, windows)])
        copy = copy_node(self.graph, value, lambda n: next(rest))
        assignment = {f"d{d}": axes for d, axes in enumerate(spec.dims) if axes}
        copy.meta = {
            **_step_meta(value, user),
            "rule": op.rule,
            "assignment": assignment,
            "spec": spec,
            "result_specs": (spec,),
            "operand_specs": tuple(windows),
            **{key: value.meta[key] for key in ("computed",) if key in value.meta},
        }
        return copy


def _step_meta(value: fx.Node, user: fx.Node) -> dict[str, object]:
    # A step for the backward runs there, although its value is from the forward.
    backward = (
        user.meta.get("backward", value.meta.get("backward", False))
        if user.op != "output"
        else value.meta.get("backward", False)
    )
    return {
        **({"other": value.meta["other"], "dynamic": True} if "other" in value.meta else {}),
        **({"runs": value.meta["runs"]} if "runs" in value.meta else {}),
        "val": value.meta["val"],
        "source": None,
        **origin_of(value),
        "backward": backward or value.meta.get("backward", False),
    }
