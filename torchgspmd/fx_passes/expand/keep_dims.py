"""Keep the parts of a flattened dimension as dimensions, where layouts need them.

before   %y : f32[16384, 64]         = reshape(%x)        %x: f32[8, 2048@seq, 64]
         %z : f32[16384, 64]         = relu(%y)
after    %z : f32[8, 2048@seq, 64]   = relu(%x)
needs    a propagated graph, rules
source   Shardy's reshape factors, and DTensor's strided shards, name such layouts; here a value
         has the dimensions that its layout needs

A device's rows of 2048 are no interval of 16384, so the flattened dimension has no layout for them.
Its parts are kept as far as operations compute row by row, each by its rule. An operation that
needs the flat order gets a reshape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.fx_nodes import add_node, copy_node, drop_unused, origin_of
from ...compat.operators import OPERATOR_ERRORS, aten
from ...compat.private_apis import OpOverload
from ...compat.private_apis import _pytree as pytree
from ...fx_passes.ir import ops_around
from ...layout.mesh import Mesh
from ...rules import Call, FlatCall, rewrite_of, rule_of
from ...rules.custom_ops.loops import LOOP_MARKS
from ...rules.ops.uneven_reshape import join_rows, split_rows
from ..ir import Op, Rules, tensors_of
from ..program import Program
from ..propagate.factors import project
from ..propagate.layouts import Layouts

Place = tuple[fx.Node, int]  # a value's dimension
Borders = frozenset[int]  # products of sizes, from the minor end: {2048} cuts 16384 into [8, 2048]
Seed = tuple[fx.Node, int, Borders]

_JOIN, _SPLIT = join_rows._opoverload, split_rows._opoverload  # split_fused makes them of reshapes
VIEWS = aten.reshape.default, _JOIN, _SPLIT


def keep_dims(p: Program) -> fx.Graph | None:
    """Return the graph with the parts of flattened dimensions; None if layouts need none."""
    if not (seeds := [*_blocked_dims(p)]):
        return None
    borders = _Spread([*p.rules.ops(p.graph)], p.layouts).from_seeds(seeds)
    return _Keeper(borders, p.rules).run(p.graph) if borders else None


def keeps_dims(p: Program) -> bool:
    """Return whether `keep_dims` has a reason to change the program."""
    return p.calls_any(VIEWS) and any(_blocked_dims(p))


def _blocked_dims(p: Program) -> Iterator[Seed]:
    """Yield flattened dimensions that cannot have the layout of their parts."""
    return (seed for op in p.rules.ops(p.graph) if is_view(op) for seed in _blocked(op, p.layouts))


def is_view(op: Op) -> bool:
    """Return whether an operation is a reshape: rows in their order, in other dimensions."""
    return isinstance(op.node.target, OpOverload) and op.node.target in VIEWS


def _blocked(op: Op, layouts: Layouts) -> Iterator[Seed]:
    """Yield a reshape's flattened dimensions that cannot have the layout of their parts."""
    (x,), (y,) = op.operands, op.results
    if y is None or op.node.meta.get("dynamic") or 0 in x.meta["val"].shape:
        return
    if op.node.target in (_JOIN, _SPLIT):
        (flat, apart), dim = ((y, x) if op.node.target is _JOIN else (x, y)), op.node.args[1]
        if layouts.spec[apart].dims[dim + 1]:  # type: ignore[operator]
            yield flat, dim, Borders({apart.meta["val"].shape[dim + 1]})  # type: ignore[misc]
        return
    sides = ((x, op.rule.operands[0]), (y, op.rule.results[0]))
    for (flat, dims), (apart, others) in (sides, sides[::-1]):
        wanted = project(others, layouts.spec[apart], op.rule.sizes, layouts.mesh)
        have = project(dims, layouts.spec[flat], op.rule.sizes, layouts.mesh)
        for d, factors in enumerate(dims):
            # Axes that it has all the same cut it into other blocks: rows change places at borders.
            own = layouts.spec[flat].dims[d]
            if len(factors) > 1 and any(
                _is_apart(factors[:i], f, wanted, op.rule.sizes, layouts.mesh)
                and wanted[f] != have.get(f)
                and not {*own}.issuperset(wanted[f])
                for i, f in enumerate(factors)
                if wanted.get(f)
            ):
                sizes = [op.rule.sizes[f] for f in factors]
                yield flat, d, frozenset(math.prod(sizes[i:]) for i in range(1, len(sizes)))


