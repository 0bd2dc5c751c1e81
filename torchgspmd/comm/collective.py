"""Collective, a plan's record of one, and the nodes of one: start and wait in one device's program,
those that CollectiveBuilder adds in one rank's program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from ..compat.fx_nodes import add_node, allocates, origin_of
from ..compat.operators import aten, c10d
from ..compat.private_apis import OpOverload
from .carriers import RowExchange, is_connected, takes_rows
from .process_groups import ProcessGroups


@dataclass(frozen=True)
class Collective:
    """A collective at one line in the user's code, which every device runs `count` times.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
        axes: Mesh axes that a group runs over.
        group_size: Devices in a group.
        dtype: The dtype of the payload, such as "f32".
        payload_bytes: Bytes that one run carries; the kind's module names the tensor.
        sent_bytes: Bytes that one device sends in all `count` runs, padding included; where devices
            differ, by the busiest one.
        count: How often it runs in a call.
        source: file:line where the operation stands that needs it.
        module: Path of the module that computes the moved value; for a weight or another input its
            name.
        backward: Whether it belongs to the backward.
        value: Name of the moved value in the printed plan.
        named: Whether the source names it, by `reshard`.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 16)
        >>> specs = ("data model", "model _")
        >>> result = plan(torch.matmul, x, w, mesh=Mesh(data=2, model=4), in_specs=specs)
        >>> [(c.kind, c.axes, c.sent_bytes) for c in result.collectives]
        [('all_reduce', ('model',), 192.0)]
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    payload_bytes: float
    sent_bytes: float
    count: int = 1
    source: str | None = None
    module: str = field(default="", compare=False)
    backward: bool = field(default=False, compare=False)
    value: str = field(default="", compare=False)
    named: bool = field(default=False, compare=False)


def start(kind: str, operands: tuple[Any, ...], arguments: tuple[tuple[Any, ...], ...]) -> NoReturn:
    """Start collectives, merged into one message; `arguments` has a tuple per operand.

    `wait` gives result number i. Between the two the device computes while it communicates.
    """
    # Calls of it only stand in a plan's graph; lowering replaces each by an operation of c10d.
    raise RuntimeError(
        "start is a node of a plan's graph; run it with Plan.simulate or parallelize"
    )


def wait(started: Any, index: int) -> Any:
    """Return result number `index` from the collectives that `start` began."""
    return started[index]


def split_axes(axes: str) -> tuple[str, ...]:
    """Split a text into its axes: 'data+model' gives ('data', 'model')."""
    return tuple(axes.split("+"))


SYMMETRIC_MEMORY, DEEP_EP = CARRIERS = "symmetric_memory", "deep_ep"

# Yields the call's node, is sent the wait's node, and returns the result. For merged collectives,
# it returns all their results.
Lowering = Generator[fx.Node, fx.Node, fx.Node]
MergedLowering = Generator[fx.Node, fx.Node, list[fx.Node]]


