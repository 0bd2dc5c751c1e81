"""One trial in a certificate: a set of random numbers, on one device and on all."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from ...comm.local_ops import part_order, user_order
from ...compat.operators import draws
from ...compiler.plan import Plan
from ...errors import ShardingError
from ...features.windows.pooling import BACKWARD, FORWARD
from ...fx_passes.ir import boundary_spec, runs
from ...shard_spec import ShardSpec
from .claimed_layouts import close, compared, cut, fails, other_value, value_of
from .devices import At, DeviceError, Devices, StageShards
from .inputs import RandomInputs, Rewritten, device_of, widened
from .one_device import OneDeviceRun, Rows, Values

_COARSE = 1e-2  # a value that is compared with fewer digits is not judged


class NoNumbers(Exception):
    """The one-device program takes no random numbers, such as for a root of a matrix."""


class RandomTrial:
    """One set of numbers, on one device and on all.

    wide: whether floating numbers have 64 bits, so that no summation order matters.
    """

    def __init__(self, plan: Plan, seed: int, positive: bool, wide: bool) -> None:
        self.plan, self.seed, self.positive, self.wide = plan, seed, positive, wide
        self.unmatched = set[str]()  # values that depend on numbers drawn in another order
        self.roundings, self.coarsest = elements(plan), 0.0 if wide else _coarsest(plan)
        self.native = _native(plan.sharded)
        self.apart = _apart(plan)
        graphs = plan.captured.graph, plan.sharded
        self.device = device_of(plan.captured)
        self.copied = Rewritten(wide, self.device)
        self.graphs = [self.copied.graph(graph) for graph in graphs]
        self.constants = constants_of(plan, wide)
        self.inputs, self.truth, self.expected = self._one_device()

    def run(self, graph: fx.Graph) -> None:
        """Run a one-device program on all devices, and compare all its values.

        Raises:
            ShardingError: The first value that differs.
        """
        plan = self.plan
        self.judged, self.results = set[str](), 0  # values, and how many results, that hold
        self.seen: dict[str, int] = {}
        self.stages = StageShards(plan.mesh)
        shards = [cut(t, spec, plan.mesh) for t, spec in zip(self.inputs, plan.input_layouts)]
        sizes = plan.sizes_of_run([tuple(t.shape) for t in self.inputs])
        devices = Devices(self.constants, plan.mesh, self.copied.graph(graph), self._claim)
        try:
            results = devices.run_devices(shards, plan.size_inputs(sizes))
        except DeviceError as error:
            if self.wide:  # an operation that takes no 64 bits
                raise NoNumbers(str(error)) from error
            raise fails(error.node, error, "the devices", "it") from error
        self.shards: list[list[Tensor]] = results
        returned = plan.sharded.output_node().args[0]
        for i, (values, spec) in enumerate(zip(results, plan.out_specs)):
            if spec is not None and returned[i].name not in self.native:
                node = graph.output_node().args[0][i]
                judged = self._compare(node.name, None, list(values), spec, self.expected[i], i)
                self.results += judged and returned[i].name not in self.unmatched

    def _one_device(self) -> tuple[list[Tensor], Values, Sequence[Any]]:
        """Return inputs, the partitioned program's values by name, and the true results."""
        most = 1 << 30
        while True:
            numbers = RandomInputs(self.plan.captured, self.seed, self.positive, most)
            self.plain = [t.to(self.device) for t in numbers.tensors()]  # in the dtypes of the plan
            inputs = [widened(t) if self.wide else t for t in self.plain]
            try:
                return inputs, *self._truth(inputs)
            except ShardingError:
                raise
            except Exception as error:
                if not self.wide and self._captured_runs(inputs):
                    self._compare_histories(inputs)
                    node, whole = self.partitioned.node, "the captured program"
                    raise fails(node, error, "one device", whole) from error
                if most == 1 or self.wide and self._captured_runs(inputs):
                    raise NoNumbers(str(error).partition("\n")[0]) from error
                # Integers may be sizes or counts: smaller ones fit more programs.
                most = 8 if most > 8 else most // 2

    def _captured_runs(self, inputs: Sequence[Tensor]) -> bool:
        try:
            OneDeviceRun(self.graphs[0], self.constants).run(inputs)
        except Exception:
            return False
        return True

    def _truth(self, inputs: Sequence[Tensor]) -> tuple[Values, Sequence[Any]]:
        """Return the partitioned program's values, compared with the captured program's."""
        graphs, constants = self.graphs, self.constants
        self.partitioned = partitioned = OneDeviceRun(graphs[1], constants)
        own = partitioned.run(self._as_stored(inputs))
        if self._has_parts():
            mesh, outs = self.plan.mesh, self.plan.out_specs
            own = [x if s is None else user_order(x, s, mesh) for x, s in zip(own, outs)]
        given, unmatched = self._counterparts(partitioned)
        captured = OneDeviceRun(graphs[0], constants, given)
        results = captured.run(inputs)
        # A carry comes behind the iteration before it.
        mine = ((name, rows, partitioned.values[name][rows]) for name, rows in partitioned.order)
        try:
            self._compare_graphs(mine, captured.values)
        except ShardingError:
            self._compare_histories(inputs)
            raise
        mixed = list[Any]()
        ends = (graph.output_node().args[0] for graph in graphs)
        for i, (node, mine_node, mine, one) in enumerate(zip(*ends, own, results)):
            is_other = isinstance(node, fx.Node) and node.name in unmatched
            mixed.append(mine if is_other else one)
            tensors = isinstance(mine, Tensor) and isinstance(one, Tensor)
            if tensors and not is_other and mine_node.name not in self.native:
                spec = ShardSpec.replicated(one.dim())
                self._compare(mine_node.name, None, [mine], spec, one, i)
        return partitioned.values, mixed

    def _has_parts(self) -> bool:
        """Return whether the partitioned program takes a weight by parts."""
        return any("parts" in n.meta for n in self.graphs[1].find_nodes(op="placeholder"))

    def _as_stored(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the inputs; weights by parts have their rows in the order of shards."""
        if not self._has_parts():
            return inputs
        specs = self.plan.input_layouts
        return [part_order(x, spec, self.plan.mesh) for x, spec in zip(inputs, specs)]

    def _counterparts(self, partitioned: OneDeviceRun) -> tuple[Values, set[str]]:
        """Return the captured program's draws, and its values that no other program need have."""
        names = {n.meta["captured"]: n.name for n in self.graphs[1].nodes if "captured" in n.meta}
        given = _drawn(self.graphs[0], names, partitioned.values)
        unmatched = _unmatched(self.graphs[0], given)
        nodes = self.graphs[1].nodes
        self.unmatched |= {n.name for n in nodes if n.meta.get("captured") in unmatched}
        return given, unmatched

    def _compare_graphs(self, mine: Iterable[tuple[str, Rows, Any]], captured: Values) -> None:
        """Compare values of the partitioned program (name, rows, value) with the captured one's."""
        nodes = {node.name: node for node in self.graphs[1].nodes}
        for name, rows, value in mine:
            node = nodes[name]
            if name in self.native or name in self.unmatched or is_blank(node):
                continue
            expected = captured.get(node.meta.get("captured", ""), {}).get(rows)
            if isinstance(value, Tensor) and isinstance(expected, Tensor):
                if "parts" in node.meta:
                    expected = part_order(expected, boundary_spec(node), self.plan.mesh)
                # A flattened dimension may have its parts apart in the partitioned program.
                expected = expected.reshape(value.shape) if name in self.apart else expected
                spec = ShardSpec.replicated(expected.dim())
                self._compare(name, node, [value], spec, expected)

    def _compare_histories(self, inputs: Sequence[Tensor]) -> None:
        """Raise ShardingError for the value that was wrong first.

        A stage computes each value several times, until all has arrived that it needs. So a wrong
        value in a late stage may stand before its cause; here it comes behind it.
        """
        mine, one = list[tuple[str, Rows, Any]](), list[tuple[str, Rows, Any]]()
        partitioned = OneDeviceRun(self.graphs[1], self.constants, history=mine)
        with suppress(Exception):  # the values before that are compared
            partitioned.run(self._as_stored(inputs))
        given, _ = self._counterparts(partitioned)
        OneDeviceRun(self.graphs[0], self.constants, given, one).run(inputs)
        # The time at which a value was computed is one more number of its rows.
        self._compare_graphs(_numbered(mine), _by_name(_numbered(one)))

    def _claim(self, path: str, node: fx.Node, shards: list[Tensor], at: At) -> None:
        name, spec = node.meta["value"], node.meta["spec"]
        by_rows = self.truth.get(name, {})
        if name in self.native or is_blank(node):
            return
        if at.microbatches:
            found = self.stages.complete(path, shards, spec, at.of(node))
        else:
            found = [(None, self.seen.get(path, 0), shards, range(len(shards)))]
            self.seen[path] = self.seen.get(path, 0) + 1
        for microbatch, turn, held, ranks in found:
            values = [
                value
                for rows, value in by_rows.items()
                if microbatch is None or rows[at.depth : at.depth + 1] == (microbatch,)
            ]
            value = values[turn] if turn < len(values) else None
            if not isinstance(value, Tensor):
                continue
            is_judged = self._compare(node.name, node, held, spec, value, ranks=ranks)
            if is_judged and name not in self.unmatched:
                self.judged.add(name)

    def _compare(
        self,
        name: str,
        node: fx.Node | None,
        shards: list[Tensor],
        spec: ShardSpec,
        truth: Tensor,
        result: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> bool:
        """Compare shards with the truth; return whether that judges the value.

        node: the one that has the claim, or None for result number `result`.
        """
        alone = len(shards) == 1 and not spec.sharding_axes
        pairs = [(0, shards[0], truth)] if alone else compared(shards, spec, self.plan.mesh, truth)
        for rank, mine, one in pairs:
            if ranks is not None and rank not in ranks:
                continue
            if mine.shape != one.shape or not self.close(mine, one).all():
                claim = f"is result {result}" if node is None else f"is %{value_of(node)}"
                found = self._difference(rank, mine, one)
                raise other_value(name, node, f"{claim}, laid out as '{spec}'", found)
        if not truth.is_floating_point():
            return True
        is_exact = self._error(truth) < _COARSE
        return is_exact and bool(torch.isfinite(truth).any())

    def close(self, mine: Tensor, one: Tensor) -> Tensor:
        """Return where two values are equal, but for the order of sums."""
        return close(mine, one, self._error(one))

    def _error(self, truth: Tensor) -> float:
        """Return how far two ways to compute a value may differ, relative to its largest number.

        No number of a program is the result of more roundings than all its values have elements.
        """
        is_exact = not (truth.is_floating_point() or truth.is_complex())
        return (
            0.0 if is_exact else self.roundings * max(torch.finfo(truth.dtype).eps, self.coarsest)
        )

    def _difference(self, rank: int, mine: Tensor, one: Tensor) -> str:
        """Return where a device differs, with both numbers."""
        where = ", ".join(f"{a}={c}" for a, c in self.plan.mesh.coordinates(rank).items())
        if mine.shape != one.shape:
            return (
                f"device {where} has the shape {list(mine.shape)}, one device has {list(one.shape)}"
            )
        at = tuple((~self.close(mine, one)).nonzero()[0].tolist())
        numbers = f"{mine[at].item()} at {list(at)} of its shard, one device has {one[at].item()}"
        return f"device {where} has {numbers}"


def _numbered(history: Iterable[tuple[str, Rows, Any]]) -> Iterator[tuple[str, Rows, Any]]:
    """Yield the values of a history; a number behind their rows counts those of equal rows."""
    counts = Counter[tuple[str, Rows]]()
    for name, rows, value in history:
        yield name, (*rows, counts[name, rows]), value
        counts[name, rows] += 1


def _by_name(values: Iterable[tuple[str, Rows, Any]]) -> Values:
    found = Values()
    for name, rows, value in values:
        found.setdefault(name, {})[rows] = value
    return found


def _drawn(captured: fx.Graph, names: Mapping[str, str], values: Values) -> Values:
    """Return the captured program's draws: the numbers that the partitioned one has drawn.

    names: captured name -> name in the partitioned graph. A repeated draw has the same numbers.
    """
    found, again = Values(), dict[tuple[int, object], Any]()
    for node in captured.nodes:
        draw = node.args[0] if node.target is operator.getitem else node
        if isinstance(draw, fx.Node) and draws(draw.target):
            key = draw.meta.get("draw", -1), node.args[1] if draw is not node else None
            mine = values.get(names.get(node.name, ""), again.get(key) if key[0] >= 0 else None)
            if mine is not None:
                drawn = again.setdefault(key, mine)
                # The partitioned program may have parts of the dimensions.
                val = node.meta.get("val")
                shape = val.shape if isinstance(val, Tensor) else None
                found[node.name] = {
                    rows: x if shape is None else x.reshape(shape) for rows, x in drawn.items()
                }
    return found


def _apart(plan: Plan) -> set[str]:
    """Return the values that the partitioned program has in parts of their dimensions."""
    shapes = {n.name: getattr(n.meta.get("val"), "shape", None) for n in plan.captured.graph.nodes}
    return {
        n.name
        for n in plan.sharded.nodes
        if shapes.get(n.meta.get("captured")) not in (None, getattr(n.meta.get("val"), "shape", 0))
    }


def _unmatched(captured: fx.Graph, given: Values) -> set[str]:
    """Return values in the captured program that no other program need have.

    They depend on draws without a counterpart, have no content, or a gradient alone reads them.
    """
    found, inner = set[fx.Node](), set[str]()
    for node in captured.nodes:
        parts = [u for u in node.users if u.target is operator.getitem]
        is_given = bool(parts) and all(part.name in given for part in parts)
        if node.name not in given and (
            draws(node.target) and not is_given or found & set(node.all_input_nodes)
        ):
            found.add(node)
        # A pool that runs dimension by dimension counts maxima within its last one.
        is_place = (
            node.target is operator.getitem
            and node.args[1] == 1
            and node.args[0].target in FORWARD
            and all(user.target in BACKWARD for user in node.users)
        )
        if is_place or is_blank(node):
            inner.add(node.name)
    return {node.name for node in found} | inner


def _native(graph: fx.Graph) -> set[str]:
    """Return the values that depend on numbers which each device draws by itself."""
    found = set[fx.Node]()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        names = [a.name for a in schema.arguments] if schema is not None else []
        # `native` may be passed by position or by name.
        given = {**dict(zip(names, node.args)), **node.kwargs}
        if given.get("native") is True or found & set(node.all_input_nodes):
            found.add(node)
    return {node.name for node in found}


def elements(plan: Plan) -> int:
    values = ((n.meta.get("val"), runs(n)) for n in plan.sharded.nodes)
    return sum(v.numel() * times for v, times in values if isinstance(v, Tensor))


def _coarsest(plan: Plan) -> float:
    values = (node.meta.get("val") for node in plan.sharded.nodes)
    dtypes = {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def is_blank(node: fx.Node) -> bool:
    return "empty" in getattr(node.target, "__name__", "")


def constants_of(plan: Plan, wide: bool) -> torch.nn.Module:
    constants, device = torch.nn.Module(), device_of(plan.captured)
    graphs = plan.captured.graph, plan.sharded, plan.program_graph
    for node in (n for graph in graphs for n in graph.find_nodes(op="get_attr")):
        value = plan.captured.constants.get_buffer(str(node.target)).to(device)
        constants.register_buffer(str(node.target), widened(value) if wide else value)
    return constants
