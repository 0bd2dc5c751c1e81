"""Propagate marked layouts to every value, forwards and backwards over the whole graph.

before   layouts on some values             %x : f32[8@data, 64]   %w : f32[64, 256@model]
after    meta["spec"] on every value        %mm : f32[8@data, 256@model]
needs    only operations whose rules are known to `Rules`
source   GSPMD (arXiv 2105.04663, section 3.5) for the stages; Shardy's factors for the
         propagation through one operation

In each operation, and for each factor, one tensor's axes extend to the others. A value only ever
gets more axes. There are three stages, each until nothing changes. The first propagates through
elementwise operations, the second along factors through any operation. The last adds factors that
are summed over, and small operands that are broadcast. All three run once for each mark priority,
the strongest first (layouts.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import fx

from ...compat.fx_nodes import calls_any
from ...layout.mesh import Mesh
from ...rules import FactorRule, factors, make_rule
from ...rules.custom_ops.loops import ENTRIES, axes_apart, delivered_alike, nests
from ...rules.notation import Instead
from ...shard_spec import Axes, ShardSpec
from ..ir import Op, Rules, planned_shape, values
from .factors import assemble, crowded, is_far, is_roomy, project
from .layouts import PINNED, Layouts, Rounds, Seed

ELEMENTWISE, PASSING, ALL = range(3)  # stages


def propagate_layouts(
    graph: fx.Graph,
    mesh: Mesh,
    seeds: Sequence[Seed],
    ties: Iterable[tuple[fx.Node, fx.Node, str]] = (),
    rules: Rules | None = None,
    counts: Counter[str] | None = None,
    stored: Mapping[fx.Node, frozenset[str]] = MappingProxyType({}),
) -> Layouts:
    """Return all values' layouts, and write them to meta["spec"].

    seeds: (value, layout, why) for marks, inputs and outputs. ties: (value, other value, why) that
    should have one layout, such as a parameter and its gradient. counts: gets the work, where this
    run did more than those before. stored: see Rounds.
    """
    rules = rules or Rules()
    nodes = list(graph.nodes)
    for node in nodes:
        # Of an earlier propagation: pins follow from the marks of this one.
        node.meta.pop(PINNED, None)
    all_values = list(values(nodes))
    layouts = Layouts(
        mesh,
        {v: ShardSpec.replicated(v.meta["val"].dim()) for v in all_values},
        {v: (False,) * v.meta["val"].dim() for v in all_values},
    )
    for value, spec, why in seeds:
        layouts.seed(value, spec, why)
    ops = [op for op in rules.ops(graph) if op.rule.described and op.rule.sizes]
    # Ties are operations like others: an axis goes from a parameter to its gradient and back.
    ops += [_tie(a, b, why) for a, b, why in ties]
    propagation, rounds = _Propagation(layouts, ops), Rounds(layouts, seeds, stored)
    for _ in rounds:
        # Elementwise operations first: they lose nothing, so a layout goes far before a conflict
        # decides.
        for stage in (ELEMENTWISE, PASSING, ALL):
            propagation.run(stage)
    nest = nests(graph) if calls_any(graph, ENTRIES) else {}
    apart = axes_apart(nest)
    # Stages send these values to each other in any round, so one layout has to fit all.
    held = {node: group[0] for group in delivered_alike(nest) for node in group}
    for op in ops:
        # Ties have no key, and no operation that the partitioner could pin.
        if op.key is None:
            continue
        loops = nest.get(op.node, ())
        axes = {apart[loops[:n]] for n in range(1, len(loops) + 1) if loops[:n] in apart}
        pinned = (*rounds.pinned(op, mesh), *(rounds.staying(op, mesh, axes) if axes else ()))
        if op.rule.instead is not None and op.rule.instead.stays:
            pinned = pinned or _staying(op, op.rule.instead, layouts)
        if op.node in held:
            pinned = rounds.as_laid_out(op, mesh, held[op.node])
        if pinned:
            op.node.meta[PINNED] = pinned
    for value in all_values:
        value.meta["spec"] = layouts.spec[value]
    if counts is not None:  # A pass that changes the program has it run again.
        counts |= propagation.counts
    return layouts


def _staying(op: Op, instead: Instead, layouts: Layouts) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (axis, factor) for a factor that keeps its axes unless another one sends less."""
    along = [
        project(dims, layouts.spec[value], op.rule.sizes, layouts.mesh).get(instead.factor, ())
        for value, dims in op.tensors
    ]
    axes = next(filter(None, along), ())
    count = layouts.mesh.count(axes)
    stays = instead.sent(count, count) >= instead.sent(count, 1)
    return tuple((axis, (instead.factor,)) for axis in axes) if stays else ()


