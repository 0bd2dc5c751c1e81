"""What an operation can do on a mesh: which axes shard which of its factors, and what that costs a
device.

An operation's strategy is an assignment of axes to its factors, and of axes to operands whose
pending sum it passes on. Those worth a look follow from the layouts of the values neighborhood it: an
axis that shards a factor in one of them may do so here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...mesh import Mesh
from ...rules import Rule
from ...shard_spec import Axes, ShardSpec
from ..ir import Op
from ..propagate.factors import (
    Crowded,
    assemble,
    is_far,
    is_roomy,
    operand_layout,
    project,
    result_pending,
)

FLOPS_PER_BYTE = (
    10.0  # arithmetic worth one byte on the wire: high, so that arithmetic is always divided
)
WASTE_PER_BYTE = (
    500.0  # of what uneven parts compute on padding, as fast devices do: not worth another layout
)
TRAFFIC_PER_BYTE = 128.0  # bytes of memory traffic worth one byte on the wire


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """What an operation needs of its operands and makes of its results. One object for equal ones
    of like operations.
    """

    assignment: tuple[tuple[str, Axes], ...]
    operands: tuple[ShardSpec, ...]
    results: tuple[ShardSpec, ...]
    work: float  # of one device, in bytes on the wire
    pending: float = 0.0  # bytes of its results that are left pending


@dataclass(frozen=True, slots=True, eq=False)
class OperandLayouts:
    """The layouts of an operand that exist (the first: as it is made), how many operations share a
    new one, and the axes over which it might be left pending as well. One object for equal ones.
    """

    layouts: tuple[ShardSpec, ...]
    sharers: int
    deferrable: Axes = ()


@dataclass(frozen=True, slots=True, eq=False)
class Neighborhood:
    """Where the operands of an operation are, and the layouts in which its results are used. One
    object for equal ones.

    first: before anything is chosen, as the layouts are propagated. of_inputs: all operands are
    inputs of the program.
    """

    operands: tuple[OperandLayouts, ...]
    required: tuple[tuple[ShardSpec, ...], ...]
    first: bool
    only_inputs: bool


class Strategies:
    """Finds and remembers the strategies of operations. crowded: as in layout."""

    def __init__(self, mesh: Mesh, crowded: Crowded):
        self.mesh, self.crowded = mesh, crowded
        self.cached_strategies: dict[tuple, Strategy | None] = {}  # by operation and assignment
        self.lists: dict[tuple, list[Strategy]] = {}  # by operation and what each axis may shard
        self.option_cache: dict[
            tuple, dict[str, tuple]
        ] = {}  # by operation and what is neighborhood it

    def candidates(
        self, op: Op, neighborhood: Neighborhood, forced: dict[str, tuple] | None = None
    ) -> list[Strategy]:
        """Strategies worth a look. forced: for some axes what alone they may shard."""
        mark = marked(op)
        if mark is not None:
            return [Strategy((), (mark,), (mark,), 0.0)]
        options = self.options(op, neighborhood) | (forced or {})
        key = (op.key, tuple(options.items()))
        if key not in self.lists:
            strategies = (
                self._cached_strategy(op, *choice) for choice in self._choices(op.rule, options)
            )
            self.lists[key] = list(dict.fromkeys(s for s in strategies if s is not None))
        return [s for s in self.lists[key] if _has_terms(s, neighborhood.operands)]

    def options(self, op: Op, neighborhood: Neighborhood) -> dict[str, tuple]:
        """For each axis the factors it may shard, the operand groups it may pass through
        (integers), and None.
        """
        key = (op.key, neighborhood)
        if key not in self.option_cache:
            self.option_cache[key] = self._options(op, neighborhood)
        return self.option_cache[key]

    def _options(self, op: Op, neighborhood: Neighborhood) -> dict[str, tuple]:
        rule, available, required = op.rule, neighborhood.operands, neighborhood.required
        options: dict[str, dict] = {name: {None: None} for name, size in self.mesh.axes if size > 1}
        tensors = [
            *zip(rule.operands, (a.layouts for a in available)),
            *zip(rule.results, required),
        ]
        for dims, specs in tensors:
            for spec in specs:
                for factor, axes in project(dims, spec, rule.sizes, self.mesh).items():
                    for axis in axes:
                        if factor not in rule.whole and not (
                            neighborhood.first and is_far(op, factor, axes, self.mesh)
                        ):
                            options[axis][factor] = None
                        if (
                            factor in rule.whole | rule.windowed and rule.known
                        ):  # it has to leave, or had better:
                            options[axis].update(
                                dict.fromkeys(
                                    f
                                    for f in rule.sizes
                                    if f not in rule.whole | rule.special | {factor}
                                )
                            )
                for axis in spec.pending:
                    for g in range(len(rule.linear)):
                        options[axis][g] = None
        if (
            rule.contraction
        ):  # where tensors disagree, or of inputs a sum is made, a third way may be best
            disputed = set() if neighborhood.first else self._disputed_axes(rule, available)
            for axis, targets in options.items():
                if (
                    axis in disputed
                    or sum(isinstance(target, str) for target in targets) > 1
                    or (neighborhood.only_inputs and rule.reduce.keys() & targets.keys())
                ):
                    targets.update(dict.fromkeys(f for f in rule.sizes if f not in rule.whole))
        return {axis: tuple(targets) for axis, targets in options.items() if len(targets) > 1}

    def _disputed_axes(self, rule: Rule, available) -> set[str]:
        """Whole axes that divide what is summed over in one operand, as it is made, and in another
        one do not.
        """
        sides = [
            {
                axis
                for factor, axes in project(dims, have.layouts[0], rule.sizes, self.mesh).items()
                if factor in rule.reduce
                for axis in axes
            }
            for dims, have in zip(rule.operands, available)
        ]
        return {
            axis
            for axis in set.union(*sides) - set.intersection(*sides)
            if self.mesh.whole((axis,))
        }

    def _choices(
        self, rule: Rule, options: dict[str, tuple]
    ) -> Iterator[tuple[dict[str, Axes], dict[str, int]]]:
        """All assignments; where several axes shard one factor, every order of them."""
        names = list(options)
        for targets in itertools.product(*options.values()):
            factors: dict[str, Axes] = {}
            through = {a: t for a, t in zip(names, targets) if isinstance(t, int)}
            for axis, target in zip(names, targets):
                if isinstance(target, str):
                    factors[target] = factors.get(target, ()) + (axis,)
            if not all(
                is_roomy(rule.sizes[f], axes, self.mesh, self.crowded)
                for f, axes in factors.items()
            ):
                continue
            orders = [itertools.permutations(axes) for axes in factors.values()]
            for ordered in itertools.product(*orders):
                yield dict(zip(factors, ordered)), through

    def _cached_strategy(
        self, op: Op, assignment: dict[str, Axes], through: dict[str, int]
    ) -> Strategy | None:
        key = (op.key, *assignment.items(), *through.items())
        if key not in self.cached_strategies:
            self.cached_strategies[key] = self._strategy(op, assignment, through)
        return self.cached_strategies[key]

    def _strategy(
        self, op: Op, assignment: dict[str, Axes], through: dict[str, int]
    ) -> Strategy | None:
        """None if no layouts express it. through: for axes the group of operands whose pending sum
        passes on.
        """
        rule = op.rule
        operands, results = [], []
        for i in range(len(rule.operands)):
            spec = operand_layout(
                rule, i, tuple(op.operands[i].meta["val"].shape), assignment, self.mesh
            )
            pending = tuple(
                a for a in self.mesh.names if a in through and i in rule.linear[through[a]]
            )
            if spec is None:
                return None
            operands.append(spec.with_pending(pending))
        for dims in rule.results:
            axes = assemble(dims, assignment, rule.sizes, self.mesh)
            reduced, kind = result_pending(rule, dims, assignment)
            if axes is None or through and reduced and kind != "sum":
                return None
            pending = tuple(a for a in self.mesh.names if a in reduced or a in through)
            results.append(ShardSpec(axes, (), pending, kind if reduced else "sum"))
        pending = sum(
            local_bytes(v.meta["val"], s, self.mesh)
            for v, s in zip(op.results, results)
            if s.pending and v is not None
        )
        return Strategy(
            tuple(assignment.items()),
            tuple(operands),
            tuple(results),
            self._work(op, assignment, operands, results),
            pending,
        )

    def _work(self, op: Op, assignment, operands, results) -> float:
        rule, work = op.rule, 0.0
        if rule.contraction:
            counts = {f: self.mesh.count(assignment.get(f, ())) for f in rule.sizes}
            even = 2 * math.prod(rule.sizes.values()) / math.prod(counts.values())
            padded = 2 * math.prod(-(-n // counts[f]) for f, n in rule.sizes.items())
            work = even / FLOPS_PER_BYTE + (padded - even) / WASTE_PER_BYTE
        for value, spec in itertools.chain(zip(op.operands, operands), zip(op.results, results)):
            if value is not None:
                work += local_bytes(value.meta["val"], spec, self.mesh) / TRAFFIC_PER_BYTE
        return work


def _has_terms(strategy: Strategy, available: Sequence[OperandLayouts]) -> bool:
    """Whether the sums that operands are to be terms of are pending, or can be."""
    return all(
        have.layouts[0].reduction == "sum"
        and all(a in have.layouts[0].pending or a in have.deferrable for a in need.pending)
        for need, have in zip(strategy.operands, available)
        if need.pending
    )


def marked(op: Op) -> ShardSpec | None:
    """The layout that a mark node asks for, its open dimensions as propagated."""
    spec = op.node.meta.get("mark")
    return spec.closed() if spec is not None else None


def local_bytes(val: Tensor, spec: ShardSpec, mesh: Mesh) -> float:
    """Of one device's part."""
    return math.prod(spec.local_shape(val.shape, mesh)) * val.element_size()
