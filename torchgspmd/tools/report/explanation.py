"""Why a line of a printed plan is there: Plan.explain.

The marks that reached a value explain it. A step between two layouts is explained by the value that
it moves, the operation that needs it elsewhere, and the other ways to get there:

    %einsum_1_rs moves %einsum_1 from [data _ sum@model] to [data model]
    result 0 of the program needs %einsum_1 in [data model]
      ways there                           sent  time on h100
    * reduce_scatter sum 1 model          512 B        5.0 us
      all_reduce sum model, shard 1 model 1.00 KiB     5.0 us
    model: %einsum_1 sums over it: m k, k n -> m n
    model: %down [model _] <- in_specs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from ...comm.hardware import Hardware
from ...comm.kinds import CollectiveKind, Step
from ...compiler.plan import Plan
from ...errors import ShardingError, did_you_mean
from ...fx_passes.digest import named_node
from ...fx_passes.ir import planned_shape, runs
from ...fx_passes.partition.cost_constants import CostConstants
from ...fx_passes.partition.explain_costs import Decisions, explain_costs
from ...fx_passes.partition.reshard_search import ReshardSearch, step_cost
from ...fx_passes.units import size_text, time_text
from ...shard_spec import ShardSpec

NO_COSTS = "no costs: the process that planned has the candidates"
MAX_WAYS = 6


def explain(plan: Plan, name: str, costs: bool, hardware: Hardware) -> str:
    return "\n".join(_Explainer(plan, hardware).lines(name, costs))


@dataclass(frozen=True)
class _Need:
    """An operation, or the program's end, that needs a value in a layout."""

    text: str
    node: fx.Node | None
    spec: ShardSpec


