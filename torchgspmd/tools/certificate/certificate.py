"""Plan.verify: does each value of the planned programs denote the value that it claims?

    captured program, one device      --values by name-->      partitioned program, one device
    partitioned program, one device   --shards by layout-->    programs of all devices

A node of the program of one device claims a value of the partitioned program (meta "value") in a
layout (meta "spec"). The devices run in lockstep, on random numbers, with NaN in all padding, and
each claim is compared element by element. Results claim their layouts, too: they are judged
whatever the claims within say. docs/certificate.md has the method and its limits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...comm.loop_call import loop_calls
from ...compat.operators import aten
from ...compiler.plan import Plan
from ...errors import ShardingError
from ...shard_spec import ShardSpec
from .devices import At, DeviceError, Devices
from .inputs import Numbers, Rewritten, widened
from .layouts import compared, cut
from .one_device import OneDevice, Values, draws

_TOO_LARGE = 100_000_000  # elements of all values on all devices, of one trial
_REPORT = "report it, with the file that plan.save(path) writes; do not train with this plan"
_SHOWN = 6  # names of one reason that a text has
_TRIALS = ((1, True), (2, False))  # (seed, whether numbers are positive)


@dataclass(frozen=True)
class Uncertified:
    """A value that no trial could judge. name: as the plan prints it."""

    name: str
    why: str


@dataclass(frozen=True)
class Certificate:
    """The result of `Plan.verify`: all claims that were judged hold.

    Args:
        certified: Names of values of the partitioned program that hold on all devices.
        uncertified: Values that could not be judged, each with the reason.
        trials: How many sets of random numbers were run.
        results: Outputs, updated inputs and gradients that hold.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> specs = ("data model", "model _")
        >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
        >>> print(result.verify())
        certified 4 of 4 values and 1 result, in 2 trials
    """

    certified: frozenset[str]
    uncertified: tuple[Uncertified, ...]
    trials: int
    results: int

    @property
    def complete(self) -> bool:
        """Whether every value is certified."""
        return not self.uncertified

    def __str__(self) -> str:
        total = len(self.certified) + len(self.uncertified)
        plural = "" if self.results == 1 else "s"
        lines = [
            f"certified {len(self.certified)} of {total} values and {self.results} result{plural}, "
            f"in {self.trials} trials"
        ]
        for why in dict.fromkeys(each.why for each in self.uncertified):
            names = [f"%{each.name}" for each in self.uncertified if each.why == why]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"  not {', '.join(names[:_SHOWN])}{more}: {why}")
        return "\n".join(lines)


def certify(plan: Plan) -> Certificate:
    """Return the certificate of a plan.

    Raises:
        ShardingError: A value is another one than that of one device.
    """
    without = _without_content(plan)
    claimed = dict.fromkeys(n.meta["value"] for n in _claims(plan.program_graph))
    names = [name for name in claimed if name not in without]
    judged, why, results = set[str](), "", 0
    if (work := _work(plan)) > _TOO_LARGE:
        why = f"{work:.0e} elements on all devices are too many; verify a plan of smaller sizes"
    for seed, positive in _TRIALS if not why else ():
        for wide in (True, False):
            try:
                trial = _Trial(plan, seed, positive, wide)
                trial.run()
            except _NoNumbers as error:
                why = f"one device cannot compute it with random numbers: {error}"
                continue
            judged |= trial.judged
            results = len(plan.out_specs)
            break
    if judged:
        _check_dtypes(plan)
    reason = why if not judged else "no number of it is finite, or it is drawn in another order"
    left = tuple(Uncertified(name, reason) for name in names if name not in judged)
    return Certificate(frozenset(judged), left, len(_TRIALS) if judged else 0, results)


class _NoNumbers(Exception):
    """The program of one device takes no random numbers: they are no matrix that has a root."""


def _claims(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that claim a value."""
    for node in graph.nodes:
        if "value" in node.meta and "spec" in node.meta:
            yield node


def _work(plan: Plan) -> float:
    """Return the elements of all values, on all devices."""
    vals = (n.meta.get("val") for n in plan.sharded.nodes)
    return plan.mesh.size * float(sum(v.numel() for v in vals if isinstance(v, Tensor)))