class CollectiveBuilder:
    """A new graph, the process groups, and the source graph's node that is being lowered.

    carriers: libraries that may carry messages besides PyTorch's collectives; see CARRIERS.
    """

    def __init__(self, groups: ProcessGroups, carriers: Collection[str] = ()) -> None:
        self.groups, self.mesh, self.graph = groups, groups.mesh, fx.Graph()
        self.carriers = carriers
        self.node: fx.Node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call; it inherits source line and phase from the node that is being lowered."""
        result = add_node(self.graph, "call_function", op, args, kwargs)
        result.meta.update({"source": None, "backward": False, **origin_of(self.node)})
        return result

    def ring_position(self, axes: str) -> tuple[str, list[int], int]:
        """Return (group name, group ranks in axes order, this rank's index) for `axes`."""
        names = split_axes(axes)
        return *self.groups.group(names), self.mesh.index(names, self.groups.coordinates)

    def shared_group(self, axes: str) -> str | None:
        """Return the name of the group over `axes` if its GPUs share memory, in this order."""
        name, ranks, _ = self.ring_position(axes)
        is_chosen = SYMMETRIC_MEMORY in self.carriers
        is_shared = is_chosen and is_connected(self.groups, split_axes(axes))
        return name if is_shared and ranks == sorted(ranks) else None

    def row_exchange(self, shape: Sequence[int], name: str) -> RowExchange | None:
        """Return DeepEP's all_to_all for [n, ..., m] in a group, if it was chosen and takes it."""
        dtype = self.node.args[1][0].meta["dtype"]
        if DEEP_EP not in self.carriers or not takes_rows(self.groups, shape, dtype):
            return None
        return RowExchange(self.groups, name)

    def to_front(
        self, x: object, shape: list[int], dim: int, count: int
    ) -> tuple[fx.Node, list[int]]:
        """Return x with `dim` split in `count` equal shards along a new first dimension, padded."""
        rows = -(-shape[dim] // count)
        if rows * count != shape[dim]:
            x = self.call(
                aten.constant_pad_nd.default,
                x,
                [0, 0] * (len(shape) - 1 - dim) + [0, rows * count - shape[dim]],
            )
        shard = [*shape[:dim], rows, *shape[dim + 1 :]]
        if math.prod(shape[:dim]) == 1:  # no elements are between the shards' rows
            return self.call(aten.reshape.default, x, [count, *shard]), shard
        x = self.call(aten.reshape.default, x, [*shape[:dim], count, rows, *shape[dim + 1 :]])
        # The transport splits the first dimension only.
        order = [dim, *range(dim), *range(dim + 1, len(shape) + 1)]
        return self.call(aten.permute.default, x, order), shard

    def from_front(self, x: object, shard: list[int], dim: int, count: int) -> object:
        """Return x with the shards in its first dimension joined at `dim`, undoing to_front."""
        if math.prod(shard[:dim]) != 1:
            x = self.call(
                aten.permute.default, x, [*range(1, dim + 1), 0, *range(dim + 1, len(shard) + 1)]
            )
        return self.call(
            aten.reshape.default, x, [*shard[:dim], shard[dim] * count, *shard[dim + 1 :]]
        )

    def reorder(self, x: object, positions: Sequence[int]) -> object:
        """Return x with its first dimension's entries in the order `positions`."""
        if list(positions) == list(range(len(positions))):
            return x
        return self.call(torch.stack, [self.call(aten.select.int, x, 0, p) for p in positions])

    def in_group_order(self, x: object, positions: Sequence[int]) -> object:
        """Return x with its first dimension's entries in process group order."""
        return self.contiguous(self.reorder(x, [positions.index(i) for i in range(len(positions))]))

    def begin(self, op: object, shape: list[int], *args: object) -> fx.Node:
        """Add a collective whose result has this shape."""
        collective = self.call(op, *args)
        collective.meta |= {"shape": shape, "dtype": self.node.args[1][0].meta["dtype"]}
        return collective

    def exchange(self, x: object, receives: list[int], sends: list[int], name: str) -> fx.Node:
        """Add an all_to_all on vectors, given the element counts from and to every member."""
        return self.begin(c10d.all_to_all_single.default, [sum(receives)], x, receives, sends, name)

    def contiguous(self, x: object) -> Any:
        return self.call(aten.contiguous.default, x)

    def flat(self, xs: Sequence[object]) -> fx.Node:
        return self.call(aten.cat.default, [self.call(aten.reshape.default, x, [-1]) for x in xs])

    def owns_operand(self) -> bool:
        """Return True if nobody else reads the operand's memory, so that it can be written over."""
        operands: Any = self.node.args[1]
        value = operands[0]
        while (
            value.op == "call_function"
            and len(value.users) == 1
            # A view's operand owns the memory: follow the views as long as nobody else reads them.
            and isinstance(value.target, OpOverload)
        ):
            if allocates(value):
                return True
            value = value.args[0]
        return False

    def unpack(self, flat: object, shapes: list[list[int]]) -> list[fx.Node]:
        """Split the flat result that merged collectives share into its members."""
        members = self.call(
            aten.split_with_sizes.default, flat, [math.prod(shape) for shape in shapes], 0
        )
        pieces = [self.call(operator.getitem, members, i) for i in range(len(shapes))]
        return [
            piece if len(shape) == 1 else self.call(aten.reshape.default, piece, shape)
            for piece, shape in zip(pieces, shapes)
        ]
