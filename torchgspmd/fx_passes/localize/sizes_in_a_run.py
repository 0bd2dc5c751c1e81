"""Local arguments that are sizes which only a run knows.

    %y = view(%x, [1808, 2])        where 1808 stands for 4 * u0
    %y = view(%x, [%mul, 2])        what a device runs

A device has the complete dimension if its size depends on values. An argument's size is a program
input (`size_n0`), and a device has a shard: n rows over 4 devices are -(-n // 4) on each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, fx

from ...compat.operators import aten
from ...errors import ShardingError
from ...layout.mesh import Mesh
from ...layout.open_sizes import LocalRows, OpenSize, factors_of, product_of, with_open_sizes
from ...shard_spec import Axes, ShardSpec
from ..ir import is_number, operands_of, other_shapes, tensors_of


class Arithmetic(Protocol):
    """Adds arithmetic on inputs right behind them."""

    def __call__(self, op: Callable[..., Any], a: Any, b: Any) -> fx.Node: ...


class RunSizes:
    """One program's nodes for argument sizes, and for their shards.

    stand_ins: the numbers in place of these sizes, in the order of their names.
    """

    def __init__(
        self, graph: fx.Graph, mesh: Mesh, stand_ins: Mapping[str, int], at_top: Arithmetic
    ) -> None:
        self.graph, self.mesh, self.at_top = graph, mesh, at_top
        self.names = [*stand_ins]
        self.stand_ins = dict(enumerate(stand_ins.values()))
        self.inputs: dict[int, fx.Node] = {}
        self.nodes: dict[tuple[int, Axes], fx.Node] = {}

    @classmethod
    def of_rank(cls, graph: fx.Graph, mesh: Mesh) -> RunSizes:
        """Return the sizes that one rank's program has as inputs; arithmetic is inserted."""
        sizes = cls(graph, mesh, {}, lambda op, a, b: graph.call_function(op, (a, b)))
        for node in size_inputs(graph):
            which, sizes.stand_ins[which] = node.meta["size"]
            sizes.inputs[which] = node
        return sizes

    def take(self, size: int, other: int) -> None:
        """Add the inputs that a size is computed from to the program."""
        for which in factors_of(size, other):
            self._input(which)

    def all(self) -> list[fx.Node]:
        """Return the inputs for all argument sizes."""
        return [self._input(which) for which in self.stand_ins]

    def whole(self, size: int, other: int) -> fx.Node | None:
        """Return a size, given by two stand-ins; None if it is no product of argument sizes."""
        return self.shard(size, other, ())

    def shard(self, size: int, other: int, axes: Axes) -> fx.Node | None:
        """Return a shard's rows along axes, padding included."""
        product = product_of(size, other, self.stand_ins)
        if product is None or not product.factors or size % self.mesh.count(axes):
            return None
        if (size, axes) not in self.nodes:
            first, *rest = product.factors
            node, count = self._input(first), self.mesh.count(axes)
            if count > 1:
                # -(-n // count): floor division rounds up on negative numbers.
                node = self.at_top(operator.floordiv, node, -count)
                node = self.at_top(operator.mul, node, -1)
            for i in rest:
                node = self.at_top(operator.mul, node, self._input(i))
            if product.times > 1:
                node = self.at_top(operator.mul, node, product.times)
            self.nodes[size, axes] = node
        return self.nodes[size, axes]

    def group(self, size: int, other: int) -> int | fx.Node | None:
        """Return how many rows stay together on one device; None if the size is no product."""
        product = product_of(size, other, self.stand_ins)
        if product is None:
            return None
        rows: int | fx.Node = product.times
        for which in product.factors[1:]:
            rows = self.at_top(operator.mul, self._input(which), rows)
        return rows

    def leading(self, size: int, other: int) -> fx.Node:
        """Return how many row groups a dimension has."""
        return self._input(min(factors_of(size, other)))

    def _input(self, which: int) -> fx.Node:
        """Return the program input for an argument's size, which stands behind coordinates."""
        if which not in self.inputs:
            placeholders = self.graph.find_nodes(op="placeholder")
            with self.graph.inserting_after([*placeholders][len(self.mesh.names) - 1]):
                node = self.graph.placeholder(f"size_{self.names[which]}")
            node.meta = {"size": (which, self.stand_ins[which])}
            self.inputs[which] = node
        return self.inputs[which]


def size_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return a device program's inputs that are argument sizes."""
    return [node for node in graph.find_nodes(op="placeholder") if "size" in node.meta]


def shard_inputs(graph: fx.Graph, mesh: Mesh) -> list[fx.Node]:
    """Return a device program's inputs that are tensors."""
    inputs = [*graph.find_nodes(op="placeholder")][len(mesh.names) :]
    return [node for node in inputs if "size" not in node.meta]