def _is_apart(majors: Sequence[str], factor: str, wanted: Any, sizes: Any, mesh: Mesh) -> bool:
    """Return whether shards of a factor are no interval of the dimension that it is flattened into.

    majors: the factors before it there.
    """
    rows_left = any(mesh.count(wanted.get(f, ())) != sizes[f] for f in majors)
    return rows_left or sizes[factor] % mesh.count(wanted[factor]) != 0


def keeps(op: Op, factor: str) -> bool:
    """Return whether an operation computes row by row along a factor, in any order of rows."""
    rule, node = op.rule, op.node
    if (
        not rule.described
        or not isinstance(node.target, (OpOverload, FlatCall))
        or node.target in LOOP_MARKS
        or any(node.meta.get(key) for key in ("mark", "dynamic", "order"))
        or any(factor in dim and len(dim) > 1 for t in (*rule.operands, *rule.results) for dim in t)
    ):
        return False
    by_place = rule.windowed | rule.replicated | rule.special
    return factor not in by_place or rewrite_of("keep", node.target) is not None


class _Spread:
    """Carries borders from flattened dimensions to all that are computed with these rows."""

    def __init__(self, ops: Sequence[Op], layouts: Layouts) -> None:
        self.layouts, self.borders = layouts, dict[Place, Borders]()
        self.around = ops_around(ops)

    def from_seeds(self, seeds: Sequence[Seed]) -> dict[Place, Borders] | None:
        """Return all borders that some operation keeps; None if there are none."""
        for value, dim, borders in seeds:
            before = dict(self.borders)
            # Else nothing but reshapes and operations that need the flat order have these rows, or
            # an input lies in shards of other rows: one weight for queries, keys and values.
            if not self._spread(value, dim, borders) or any(
                map(self._is_cut_elsewhere, self.borders)
            ):
                self.borders = before
        return self.borders or None

    def _spread(self, value: fx.Node, dim: int, borders: Borders) -> bool:
        """Add borders, and carry them on; return whether an operation keeps them."""
        kept, todo = False, [(value, dim)] if self._add(value, dim, borders) else []
        while todo:
            place = todo.pop()
            for op in self.around.get(place[0], ()):
                if is_view(op):
                    todo += self._through_view(op, *place)
                    continue
                for factor in self._factors(op, *place):
                    kept = True
                    for other, dims in op.tensors:
                        todo += [
                            (other, e)
                            for e, names in enumerate(dims)
                            if names == (factor,) and self._add(other, e, self.borders[place])
                        ]
        return kept

    def _is_cut_elsewhere(self, place: Place) -> bool:
        """Return whether an input's shards are other rows than those of its major part."""
        value, dim = place
        if value.op != "placeholder":
            return False
        major, *_ = parts_of(value.meta["val"].shape[dim], self.borders[place])
        return major % self.layouts.mesh.count(self.layouts.spec[value].dims[dim]) != 0

    def _factors(self, op: Op, value: fx.Node, dim: int) -> set[str]:
        """Return the factors in a value's dimension that an operation keeps."""
        names = {dims[dim] for v, dims in op.tensors if v is value}
        return {each[0] for each in names if len(each) == 1 and keeps(op, each[0])}

    def _add(self, value: fx.Node, dim: int, borders: Borders) -> bool:
        """Add those borders that nest with the others; return whether any is new."""
        size, known = value.meta["val"].shape[dim], self.borders.get((value, dim), Borders())
        new = known
        if not isinstance(size, int) or "other" in value.meta:
            return False
        for border in sorted(borders - known):
            chain = sorted({*new, border, 1, size})
            if all(b % a == 0 for a, b in zip(chain, chain[1:])):
                new |= {border}
        new -= {1, size}
        if new == known:
            return False
        self.borders[value, dim] = new
        return True

    def _through_view(self, op: Op, value: fx.Node, dim: int) -> Iterator[Place]:
        """Carry a dimension's borders to the other side of a reshape."""
        for here, there in ((0, 1), (1, 0)):
            one, other = ((*op.operands, *op.results)[i] for i in (here, there))
            if one is not value or other is None:
                continue
            # A border is so many elements from the minor end of the whole tensor.
            behind = math.prod(value.meta["val"].shape[dim + 1 :])
            lower = math.prod(shape := other.meta["val"].shape)
            for e, size in enumerate(shape):
                upper, lower = lower, lower // max(size, 1)
                inside = {
                    b * behind // lower
                    for b in self.borders[value, dim]
                    if lower < b * behind < upper and b * behind % lower == 0
                }
                if inside and self._add(other, e, Borders(inside)):
                    yield other, e


