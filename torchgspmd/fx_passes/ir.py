"""The graph that the passes work on, and functions that read it.

It is a torch.fx.Graph of ATen operations at global shapes; stages.py lists its metadata.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from ..compat.fx_nodes import add_node
from ..layout.mark import mark_sharding_op
from ..layout.mesh import Mesh
from ..layout.open_sizes import product_of, with_open_sizes
from ..rules import Call, FactorRule, rule_of
from ..rules.custom_ops.loops import CARRY, NEXT, mark_of, nests, runs_of
from ..shard_spec import ShardSpec


@dataclass(eq=False, slots=True)
class Op:
    """One operation: its node, rule, operands and results (None: a result nobody uses)."""

    node: fx.Node
    rule: FactorRule
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]
    key: int | None  # Equal for the same operation on the same shapes, which then share one rule.

    @property
    def runs(self) -> int:
        """How often it runs."""
        return runs(self.node)

    @property
    def tensors(self) -> list[tuple[fx.Node, tuple[tuple[str, ...], ...]]]:
        """Its operands, and the results that somebody uses, with their dimensions' factors."""
        dims = (*self.rule.operands, *self.rule.results)
        pairs = zip((*self.operands, *self.results), dims)
        return [(value, factors) for value, factors in pairs if value is not None]


def ops_around(ops: Iterable[Op]) -> dict[fx.Node, list[Op]]:
    """Return the operations that compute or use a value, for each value."""
    around: dict[fx.Node, list[Op]] = {}
    for op in ops:
        for value in dict(op.tensors):  # each once
            around.setdefault(value, []).append(op)
    return around


def is_operation(node: fx.Node) -> bool:
    """Return True if a node computes with tensors, not with numbers alone."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    # A number read from a tensor, as by `item`, has an operand whose layout matters.
    return isinstance(node.meta["val"], (Tensor, tuple, list)) or bool(operands_of(node))


def is_number(node: fx.Node) -> bool:
    """Return True if a value is a Python number, computed when the program runs."""
    return isinstance(node.meta.get("val"), (int, float))


def tensors_of(node: fx.Node) -> tuple[Tensor, ...]:
    """Return a node's results as a flat tuple of tensors."""
    return _tensors_in(node.meta["val"])


def _tensors_in(val: object) -> tuple[Tensor, ...]:
    return tuple(
        v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, Tensor)
    )


def other_shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return a node's tensor shapes, with other numbers for sizes that only a run knows."""
    return tuple(tuple(t.shape) for t in _tensors_in(node.meta.get("other", node.meta["val"])))


def global_shape(
    node: fx.Node, local: Sequence[int], sizes: Sequence[int], stand_ins: Sequence[int]
) -> tuple[int, ...]:
    """Return a value's global shape in a run, given a shard's shape.

    sizes, stand_ins: the argument sizes in the run, and the numbers in their places. A size that
    depends on values is never sharded, so that each shard has it.
    """
    (other,) = other_shapes(node)
    products = (product_of(n, m, stand_ins) for n, m in zip(node.meta["val"].shape, other))
    return tuple(n if p is None else p.number(sizes) for n, p in zip(local, products))


def rows_together(node: fx.Node, sizes: Sequence[int], stand_ins: Sequence[int]) -> tuple[int, ...]:
    """Return, for each dimension, how many rows stay together on one device in a run.

    sizes, stand_ins: see global_shape.
    """
    (other,) = other_shapes(node)
    products = (product_of(n, m, stand_ins) for n, m in zip(node.meta["val"].shape, other))
    return tuple(p.group(sizes) if p and p.factors else 1 for p in products)


def planned_shape(node: fx.Node) -> tuple[int, ...]:
    """Return a value's global shape, with an OpenSize for each size that only a run knows."""
    (other,) = other_shapes(node)
    return with_open_sizes(node.meta["val"].shape, other)


def unknown_sizes(node: fx.Node) -> list[tuple[int, int]]:
    """Return the dimensions in a node's tensors that only a run knows, with their stand-ins."""
    if "other" not in node.meta:
        return []
    pairs = zip(tensors_of(node), other_shapes(node))
    return [(d, n) for one, other in pairs for d, n in enumerate(one.shape) if n != other[d]]


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return a node's tensor arguments in order, with repetitions.

    A loop carry has two: its first value, and the next iteration's.
    """
    # The second one stands behind the carry in the graph, so it is no argument of the node.
    if node.target is CARRY:
        marks = (mark_of(u) for u in node.users if u.target is NEXT)
        again = (mark.again for mark in marks if mark.again and mark.carry is node)
        return (mark_of(node).value, *again)
    if node.target is NEXT:
        return (mark_of(node).value,)
    inputs: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), lambda n: inputs.append(n))
    # Numbers are equal on all devices: rules and layouts are about tensors alone.
    return tuple(n for n in inputs if not is_number(n))


def has_one_use(value: fx.Node) -> bool:
    """Return whether one node uses a value; a next carry has two uses, after the loop and in it."""
    return len(value.users) == 1 and next(iter(value.users)).target is not NEXT


def count_runs(graph: fx.Graph) -> None:
    """Write meta["runs"]: how often the nodes in loop bodies run."""
    for node, nest in nests(graph).items():
        # Loops may have been rewritten since the last count.
        node.meta.pop("runs", None)
        if nest:
            node.meta["runs"] = runs_of(nest)


def runs(node: fx.Node) -> int:
    """Return how often a node runs."""
    return node.meta.get("runs", 1)


def results_of(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Return a node's results: itself, or the getitem nodes on its tuple (None: unused)."""
    if not isinstance(node.meta["val"], (tuple, list)):
        return () if is_number(node) else (node,)
    indices = [i for i, v in enumerate(node.meta["val"]) if isinstance(v, Tensor)]
    getitems = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return tuple(getitems.get(i) for i in indices)