class LocalSizes:
    """The numbers in one operation's local arguments that stand for sizes, as nodes."""

    def __init__(
        self, node: fx.Node, new: Mapping[fx.Node, Any], run: RunSizes, mesh: Mesh
    ) -> None:
        self.node, self.run, self.mesh = node, run, mesh
        self.numbers = {n.meta["val"]: new[n] for n in node.all_input_nodes if is_number(n)}
        self.whole: dict[int, tuple[fx.Node, int] | None] = {}  # where to read such a size
        self.shards: dict[int, tuple[fx.Node, int]] = {}  # where to read the rows of a shard
        self.exact: dict[tuple[int, Axes], tuple[fx.Node, int]] = {}  # the same, by size and axes
        self.computed: dict[int, tuple[OpenSize, Axes]] = {}  # rows that no operand has
        self.divided: dict[int, OpenSize] = {}  # all rows of what is sharded
        for operand in operands_of(node):
            spec = operand.meta["spec"]
            for d, size, axes in _open_dims(operand, [spec]):
                if axes:
                    place, rows = (new[operand], d), int(size) // mesh.count(axes)
                    window = spec.window(d)
                    self.shards[window.held(rows) if window else rows] = place
                    self.exact |= {} if window else {(int(size), axes): place}
                    self.divided[int(size)] = size
                else:
                    self.whole[int(size)] = new[operand], d
        # Operands first: a size that one has is read from it, and not computed.
        for _, size, axes in _open_dims(node, node.meta["result_specs"]):
            if axes:
                self.computed[int(size) // mesh.count(axes)] = size, axes
                self.divided[int(size)] = size
            else:
                self.whole.setdefault(int(size))

    def node_of(self, number: int, graph: fx.Graph, divided: bool = False) -> fx.Node | None:
        """Return the node for a number that stands for a size; None if it stands for none.

        divided: whether it may be all rows in a sharded dimension.
        """
        if isinstance(number, LocalRows):
            node = self._node_of_rows(number.size, number.axes, graph)
        else:
            node = self._node_of_rows(number, (), graph) if isinstance(number, OpenSize) else None
        return self._node_of_number(int(number), graph, divided) if node is None else node

    def _node_of_rows(self, size: OpenSize, axes: Axes, graph: fx.Graph) -> fx.Node | None:
        """Return the node with a shard's rows; None if no operand has them, nor a product."""
        if not axes and int(size) in self.numbers:
            return self.numbers[int(size)]
        place = self.exact.get((int(size), axes)) if axes else self.whole.get(int(size))
        if place is not None:
            return graph.call_function(aten.sym_size.int, place)
        return self.run.shard(int(size), size.other, axes)

    def _node_of_number(self, number: int, graph: fx.Graph, divided: bool) -> fx.Node | None:
        """Return the node for a number that does not say which size it is."""
        of_shard = number in self.shards or number in self.computed
        of_all = number in self.whole or number in self.numbers
        of_all |= divided and number in self.divided
        # One number, two sizes: in another run they differ, and nothing tells which one is meant.
        if of_shard and of_all:
            raise needs_number(self.node.name, self.node.meta.get("source"))
        if number in self.numbers:
            return self.numbers[number]
        if place := self.shards.get(number) or self.whole.get(number):
            return graph.call_function(aten.sym_size.int, place)
        if number in self.computed:
            size, axes = self.computed[number]
            return self.run.shard(int(size), size.other, axes)
        if divided and number in self.divided:
            return self.run.whole(number, self.divided[number].other)
        return None

    def arguments(self, args: tuple, before: tuple, graph: fx.Graph) -> tuple:
        """Return arguments with run sizes in place of numbers that stand for them.

        before: the arguments in the local graph, whose sizes are global.
        """

        def replaced(value: Any, old: Any) -> Any:
            if isinstance(value, (tuple, list)):
                known = isinstance(old, (tuple, list)) and len(old) == len(value)
                return [replaced(v, old[i] if known else None) for i, v in enumerate(value)]
            if not isinstance(value, int) or isinstance(value, bool):
                return value
            if (node := self.node_of(value, graph)) is not None:
                return node
            if value not in self.whole:
                return value
            if old is None:
                raise needs_number(self.node.name, self.node.meta.get("source"))
            return old

        return tuple(
            replaced(value, before[i] if i < len(before) else None) for i, value in enumerate(args)
        )


def needs_number(name: str, source: str | None) -> ShardingError:
    """Return the error for an operation that one program for all sizes cannot have."""
    return ShardingError(
        f"%{name} needs the number of a size that only a run knows",
        where=source,
        why="no argument of it has this size, and devices have one program for all sizes",
        fix="make a plan for each size: leave out dynamic=, or call parallelize(dynamic=False); "
        "pad a size that depends on values to a known one",
    )


def local_shape(
    tensor: Tensor, other: Sequence[int], spec: ShardSpec, mesh: Mesh
) -> tuple[int, ...]:
    """Return a shard's shape, with LocalRows for each size that only a run knows.

    other: the shape with the other numbers in place of these sizes. Rows with a halo are a plain
    number.
    """
    local = spec.local_shape(tensor.shape, mesh)
    sizes = with_open_sizes(_shape(tensor), other)
    return tuple(
        LocalRows(rows, size, axes) if isinstance(size, OpenSize) and not spec.window(d) else rows
        for d, (rows, size, axes) in enumerate(zip(local, sizes, spec.dims))
    )


def _open_dims(node: fx.Node, specs: Sequence[ShardSpec]) -> Iterator[tuple[int, OpenSize, Axes]]:
    """Yield the dimensions that have a size known in a run, with their axes."""
    for tensor, other, spec in zip(tensors_of(node), other_shapes(node), specs):
        for d, (size, second) in enumerate(zip(_shape(tensor), other)):
            if size != second:
                yield d, OpenSize(size, other=second), spec.dims[d]


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