class _Keeper:
    """Builder for the new graph: `new` has each value, in its dimensions there."""

    def __init__(self, borders: dict[Place, Borders], rules: Rules) -> None:
        self.borders, self.rules, self.graph = borders, rules, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.views: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        self.kept: set[fx.Node] = {value for value, _ in borders}
        self.changed = False

    def run(self, graph: fx.Graph) -> fx.Graph | None:
        """Return the new graph; None if no operation has other dimensions there."""
        ops = {op.node: op for op in self.rules.ops(graph)}
        for node in graph.nodes:
            op = ops.get(node)
            if op is not None and is_view(op) and not self.kept.isdisjoint({*op.operands, node}):
                self.new[node] = self._view(op)
            elif op is not None and (parts := self._parts(op)):
                self._operation(op, parts)
            elif node.op == "call_function" and (source := self._element(node)) is not None:
                self.new[node] = source
            else:
                self.new[node] = copy_node(self.graph, node, lambda n, at=node: self._flat(n, at))
        drop_unused(self.graph)
        return self.graph if self.changed else None

    def _flat(self, value: fx.Node, at: fx.Node) -> fx.Node:
        """Return a value in its own dimensions."""
        if isinstance(val := value.meta.get("val"), Tensor):
            return self._shaped(value, tuple(val.shape), at)
        return self.new[value]

    def _shaped(self, value: fx.Node, shape: tuple[int, ...], at: fx.Node) -> fx.Node:
        """Return a value in these dimensions, for an operation of the old graph."""
        new = self.new[value]
        if tuple(new.meta["val"].shape) == shape:
            return new
        key = (new, shape)
        if key not in self.views:
            self.views[key] = self._reshape(new, shape, origin_of(at))
        return self.views[key]

    def _reshape(
        self, x: fx.Node, shape: tuple[int, ...], meta: dict, name: str | None = None
    ) -> fx.Node:
        view = add_node(
            self.graph, "call_function", aten.reshape.default, (x, list(shape)), {}, name
        )
        view.meta = {**meta, "val": x.meta["val"].reshape(shape)}
        return view

    def _cut(self, value: fx.Node) -> tuple[int, ...]:
        """Return a value's shape with the parts of its dimensions."""
        shape = value.meta["val"].shape
        return tuple(
            n for d, size in enumerate(shape) for n in parts_of(size, self.borders.get((value, d)))
        )

    def _view(self, op: Op) -> fx.Node:
        x, shape = self.new[op.operands[0]], self._cut(op.node)
        if tuple(x.meta["val"].shape) == shape:
            return x
        return self._reshape(x, shape, op.node.meta, op.node.name)

    def _parts(self, op: Op) -> dict[str, tuple[int, ...]]:
        """Return the factors that an operation keeps, with the sizes of their parts."""
        parts: dict[str, tuple[int, ...]] = {}
        for value, dims in op.tensors if not is_view(op) else ():
            for d, names in enumerate(dims if value in self.kept else ()):
                borders = self.borders.get((value, d))  # type: ignore[arg-type]
                if borders and len(names) == 1 and names[0] not in parts and keeps(op, names[0]):
                    parts[names[0]] = parts_of(op.rule.sizes[names[0]], borders)
        return parts

    def _operation(self, op: Op, parts: dict[str, tuple[int, ...]]) -> None:
        """Add an operation on values whose dimensions are kept apart."""
        self.changed = True
        node, rule = op.node, op.rule
        vals = [*(v.meta["val"] for v in op.operands), *tensors_of(node)]
        sizes = [
            tuple(
                parts.get(names[0], (n,)) if len(names) == 1 else (n,)
                for names, n in zip(dims, val.shape)
            )
            for dims, val in zip((*rule.operands, *rule.results), vals)
        ]
        count = len(op.operands)
        operands = iter(
            self._shaped(value, tuple(n for part in each for n in part), node)
            for value, each in zip(op.operands, sizes)
        )
        args, kwargs = fx.map_arg(
            (node.args, dict(node.kwargs)),
            lambda n: next(operands) if isinstance(n.meta.get("val"), Tensor) else self.new[n],
        )
        flat = FlatCall(
            node.target, tuple(tuple(map(len, t)) for t in sizes[:count]), tuple(sizes[count:])
        )
        val = flat.shaped(node.meta["val"])
        target, args = self._native(flat, args, kwargs, val)
        new = add_node(self.graph, "call_function", target, args, kwargs, node.name)
        new.meta = {**node.meta, "val": val}
        self.new[node] = new

    def _native(self, flat: FlatCall, args: Any, kwargs: Any, val: Any) -> tuple[Any, ...]:
        """Return target and arguments: of the operation itself, if it takes the dimensions."""
        if (keep := rewrite_of("keep", flat.target)) is not None:
            return flat.target, keep(flat, *args)
        a, k = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        call = Call(flat, a, k, tuple(_tensors_in((a, k))), tuple(_tensors_in(val)))
        return (flat.target if self._is_native(call) else flat), args

    def _is_native(self, call: Call) -> bool:
        """Return whether an operation with its parts apart has the FlatCall's results and rule."""
        given = call.args, dict(call.kwargs)
        args, kwargs = pytree.tree_map_only((Tensor, torch.device), _on_meta, given)
        try:
            # Calls on fake tensors log what they raise; constants on a device take its memory.
            results = _tensors_in(call.target.target(*args, **kwargs))
            own = rule_of(replace(call, target=call.target.target))
        except OPERATOR_ERRORS:
            return False
        same = [t.shape for t in results] == [t.shape for t in call.results]
        return same and own.local.arguments is None and own.is_like(rule_of(call))

    def _element(self, node: fx.Node) -> fx.Node | None:
        """Return the element of a result whose dimensions are kept; None for another node."""
        if not isinstance(node.meta.get("val"), Tensor) or node.args[:1] == ():
            return None
        source = node.args[0]
        if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), (tuple, list)):
            return None
        val = self.new[source].meta["val"][node.args[1]]
        new = copy_node(self.graph, node, self.new.__getitem__)
        new.meta["val"] = val
        return new


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _on_meta(x: Tensor | torch.device) -> Tensor | str:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else "meta"


def parts_of(size: int, borders: Borders | None) -> tuple[int, ...]:
    """Return the sizes of a dimension's parts, major first."""
    chain = sorted({1, size, *(borders or ())}, reverse=True)
    return tuple(a // b for a, b in zip(chain, chain[1:])) or (size,)