def call_of(node: fx.Node) -> Call:
    """Return the argument for a rule: the operation with its fake arguments and results."""
    return _call(node, "val", _call(node, "other", None) if node.meta.get("dynamic") else None)


def _call(node: fx.Node, key: str, other: Call | None) -> Call:
    """Return a call with the values under one metadata key, where nodes have it."""

    def value(n: fx.Node) -> Any:
        return n.meta.get(key, n.meta["val"])

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
    tensors, results = tuple(map(value, operands_of(node))), _tensors_in(value(node))
    return Call(node.target, args, kwargs, tensors, results, other)


def signature(node: fx.Node) -> tuple:
    """Return the key for a node's rule, equal for the same operation in repeated layers."""
    tensors: list[Any] = []

    def show(n: fx.Node) -> str:
        if is_number(n):
            return f"#{n.meta['val']}"
        # Shapes and dtypes, not names: equal layers share one rule and one search.
        tensors.append((tuple(n.meta["val"].shape), n.meta["val"].dtype))
        return "%"

    is_looped = any("runs" in n.meta for n in (node, *node.all_input_nodes))
    return (
        node.target,
        repr(fx.map_arg((node.args, dict(node.kwargs)), show)),
        tuple(tensors),
        node.meta.get("dynamic", False),
        node.meta.get("computed"),
        *((runs(node), *map(runs, operands_of(node))) if is_looped else ()),
        *((node.meta["pinned"],) if "pinned" in node.meta else ()),
    )


class Rules:
    """The rule for every node, looked up once for equal signatures.

    Many passes ask for a graph's operations, and few change them. The operations in the last graph
    are remembered, with the objects that they follow from.
    """

    def __init__(self) -> None:
        self.cache: dict[tuple, tuple[FactorRule, int]] = {}  # signature -> rule, key
        self.graph: fx.Graph | None = None  # the last one
        self.known: dict[fx.Node, tuple[Op, tuple[Any, ...]]] = {}  # its operations

    def op(self, node: fx.Node) -> Op:
        cache_key = signature(node)
        if cache_key not in self.cache:
            self.cache[cache_key] = (rule_of(call_of(node)), len(self.cache))
        rule, key = self.cache[cache_key]
        return Op(node, rule, operands_of(node), results_of(node), key)

    def ops(self, graph: fx.Graph) -> Iterator[Op]:
        if graph is not self.graph:
            self.graph, self.known = graph, {}
        return (self._known_op(node) for node in graph.nodes if is_operation(node))

    def _known_op(self, node: fx.Node) -> Op:
        """Return the operation for a node in the last graph."""
        op, sources = self.known.get(node, (None, ()))
        # By identity: whoever changes a node gives it new arguments, and no pass edits them in
        # place.
        if op is not None and all(map(operator.is_, sources, _sources(op))):
            return op
        op = self.op(node)
        # Anything else may change without a change of the node, and is computed each time.
        if op.results == (node,) and _follows_from_arguments(op):
            self.known[node] = op, _sources(op)
        return op


def _sources(op: Op) -> tuple[Any, ...]:
    """Return the objects that an operation follows from; whoever changes it replaces one."""
    node = op.node
    values = [v.meta["val"] for v in op.operands]
    meta = node.meta
    return node.args, node.kwargs, meta["val"], meta.get("runs"), meta.get("pinned"), *values


def _follows_from_arguments(op: Op) -> bool:
    """Return whether tensor arguments alone decide an operation."""
    inputs = op.node.all_input_nodes
    return (
        "dynamic" not in op.node.meta
        and len(inputs) == len({*op.operands})
        and not any("runs" in n.meta or "other" in n.meta for n in (op.node, *inputs))
    )


def boundary_spec(node: fx.Node, spec: ShardSpec | None = None) -> ShardSpec:
    """Return an input's layout as it is stored, or its gradient's: with the parts of a dimension.

    The program itself sees rows in the order of shards.
    """
    found: ShardSpec = spec or node.meta["spec"]
    if "parts" not in node.meta:
        return found
    dim, count = node.meta["parts"]
    return replace(found, parts=tuple(count if d == dim else 1 for d in range(found.rank)))


def values(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes whose value is one tensor."""
    for node in nodes:
        if node.op != "output" and isinstance(node.meta.get("val"), Tensor):
            yield node


def add_mark(
    graph: fx.Graph, value: fx.Node, spec: ShardSpec, mesh: Mesh, meta: Mapping[str, Any]
) -> fx.Node:
    """Add a mark on a value at the graph's insert point, as a user could write it."""
    args = value, str(mesh.unsplit()), str(spec.map_axes(mesh.merge))
    mark = add_node(graph, "call_function", mark_sharding_op._opoverload, args, {}, "mark_sharding")
    mark.meta = {"source": None, **meta, "val": value.meta["val"]}
    return mark
