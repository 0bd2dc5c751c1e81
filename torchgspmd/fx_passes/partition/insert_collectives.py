"""Insert collectives between operations: every value is resharded to its users' layouts.

before   an assignment with a strategy for every operation
after    %mm   : f32[8@data, 64] sum@model = mm(%gelu, %w2)
         %mm_r : f32[8@data, 64]           = all_reduce(%mm, sum, model)
needs    nothing else
ensures  users that require equal layouts share one copy
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, combinations

from torch import fx

from ...comm.collective import split_axes
from ...comm.hardware import Hardware
from ...comm.kinds import Step, all_gather, all_reduce, reduce_scatter
from ...compat.fx_nodes import copy_node, origin_of
from ...layout.mesh import Mesh
from ...rules.custom_ops.loops import CARRY, NEXT, mark_of
from ...shard_spec import Axes, ShardSpec
from ..ir import is_number
from .assignment import Assignment
from .cost_model import CostModel


def regather_weights(graph: fx.Graph, activations: bool = False) -> fx.Graph:
    """Gather weights a second time for the backward, instead of keeping the forward's.

    before   %w_g = all_gather(%w, 0, data);    %y = einsum(%x, %w_g);    %dx = einsum(%dy, %w_g)
    after    %w_g = all_gather(%w, 0, data);    %y = einsum(%x, %w_g)
             %w_g_1 = all_gather(%w, 0, data);  %dx = einsum(%dy, %w_g_1)
    needs    the partitioned program; meta["backward"]
    ensures  no gathered input, nor a cast or view of one, lives from the forward to the backward
    source   reshard_after_forward in PyTorch's FSDP2; ZeRO (arXiv 1910.02054), stage 3

    activations: also gather again the activations that the forward gathered, as a long context's
    keys.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    # gathered value -> the first node of the backward that needs it
    gathered: dict[fx.Node, fx.Node | None] = {}
    for node in order:
        if (
            node.op == "call_function"
            and not node.meta.get("backward")
            and (activations or _depends_on_one_input(node))
            and (
                gathers(node)
                or node.args
                and node.args[0] in gathered
                and len(node.all_input_nodes) == 1
            )
        ):
            gathered[node] = None
    # Backwards: a gather is needed where the first of the values computed from it is.
    for node in reversed(gathered):
        needed = [
            gathered[u] if u in gathered else u
            for u in node.users
            if u in gathered or u.meta.get("backward")
        ]
        gathered[node] = min(filter(None, needed), key=order.__getitem__, default=None)
    copies: dict[fx.Node, fx.Node] = {}
    for node, before in gathered.items():
        if before is None:
            continue
        late = [u for u in node.users if u.meta.get("backward")]
        with graph.inserting_before(before):
            copies[node] = copy_node(graph, node, lambda n: copies.get(n, n))
        copies[node].meta = {**node.meta, "backward": True}
        for user in late:
            user.replace_input_with(node, copies[node])
    return graph


def gathers(node: fx.Node) -> bool:
    """Return whether a collective gathers: a permutation may, from two axes to none."""
    if "step" not in node.meta:
        return False
    before, after = (value.meta["spec"].sharding_axes for value in (node.args[0], node))
    return {*after} < {*before}


def _depends_on_one_input(node: fx.Node) -> bool:
    """Return whether a value is computed from one input by operations on one tensor each."""
    while node.op == "call_function":
        if len(node.all_input_nodes) != 1 or node.args[0] is not node.all_input_nodes[0]:
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def hierarchical_sums(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> fx.Graph | None:
    """Reduce over several axes in steps, the slow links last, where that takes less time.

    before   %w_r    : f32[8, 6]                = all_reduce(%w, sum, host+core)
    after    %w_r_rs : f32[8@core, 6] sum@host  = reduce_scatter(%w, sum, 0, core)
             %w_r_r  : f32[8@core, 6]           = all_reduce(%w_r_rs, sum, host)
             %w_r_g  : f32[8, 6]                = all_gather(%w_r_r, 0, core)
    needs    the partitioned program, and hardware whose links say which axes leave a host
    ensures  equal layouts; over the links between n devices of a host each sends 1/n as much
    source   2-D gradient summation of arXiv 2011.03641

    A dimension has to divide by the fast axes. Latencies count: small sums stay one message.
    """
    changed = False
    for node in graph.find_nodes(op="call_function", target=all_reduce):
        ways = [(node.meta["step"],), *_ways(node, mesh)]
        steps = min(ways, key=lambda steps: _seconds(steps, mesh, hardware))
        if len(steps) > 1:
            _replace(graph, node, steps)
            changed = True
    return graph if changed else None


def _ways(node: fx.Node, mesh: Mesh) -> Iterator[tuple[Step, ...]]:
    """Yield the steps for each part of the axes that is reduced first, and gathered last."""
    axes: Axes = split_axes(node.args[2])
    parts = chain.from_iterable(combinations(axes, k) for k in range(1, len(axes)))
    for fast in parts if not node.meta.get("dynamic") else ():
        yield from _way(node, mesh, fast, tuple(a for a in axes if a not in fast))


def _way(node: fx.Node, mesh: Mesh, fast: Axes, slow: Axes) -> Iterator[tuple[Step, ...]]:
    """Yield the steps over `fast`, `slow` and `fast` again, if a dimension divides."""
    before: ShardSpec = node.args[0].meta["spec"]
    after: ShardSpec = node.meta["spec"]
    payload, reduction = node.meta["step"].payload, node.args[1]
    for dim, size in enumerate(node.meta["val"].shape):
        fine = before.dims[dim] + fast
        # Any dimension will do, as all ways send the same bytes: the first that divides is taken.
        if size and size % mesh.count(fine) == 0:
            pending = tuple(a for a in before.pending if a not in fast)
            scattered = before.with_pending(pending).with_dim(dim, fine)
            part, over = payload / mesh.count(fast), ("+".join(fast), "+".join(slow))
            yield (
                reduce_scatter.step(mesh, (reduction, dim, over[0]), scattered, fast, payload),
                all_reduce.step(mesh, (reduction, over[1]), after.with_dim(dim, fine), slow, part),
                all_gather.step(mesh, (dim, over[0]), after, fast, payload),
            )
            return


def _seconds(steps: tuple[Step, ...], mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds that steps take, one after the other.

    A message's latency counts once: how it grows with the devices is much the same either way.
    """
    # Measured collectives first, if the hardware has this one: links are only an estimate.
    links = [
        hardware.measured(mesh, step.axes, step.kind)
        or hardware.link(mesh, step.axes, step.target.relays)
        for step in steps
    ]
    return sum(link.latency + step.sent / link.bandwidth for link, step in zip(links, steps))


def _replace(graph: fx.Graph, node: fx.Node, steps: tuple[Step, ...]) -> None:
    value = node.args[0]
    with graph.inserting_before(node):
        for step in steps:
            name, args = f"{node.name}_{step.target.suffix}", (value, *step.args)
            value = graph.create_node("call_function", step.target, args, name=name)
            value.meta = {**node.meta, "spec": step.spec, "step": step}
    node.replace_all_uses_with(value)
    graph.erase_node(node)


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