class _Explainer:
    """Explains one plan's names."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        self.plan, self.hardware, self.layouts = plan, hardware, plan.layouts
        self.values = {v.name: v for v in self.layouts.spec}
        self.nodes = {n.name: n for n in plan.sharded.nodes if n.op != "output"}
        self.decisions: Decisions | None = plan.sharded.output_node().meta.get("decisions")

    def lines(self, name: str, costs: bool) -> list[str]:
        inputs = zip(self.plan.captured.inputs, self.values.values())
        # Inputs have two names: the user's, such as blocks.0.weight, and the graph's.
        alias = {inp.name: value.name for inp, value in inputs}
        name = alias.get(name, name.removeprefix("%"))
        if name in self.values:
            return self._of_value(self.values[name], costs)
        if name not in self.nodes:  # a line on the page: layers.*.down
            names = [each.name for each in self.plan.captured.inputs]
            node = named_node(self.plan.sharded, names, name)
            if node is not None:
                return self.lines(node.name, costs)
            raise ShardingError.here(
                f"the plan has no value '{name}'",
                fix=did_you_mean(name, {**self.values, **self.nodes}),
            )
        node = self.nodes[name]
        return self._of_step(node) if "step" in node.meta else self._of_operation(node, costs)

    def _of_value(self, value: fx.Node, costs: bool) -> list[str]:
        """Return the way from a value back to its marks."""
        lines = self.layouts.explain(value)
        chosen = self.nodes[value.name].meta.get("spec") if value.name in self.nodes else None
        if chosen is not None and chosen != self.layouts.spec[value]:
            lines.append(f"chosen by cost: [{chosen}]")
        if costs:
            lines += ["", explain_costs(self.decisions, value) if self.decisions else NO_COSTS]
        return lines

    def _of_operation(self, node: fx.Node, costs: bool) -> list[str]:
        """Return the reasons for an operation with several results, or one that a pass wrote."""
        parts = [user for user in node.users if user.name in self.values]
        results = ", ".join(f"[{spec}]" for spec in node.meta.get("result_specs", ()))
        lines = [f"%{node.name} {results} <- {node.meta.get('rule', 'a part of a loop')}"]
        for part in parts:
            lines += ["", *self._of_value(self.values[part.name], costs)]
        if not parts:
            moved = [n for n in node.all_input_nodes if "spec" in n.meta]
            lines += [f"operand %{n.name} [{n.meta['spec']}]" for n in moved]
            lines += self._reasons(moved, {a for n in moved for a in _axes(n.meta["spec"])})
        return lines

    # ----------------------------------------------------------------------------------- of a step

    def _of_step(self, node: fx.Node) -> list[str]:
        """Return the operation that needs a step, the ways there, and the marks behind both."""
        source, end = _source(node), _end(node)
        steps, first = [], end
        while first is not source:
            steps.insert(0, first)
            first = first.args[0]
        before, after = source.meta["spec"], end.meta["spec"]
        step: Step = node.meta["step"]
        moved = node.args[0]
        lines = [f"%{node.name} moves %{moved} from [{moved.meta['spec']}] to [{step.spec}]"]
        needs = list(_needs(end))
        lines += [f"{need.text} needs %{source.name} in [{need.spec}]" for need in needs]
        if len(steps) > 1:
            names = ", ".join(f"%{each.name}" for each in steps)
            lines.append(f"it is one of the steps {names} from [{before}] to [{after}]")
        lines += self._ways(source, before, after, tuple(each.meta["step"] for each in steps))
        # An axis that stays where it is needs no reason.
        axes = {a for a in (*_axes(before), *_axes(after)) if _place(before, a) != _place(after, a)}
        users = [need.node for need in needs if need.node is not None]
        return lines + self._reasons([source, *users], axes)

    def _ways(
        self, source: fx.Node, before: ShardSpec, after: ShardSpec, taken: tuple[Step, ...]
    ) -> list[str]:
        """Return the ways between two layouts as a table, cheapest first; `*` is the plan's."""
        constants = self.decisions.constants if self.decisions else CostConstants()
        shape, itemsize = planned_shape(source), source.meta["val"].dtype.itemsize
        search = ReshardSearch(self.plan.mesh, shape, itemsize, after, constants)
        ways = {_way_text(taken): taken}
        # The search knows no layouts with halos: then only the plan's own way is shown.
        if not any(spec.windows for spec in (before, after)):
            for steps in search.alternatives(before):
                ways.setdefault(_way_text(steps), steps)
        cost = {text: sum(step_cost(s, constants) for s in steps) for text, steps in ways.items()}
        chosen, count = _way_text(taken), runs(source)
        # Among ways with equal costs the plan's is first.
        shown = sorted(ways, key=lambda text: (cost[text], text != chosen))[:MAX_WAYS]
        if chosen not in shown:
            # The plan's way is shown even if many others are cheaper.
            shown.append(chosen)
        rows = [("ways there", "sent", f"time on {self.hardware.name}")]
        for text in shown:
            steps = ways[text]
            sent, seconds = sum(s.sent for s in steps), sum(map(self._seconds, steps))
            rows.append((text, size_text(sent * count), time_text(seconds * count)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        marks = [" ", *("*" if text == chosen else " " for text in shown)]
        lines = [
            f"{mark} {text:{widths[0]}}  {sent:>{widths[1]}}  {time:>{widths[2]}}"
            for mark, (text, sent, time) in zip(marks, rows)
        ]
        more = len(ways) - len(shown)
        return [*lines, *([f"  and {more} that cost more"] if more else [])]

    def _seconds(self, step: Step) -> float:
        """Return a step's seconds; one that sends nothing takes none."""
        kind = step.target
        if not isinstance(kind, CollectiveKind) or not step.sent:
            return 0.0
        return self.hardware.transfer_seconds(
            self.plan.mesh, step.axes, kind.name, kind.relays, step.sent
        )

    def _reasons(self, nodes: Iterable[fx.Node], axes: Iterable[str]) -> list[str]:
        """Return the ways by which some axes came to some operations, back to the marks."""
        lines: dict[str, None] = {}
        for node in nodes:
            for axis in sorted(axes, key=self.plan.mesh.names.index):
                lines |= dict.fromkeys(self._reason(node, axis))
        return list(lines)

    def _reason(self, node: fx.Node, axis: str) -> list[str]:
        """Return an axis's way to an operation: to its value, or to operands it sums over."""
        spec: ShardSpec | None = node.meta.get("spec")
        if spec is not None and axis in spec.pending:
            # A pending sum has its axis from the operands, through the factor that is summed.
            operands = [n for n in map(_source, node.all_input_nodes) if n.name in self.values]
            head = f"{axis}: %{node.name} sums over it: {node.meta.get('rule', node.target)}"
            return [head, *(line for n in operands for line in self._reason(n, axis))]
        lines = self._chain(node, axis)
        if not lines and spec is not None and axis in spec.sharding_axes:
            why = f"explain('{node.name}', costs=True)"
            return [f"{axis}: no mark brought it to %{node.name}: [{spec}] costs least, see {why}"]
        return lines

    def _chain(self, node: fx.Node, axis: str) -> list[str]:
        value = self.values.get(node.name)
        lines = self.layouts.explain(value) if value is not None else []
        return [line for line in lines if line.startswith(f"{axis}: ")]


def _axes(spec: ShardSpec) -> tuple[str, ...]:
    """Return the axes that shard a value, and those over which it is pending."""
    return (*spec.sharding_axes, *spec.pending)


def _place(spec: ShardSpec, axis: str) -> object:
    """Return where a layout has an axis: a dimension and a place in it, or a sum."""
    places = [(d, axes.index(axis)) for d, axes in enumerate(spec.dims) if axis in axes]
    return places or (axis in spec.pending)


def _source(node: fx.Node) -> fx.Node:
    """Return the value that a chain of steps moves."""
    while "step" in node.meta:
        node = node.args[0]
    return node


def _end(node: fx.Node) -> fx.Node:
    """Return the last step in a step's chain; if there are several, the first."""
    # The chain ends where an operation, too, uses the value.
    while (steps := [user for user in node.users if "step" in user.meta]) and len(
        node.users
    ) == len(steps):
        node = steps[0]
    return node


def _needs(end: fx.Node) -> Iterator[_Need]:
    """Yield the last step's users, each with the place in which it uses it."""
    spec = end.meta["spec"]
    for user in end.users:
        if "step" in user.meta:
            continue
        if user.op == "output":
            places = [i for i, each in enumerate(user.args[0]) if each is end]
            for i in places:
                yield _Need(f"result {i} of the program", None, spec)
            continue
        operands = list(user.all_input_nodes)
        place = f"operand {operands.index(end) + 1} of %{user.name}"
        yield _Need(place, user, spec)


def _way_text(steps: Iterable[Step]) -> str:
    """Return steps as text: reduce_scatter 1 model, all_gather 0 data."""
    return ", ".join(" ".join([step.kind, *map(str, step.args)]) for step in steps) or "nothing"
