"""The strategies of an operation: which axes shard which of its factors, and the work of a device.

    mm(%x, %w): mk,kn->mn       {m: data, k: model}       result [data, _] sum@model

A strategy assigns axes to factors. It also assigns axes to operands whose pending sum it passes on.
Strategies worth a try follow from the layouts of the neighborhood: an axis that shards a factor in
one of these may do so here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ...mesh import Mesh
from ...rules import FactorRule
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
from .cost_constants import CostConstants
from .cost_model import local_bytes, work
from .neighborhood import Neighborhood, OperandLayouts, Strategy


class Strategies:
    """Lists and caches the strategies of operations. crowded: see factors.py."""

    def __init__(self, mesh: Mesh, crowded: Crowded, constants: CostConstants) -> None:
        self.mesh, self.crowded, self.constants = mesh, crowded, constants
        self.cached_strategies: dict[tuple, Strategy | None] = {}  # by operation and assignment
        self.lists: dict[tuple, list[Strategy]] = {}  # by operation and what each axis may shard
        self.option_cache: dict[tuple, dict[str, tuple]] = {}  # by operation and neighborhood

    def candidates(
        self, op: Op, neighborhood: Neighborhood, forced: dict[str, tuple] | None = None
    ) -> list[Strategy]:
        """Return the strategies worth a try. forced: axis -> the only factors it may shard.

        So are those that priorities have pinned, unless no layout does.
        """
        mark = marked(op)
        if mark is not None:
            return [Strategy((), (mark,), (mark,), 0.0)]
        pinned = dict(op.node.meta.get("pinned", ()))
        options = self.options(op, neighborhood) | (forced or {})
        rows = op.rule.sizes if neighborhood.first else _rows(op)
        key = (op.key, neighborhood.first, tuple(options.items()))
        if key not in self.lists:
            self.lists[key] = self._strategies(op, rows, options | pinned) or (
                self._strategies(op, rows, options)
            )
        return [s for s in self.lists[key] if _has_terms(s, neighborhood.operands)]

    def _strategies(
        self, op: Op, rows: Mapping[str, int], options: dict[str, tuple]
    ) -> list[Strategy]:
        """Return the strategies in which each axis does one of its options."""
        strategies = (self._cached_strategy(op, *choice) for choice in self._choices(rows, options))
        return list(dict.fromkeys(s for s in strategies if s is not None))

    def options(self, op: Op, neighborhood: Neighborhood) -> dict[str, tuple]:
        """Return what each axis may do: shard a factor, pass through operands, or nothing.

        A string is a factor, an integer a group of linear operands, None nothing.
        """
        key = (op.key, neighborhood)
        if key not in self.option_cache:
            self.option_cache[key] = self._options(op, neighborhood)
        return self.option_cache[key]

    def _options(self, op: Op, neighborhood: Neighborhood) -> dict[str, tuple]:
        """Return the options of `options`, not cached."""
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
                        if factor not in rule.replicated and not (
                            neighborhood.first and is_far(op, factor, axes, self.mesh)
                        ):
                            options[axis][factor] = None
                        # The axis has to leave this factor, or had better: any other may do.
                        if factor in rule.replicated | rule.windowed and rule.described:
                            options[axis].update(
                                dict.fromkeys(
                                    f
                                    for f in rule.sizes
                                    if f not in rule.replicated | rule.special | {factor}
                                )
                            )
                for axis in spec.pending:
                    for g in range(len(rule.linear)):
                        options[axis][g] = None
        if rule.contraction:
            # Where tensors disagree, or inputs are summed over, a third factor may be best.
            disputed = set() if neighborhood.first else self._disputed_axes(rule, available)
            for axis, targets in options.items():
                if (
                    axis in disputed
                    or sum(isinstance(target, str) for target in targets) > 1
                    or (neighborhood.only_inputs and rule.reduce.keys() & targets.keys())
                ):
                    targets.update(dict.fromkeys(f for f in rule.sizes if f not in rule.replicated))
        return {axis: tuple(targets) for axis, targets in options.items() if len(targets) > 1}

    def _disputed_axes(self, rule: FactorRule, available: Sequence[OperandLayouts]) -> set[str]:
        """Return the whole axes that shard a summed factor in one operand and not in another."""
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
        self, rows: Mapping[str, int], options: dict[str, tuple]
    ) -> Iterator[tuple[dict[str, Axes], dict[str, int]]]:
        """Yield all assignments; if several axes shard one factor, every order of them.

        rows: how many devices may share a factor.
        """
        names = list(options)
        for targets in itertools.product(*options.values()):
            factors: dict[str, Axes] = {}
            through = {a: t for a, t in zip(names, targets) if isinstance(t, int)}
            for axis, target in zip(names, targets):
                if isinstance(target, str):
                    factors[target] = factors.get(target, ()) + (axis,)
            if not all(
                is_roomy(rows[f], axes, self.mesh, self.crowded) for f, axes in factors.items()
            ):
                continue
            orders = [itertools.permutations(axes) for axes in factors.values()]
            for ordered in itertools.product(*orders):
                yield dict(zip(factors, ordered)), through

    def _cached_strategy(
        self, op: Op, assignment: dict[str, Axes], through: dict[str, int]
    ) -> Strategy | None:
        """Return `_strategy`, cached by operation and assignment."""
        key = (op.key, *assignment.items(), *through.items())
        if key not in self.cached_strategies:
            self.cached_strategies[key] = self._strategy(op, assignment, through)
        return self.cached_strategies[key]

    def _strategy(
        self, op: Op, assignment: dict[str, Axes], through: dict[str, int]
    ) -> Strategy | None:
        """Return the strategy of an assignment; None if no layouts express it.

        through: axis -> group of operands whose pending sum the operation passes on.
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
        pending = op.runs * sum(
            local_bytes(v.meta["val"], s, self.mesh)
            for v, s in zip(op.results, results)
            if s.pending and v is not None
        )
        return Strategy(
            tuple(assignment.items()),
            tuple(operands),
            tuple(results),
            work(op, assignment, operands, results, self.mesh, self.constants),
            pending,
        )


def _rows(op: Op) -> dict[str, int]:
    """Return the rows of each factor; those of the operand where its windows reach into more.

    A 2x2 pool of 15 rows on 8 devices has 7, each inside of a shard: the last device has none.
    """
    rows, rule = dict(op.rule.sizes), op.rule
    for operand, d in rule.halo:
        (factor,) = rule.operands[operand][d]
        rows[factor] = max(rows[factor], op.operands[operand].meta["val"].shape[d])
    return rows


def _has_terms(strategy: Strategy, available: Sequence[OperandLayouts]) -> bool:
    """Return whether every operand that has to be pending is, or can be left so."""
    return all(
        have.layouts[0].reduction == "sum"
        and all(a in have.layouts[0].pending or a in have.deferrable for a in need.pending)
        for need, have in zip(strategy.operands, available)
        if need.pending
    )


def marked(op: Op) -> ShardSpec | None:
    """Return the layout that a mark requests, with open dimensions as propagated."""
    spec = op.node.meta.get("mark")
    return spec.closed() if spec is not None else None