def _tie(a: fx.Node, b: fx.Node, why: str) -> Op:
    """Return an operation that passes one value's layout to another, and back."""
    shape = a.meta["val"].shape
    names = factors("d", len(shape))
    rule = make_rule([names], [names], dict(zip(names, shape)), text=why)
    return Op(a, rule, (a,), (b,), None)


class _Extension(NamedTuple):
    """Axes that one tensor in an operation gets because another one has them.

    tensor, source: indices among the operands and the results used.
    """

    tensor: int
    spec: ShardSpec
    axes: Axes
    source: int


class _Propagation:
    """A graph's operations, with the layouts that they extend."""

    def __init__(self, layouts: Layouts, ops: list[Op]) -> None:
        self.layouts, self.ops, self.mesh = layouts, ops, layouts.mesh
        self.counts: Counter[str] = Counter()
        self.values = [(*op.operands, *(v for v in op.results if v is not None)) for op in ops]
        numbers: dict[tuple, int] = {}
        self.op_kinds = [numbers.setdefault(_op_kind(op), len(numbers)) for op in ops]
        # by kind of operation, stage and layouts
        self.extension_cache: dict[tuple, list[_Extension]] = {}
        self.crowded = crowded(
            ((v.meta["val"].shape, spec) for v, spec in layouts.spec.items()), layouts.mesh
        )
        self.neighbors: dict[fx.Node, list[int]] = {}
        for i, op in enumerate(ops):
            for value in {*op.operands, *op.results} - {None}:
                self.neighbors.setdefault(value, []).append(i)

    def run(self, stage: int) -> None:
        """Sweep forwards and backwards over operations with changed neighbors, until none is."""
        dirty = set(range(len(self.ops)))
        forward = True
        # Forwards and backwards in turn: in one sweep a layout crosses the whole graph.
        while dirty:
            self.counts["propagation_sweeps"] += 1
            order, later = sorted(dirty, reverse=not forward), set()
            todo = set(order)
            for i in self._sweep(order, todo, forward):
                later.update(self._worklist_after(i, stage, todo, forward))
            dirty, forward = later, not forward

    def _sweep(self, order: list[int], todo: set[int], forward: bool) -> Iterable[int]:
        """Yield the operations of `todo` in order, also those that are added on the way."""
        indices = range(order[0], len(self.ops)) if forward else range(order[0], -1, -1)
        for i in indices:
            if i in todo:
                todo.discard(i)
                yield i

    def _worklist_after(self, i: int, stage: int, todo: set[int], forward: bool) -> Iterable[int]:
        """Propagate through one operation, and yield the operations to visit in the next sweep.

        Operations ahead are added to `todo`: this sweep visits them.
        """
        for value in self._step(i, stage):
            for j in self.neighbors[value]:
                if j != i and ((j > i) == forward):
                    todo.add(j)
                elif j != i:
                    yield j

    def _step(self, i: int, stage: int) -> list[fx.Node]:
        """Propagate through one operation; return the values that get more axes.

        Like operations between like layouts share one computation.
        """
        op, values, spec, fixed = self.ops[i], self.values[i], self.layouts.spec, self.layouts.fixed
        if (
            stage == ELEMENTWISE
            and (op.rule.reduce or op.rule.contraction)
            or not any(spec[v].sharding_axes for v in values)
        ):
            return []
        key = (
            self.op_kinds[i],
            stage,
            *map(spec.__getitem__, values),
            *map(fixed.__getitem__, values),
            *(map(self.layouts.reserved.get, values) if self.layouts.reserved else ()),
        )
        if key not in self.extension_cache:
            self.counts["propagation_steps"] += 1
            self.extension_cache[key] = list(self._extensions(op, stage))
        for extension in self.extension_cache[key]:
            value = values[extension.tensor]
            spec[value] = extension.spec
            for axis in extension.axes:
                self.layouts.origin.setdefault(
                    (value, axis), (values[extension.source], f"{op.node.name}: {op.rule}")
                )
        self.counts["propagation_updates"] += len(self.extension_cache[key])
        return [values[extension.tensor] for extension in self.extension_cache[key]]

    def _extensions(self, op: Op, stage: int) -> Iterator[_Extension]:
        """Extend the layouts on an operation's tensors, and yield the axes that each one gets."""
        rule = op.rule
        tensors = op.tensors
        assignments = [
            project(dims, self.layouts.spec[v], rule.sizes, self.mesh) for v, dims in tensors
        ]
        for factor in self._factor_order(rule, assignments, tensors):
            if (
                factor in rule.replicated
                and not rule.splits(factor)
                or stage < ALL
                and (factor in rule.reduce or factor in rule.special)
                or (stage == ELEMENTWISE and factor in rule.windowed)
            ):
                continue
            longest, source = self._longest(rule, factor, assignments, tensors, stage)
            if stage < ALL and is_far(op, factor, longest, self.mesh):
                continue
            for t, (value, _) in enumerate(tensors):
                if self._extend(rule, factor, longest, t, tensors, assignments):
                    yield _Extension(t, self.layouts.spec[value], longest, source)

    def _factor_order(
        self, rule: FactorRule, assignments: list[dict[str, Axes]], tensors: list
    ) -> list[str]:
        """Return the sharded factors, those in the largest tensors first."""
        weight: dict[str, int] = {}
        for (value, _), axes in zip(tensors, assignments):
            for factor in axes:
                weight[factor] = max(weight.get(factor, 0), math.prod(value.meta["val"].shape))
        return sorted(weight, key=lambda f: -weight[f])

    def _longest(
        self,
        rule: FactorRule,
        factor: str,
        assignments: list[dict[str, Axes]],
        tensors: list,
        stage: int,
    ) -> tuple[Axes, int]:
        """Return the longest list of axes that a tensor has for a factor, and its index.

        Small broadcast operands count in the last stage only.
        """
        best: Axes = ()
        source = 0
        for i, axes in enumerate(assignments):
            if (
                stage < ALL
                and not rule.contraction
                and i < len(rule.operands)
                and rule.results
                and _broadcasts(rule, i)
            ):
                continue
            # The first of equals wins: operands stand before results.
            if len(axes.get(factor, ())) > len(best):
                best, source = axes[factor], i
        return best, source

    def _extend(
        self,
        rule: FactorRule,
        factor: str,
        longest: Axes,
        t: int,
        tensors: list,
        assignments: list[dict[str, Axes]],
    ) -> bool:
        """Give tensor t the axes in `longest` that it lacks and can have; return whether any."""
        value, dims = tensors[t]
        have = assignments[t].get(factor, ())
        dim = next((d for d, names in enumerate(dims) if factor in names), None)
        if (
            dim is None
            or have == longest
            # Only a longer list with the same beginning refines a layout; others are conflicts.
            or have != longest[: len(have)]
            or self.layouts.fixed[value][dim]
        ):
            return False
        spec = self.layouts.spec[value]
        used = {*spec.sharding_axes, *self.layouts.reserved.get(value, ())}
        size = planned_shape(value)[dim] if len(dims[dim]) == 1 else rule.sizes[factor]
        accepted = None
        # As many axes as fit: the first one that does not also blocks those behind it.
        for end in range(len(have) + 1, len(longest) + 1):
            axes = longest[:end]
            if longest[end - 1] in used or not is_roomy(size, axes, self.mesh, self.crowded):
                break
            new = assemble(dims, {**assignments[t], factor: axes}, rule.sizes, self.mesh)
            # Factors share dimensions: no other dimension may change by the way.
            if new is None or any(
                a != b for d, (a, b) in enumerate(zip(new, spec.dims)) if d != dim
            ):
                break
            accepted = (axes, new)
        if accepted is None:
            return False
        assignments[t][factor] = accepted[0]
        self.layouts.spec[value] = ShardSpec(accepted[1])
        return True


def _op_kind(op: Op) -> tuple:
    """Return a key that is equal for operations which propagate alike.

    They have one rule, use one value in the same places, and have the same results used.
    """
    values = (*op.operands, *op.results)
    return id(op.rule), *(None if v is None else values.index(v) for v in values)


def _broadcasts(rule: FactorRule, operand: int) -> bool:
    """Return whether an operand lacks factors that a larger operand has, or (alone) the result."""
    own = {f for dim in rule.operands[operand] for f in dim}
    others = [
        {f for dim in dims for f in dim} for i, dims in enumerate(rule.operands) if i != operand
    ]
    if others:
        return any(own < other for other in others)
    return bool({f for dim in rule.results[0] for f in dim} - own)