class _Trial:
    """One set of numbers, on one device and on all of them.

    wide: whether floating numbers have 64 bits, so that no order of a sum matters.
    """

    def __init__(self, plan: Plan, seed: int, positive: bool, wide: bool) -> None:
        self.plan, self.seed, self.positive, self.wide = plan, seed, positive, wide
        self.judged = set[str]()
        self.seen: dict[str, int] = {}
        self.unmatched = set[str]()  # values that depend on numbers drawn in another order
        self.native = _native(plan.sharded)
        graphs = plan.captured.graph, plan.sharded
        self.copied = Rewritten(wide)
        self.graphs = [self.copied.graph(graph) for graph in graphs]
        self.constants = _constants(plan, wide)
        self.inputs, self.truth, self.expected = self._one_device()

    def run(self) -> None:
        """Compare all values; raise ShardingError for the first one that differs."""
        plan = self.plan
        shards = [cut(t, spec, plan.mesh) for t, spec in zip(self.inputs, plan.input_layouts)]
        program = fx.GraphModule(self.constants, self.copied.graph(plan.program_graph))
        sizes = plan.sizes_of_run([tuple(t.shape) for t in self.inputs])
        devices = Devices(program, plan.mesh, self._claim)
        try:
            results = devices.run_devices(shards, plan.size_inputs(sizes))
        except DeviceError as error:
            if self.wide:  # an operation that takes no 64 bits
                raise _NoNumbers(str(error)) from error
            raise _failed(error.node, error) from error
        returned = plan.sharded.output_node().args[0]
        for i, (values, spec) in enumerate(zip(results, plan.out_specs)):
            is_native = isinstance(returned[i], fx.Node) and returned[i].name in self.native
            if spec is not None and isinstance(self.expected[i], Tensor) and not is_native:
                node = plan.program_graph.output_node().args[0][i]
                self._compare(node.name, None, list(values), spec, self.expected[i], i)

    def _one_device(self) -> tuple[list[Tensor], Values, Sequence[Any]]:
        """Return inputs, values by name of the partitioned program, and the true results."""
        most = 1 << 30
        while True:
            numbers = Numbers(self.plan.captured, self.seed, self.positive, most)
            inputs = [widened(t) if self.wide else t for t in numbers.tensors()]
            try:
                return inputs, *self._truth(inputs)
            except ShardingError:
                raise
            except Exception as error:
                if not self.wide and self._captured_runs(inputs):
                    raise _no_program(error) from error
                if most == 1 or self.wide and self._captured_runs(inputs):
                    raise _NoNumbers(str(error).partition("\n")[0]) from error
                most = 8 if most > 8 else most // 2

    def _captured_runs(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether one device computes the captured program of these numbers."""
        try:
            OneDevice(self.graphs[0], self.constants).run(inputs)
        except Exception:
            return False
        return True

    def _truth(self, inputs: Sequence[Tensor]) -> tuple[Values, Sequence[Any]]:
        """Return values of the partitioned program, compared with the captured one."""
        graphs, constants = self.graphs, self.constants
        partitioned = OneDevice(graphs[1], constants)
        own = partitioned.run(inputs)
        names = {n.meta["captured"]: n.name for n in graphs[1].nodes if "captured" in n.meta}
        given = _drawn(graphs[0], names, partitioned.values)
        captured, unmatched = OneDevice(graphs[0], constants, given), _unmatched(graphs[0], given)
        results = captured.run(inputs)
        for node in graphs[1].nodes:
            if node.name in self.native or _is_blank(node):
                continue
            if node.meta.get("captured") in unmatched:
                self.unmatched.add(node.name)
                continue
            truth = captured.values.get(node.meta.get("captured", ""), {})
            for rows, value in partitioned.values.get(node.name, {}).items():
                expected = truth.get(rows)
                if isinstance(value, Tensor) and isinstance(expected, Tensor):
                    spec = ShardSpec.replicated(expected.dim())
                    self._compare(node.name, node, [value], spec, expected)
        returned = graphs[0].output_node().args[0]
        mixed = [
            mine if isinstance(n, fx.Node) and n.name in unmatched else one
            for n, mine, one in zip(returned, own, results)
        ]
        return partitioned.values, mixed

    def _claim(self, path: str, node: fx.Node, shards: list[Tensor], at: At) -> None:
        """Compare the shards of a node with the value that it claims."""
        name, spec = node.meta["value"], node.meta["spec"]
        turn = self.seen.get(path, 0)
        self.seen[path] = turn + 1
        values, by_rows = [*self.truth.get(name, {}).values()], self.truth.get(name, {})
        if name in self.native or _is_blank(node):
            return
        if at:  # stages are at microbatches of their own; a sum over them is none yet
            of_ranks = {r: by_rows.get((m,)) for r, m in at.items()} if not spec.pending else {}
        else:
            value = values[turn] if turn < len(values) else None
            of_ranks = dict.fromkeys(range(len(shards)), value)
        truths = {rank: value for rank, value in of_ranks.items() if isinstance(value, Tensor)}
        for value in {id(v): v for v in truths.values()}.values():
            ranks = [rank for rank, other in truths.items() if other is value]
            is_judged = self._compare(node.name, node, shards, spec, value, ranks=ranks)
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

        node: that has the claim, or None for result number `result`.
        """
        tolerance = self._tolerance(truth)
        alone = len(shards) == 1 and not spec.sharding_axes
        pairs = [(0, shards[0], truth)] if alone else compared(shards, spec, self.plan.mesh, truth)
        for rank, mine, one in pairs:
            if ranks is not None and rank not in ranks:
                continue
            if mine.shape != one.shape or not torch.allclose(
                mine, one.to(mine.dtype), rtol=0, atol=tolerance, equal_nan=True
            ):
                claim = f"is result {result}" if node is None else f"is %{_value_of(node)}"
                raise self._fault(name, node, f"{claim}, laid out as '{spec}'", rank, mine, one)
        return not truth.is_floating_point() or bool(torch.isfinite(truth).any())

    def _tolerance(self, truth: Tensor) -> float:
        """Return the most that sums in another order differ by, generously."""
        if not (truth.is_floating_point() or truth.is_complex()) or not truth.numel():
            return 0.0
        part = 1e-8 if self.wide else 64 * torch.finfo(truth.dtype).eps
        finite = truth[torch.isfinite(truth)].abs()
        return part * max(float(finite.max()), 1e-3) if finite.numel() else 0.0

    def _fault(
        self,
        name: str,
        node: fx.Node | None,
        claim: str,
        rank: int,
        mine: Tensor,
        one: Tensor,
    ) -> ShardingError:
        where = ", ".join(f"{a}={c}" for a, c in self.plan.mesh.coordinates(rank).items())
        if mine.shape != one.shape:
            found = f"the shape {list(mine.shape)}, one device has {list(one.shape)}"
        else:
            differing = ~torch.isclose(
                mine, one.to(mine.dtype), rtol=0, atol=self._tolerance(one), equal_nan=True
            )
            at = tuple(differing.nonzero()[0].tolist())
            found = f"{mine[at].item()} at {list(at)} of its shard, one device has {one[at].item()}"
        return ShardingError(
            f"'%{name}' is not the value of one device: device {where} has {found}",
            where=None if node is None else node.meta.get("source"),
            why=f"the plan says that it {claim}",
            fix=_REPORT,
        )


def _drawn(captured: fx.Graph, names: Mapping[str, str], values: Values) -> Values:
    """Return the draws of the captured program: the numbers that the partitioned one has drawn.

    names: of values in the partitioned graph. A draw that is drawn again has the same numbers.
    """
    found, again = Values(), dict[tuple[int, object], Any]()
    for node in captured.nodes:
        draw = node.args[0] if node.target is operator.getitem else node
        if isinstance(draw, fx.Node) and draws(draw.target):
            key = draw.meta.get("draw", -1), node.args[1] if draw is not node else None
            mine = values.get(names.get(node.name, ""), again.get(key) if key[0] >= 0 else None)
            if mine is not None:
                found[node.name] = again.setdefault(key, mine)
    return found


def _unmatched(captured: fx.Graph, given: Values) -> set[str]:
    """Return values of the captured program that no other program need have.

    They depend on draws without a counterpart, have no content, or a gradient alone reads them.
    """
    found, inner = set[fx.Node](), set[str]()
    for node in captured.nodes:
        if node.name not in given and (
            draws(node.target)
            and not _gives_parts(node, given)
            or found & set(node.all_input_nodes)
        ):
            found.add(node)
        if _is_place_of_maximum(node) or _is_blank(node):
            inner.add(node.name)
    return {node.name for node in found} | inner


def _is_place_of_maximum(node: fx.Node) -> bool:
    """Return whether a node has the places of a pool's maxima, for its gradient alone.

    A pool that runs dimension by dimension counts them within its last one.
    """
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    names = [getattr(n.target, "__name__", "") for n in (node.args[0], *node.users)]
    return "pool" in names[0] and all("backward" in name for name in names[1:])


def _gives_parts(node: fx.Node, given: Values) -> bool:
    """Return whether a draw is given part by part."""
    parts = [u for u in node.users if u.target is operator.getitem]
    return bool(parts) and all(part.name in given for part in parts)


def _value_of(node: fx.Node) -> str:
    """Return the value that a node claims to be, by its name in the plan or in the program."""
    return str(node.meta.get("value", node.meta.get("captured", node.name)))


def _check_dtypes(plan: Plan) -> None:
    """Raise ShardingError for a value of another dtype than the plan's: trials have wide ones."""
    allowed = {
        node.name: {node.meta["val"].dtype, node.meta.get("computed", node.meta["val"].dtype)}
        for node in plan.sharded.nodes
        if isinstance(node.meta.get("val"), Tensor)
    }

    def claim(path: str, node: fx.Node, shards: list[Tensor], at: At) -> None:
        known = allowed.get(node.meta["value"], {shards[0].dtype})
        if shards[0].dtype not in known:
            raise _other_dtype(node, shards[0].dtype, known)

    inputs = Numbers(plan.captured, 1, positive=True, most=1).tensors()
    shards = [cut(t, spec, plan.mesh) for t, spec in zip(inputs, plan.input_layouts)]
    graph = Rewritten(wide=False).graph(plan.program_graph)
    program = fx.GraphModule(_constants(plan, wide=False), graph)
    devices = Devices(program, plan.mesh, claim)
    sizes = plan.sizes_of_run([tuple(t.shape) for t in inputs])
    try:
        devices.run_devices(shards, plan.size_inputs(sizes))
    except DeviceError as error:
        raise _failed(error.node, error) from error
    for graph in _programs(plan.program_graph):
        for node in graph.nodes:
            _check_rounding(node)


def _programs(graph: fx.Graph) -> Iterator[fx.Graph]:
    """Yield a program, and those of the bodies of its loops."""
    yield graph
    for _, call in loop_calls(graph):
        for body in call.bodies:
            yield from _programs(body.graph)


def _check_rounding(node: fx.Node) -> None:
    """Raise ShardingError if a value is rounded to a narrow dtype and back, which no value says."""
    back, cast = node, aten._to_copy.default
    narrow = back.args[0] if back.target is cast else None
    if not isinstance(narrow, fx.Node) or narrow.target is not cast or "value" in narrow.meta:
        return
    wide, small = back.kwargs.get("dtype"), narrow.kwargs.get("dtype")
    if wide is None or small is None or not (wide.is_floating_point and small.is_floating_point):
        return
    if torch.finfo(small).eps > torch.finfo(wide).eps:
        raise _other_dtype(narrow, small, {wide})


def _other_dtype(node: fx.Node, dtype: torch.dtype, known: set[torch.dtype]) -> ShardingError:
    names = " or ".join(sorted(map(str, known)))
    return ShardingError(
        f"'%{node}' is {dtype}, its value is {names}",
        where=node.meta.get("source"),
        why=f"the plan says that it is %{_value_of(node)}",
        fix=_REPORT,
    )


def _no_program(error: Exception) -> ShardingError:
    return ShardingError(
        f"the partitioned program fails on one device: {str(error).partition(chr(10))[0]}",
        why="the captured one does not",
        fix=_REPORT,
    )


def _failed(node: fx.Node, error: Exception) -> ShardingError:
    return ShardingError(
        f"'%{node}' fails on the devices: {str(error).partition(chr(10))[0]}",
        where=node.meta.get("source"),
        why="one device computes it",
        fix=_REPORT,
    )


def _native(graph: fx.Graph) -> set[str]:
    """Return the values that depend on numbers which each device draws by itself."""
    found = set[fx.Node]()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        names = [a.name for a in schema.arguments] if schema is not None else []
        given = {**dict(zip(names, node.args)), **node.kwargs}
        if given.get("native") is True or found & set(node.all_input_nodes):
            found.add(node)
    return {node.name for node in found}


def _without_content(plan: Plan) -> set[str]:
    """Return values of the partitioned graph that are memory without content."""
    blank = {node.name for node in plan.captured.graph.nodes if _is_blank(node)}
    return {n.name for n in plan.sharded.nodes if _is_blank(n) or n.meta.get("captured") in blank}


def _is_blank(node: fx.Node) -> bool:
    """Return whether a node is memory without content."""
    return "empty" in getattr(node.target, "__name__", "")


def _constants(plan: Plan, wide: bool) -> torch.nn.Module:
    """Return the constants of a plan's graphs."""
    constants = torch.nn.Module()
    graphs = plan.captured.graph, plan.sharded, plan.program_graph
    for node in (n for graph in graphs for n in graph.find_nodes(op="get_attr")):
        value = plan.captured.constants.get_buffer(str(node.target)).cpu()
        constants.register_buffer(str(node.target), widened(value) if wide else value)
    return constants
