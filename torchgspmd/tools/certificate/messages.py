"""Collectives and messages between ranks that take turns in one process.

A collective reads its operand from its start to its wait, and its result is NaN until then. Each
group has its collectives in the order in which its ranks begin them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ...comm.process_groups import ProcessGroups
from ...compat.operators import c10d
from ...layout.mesh import Mesh
from .claimed_layouts import COMBINE, poison

_COMBINE = {**COMBINE, "product": COMBINE["prod"]}
_EXCHANGE = c10d.all_to_all_single.default
Place = tuple[str, tuple[int, ...], int]
"""A collective: the name of its group, the ranks of it, and its number in the group."""


class OnRank(Protocol):
    """A node of one rank."""

    node: fx.Node
    rank: int


class RankFault(Exception):
    """A fault of the program of a rank, at a node. why: the rule that it breaks."""

    def __init__(self, at: OnRank, found: str, why: str) -> None:
        super().__init__(found)
        self.node, self.rank, self.found, self.why = at.node, at.rank, found, why


@dataclass(eq=False)
class RankCall:
    """A collective of one rank. sent: its operand at the start."""

    rank: int
    node: fx.Node
    op: Any
    args: tuple[Any, ...]
    operand: Tensor
    result: Tensor
    place: Place
    sent: Tensor = field(init=False)
    arrived: Tensor | None = None

    def __post_init__(self) -> None:
        self.sent = self.operand.clone()

    def __str__(self) -> str:
        return f"{self.op} of {[*self.operand.shape]} in group {self.place[0]}"


class Network:
    """Collectives and messages that the ranks of a mesh have begun. calls: by place and rank."""

    def __init__(self, ranks: int) -> None:
        self.calls: dict[Place, dict[int, RankCall]] = {}
        self.counts: dict[tuple[str, tuple[int, ...], int], int] = {}
        self.order: list[list[RankCall]] = [[] for _ in range(ranks)]
        self.mail: dict[tuple, deque[Tensor]] = {}  # (from, to, key) of messages between stages

    def begin(self, rank: int, node: fx.Node, op: Any, args: tuple, ranks: list[int]) -> RankCall:
        """Begin a collective of a rank. args: of the operation, its operand first."""
        group = args[-1], tuple(ranks)
        number = self.counts.get((*group, rank), 0)
        self.counts[(*group, rank)] = number + 1
        x, count = args[0], len(ranks)
        writes = op is c10d.all_reduce_.default
        rows = {
            c10d.all_gather_into_tensor.default: lambda: x.shape[0] * count,
            c10d.reduce_scatter_tensor.default: lambda: x.shape[0] // count,
            _EXCHANGE: lambda: sum(args[1]),
        }
        shape = [rows[op](), *x.shape[1:]] if op in rows else x.shape
        result = x if writes else poison(shape, x)
        call = RankCall(rank, node, op, args[1:-1], x, result, (*group, number))
        self.order[rank].append(call)
        calls = self.calls.setdefault(call.place, {})
        _check_alike(call, next(iter(calls.values()), call))
        calls[rank] = call
        if len(calls) == count:
            _exchange([calls[r] for r in ranks])
        return call

    def check_order(self) -> None:
        """Raise RankFault unless one order of all collectives is that of every rank."""
        left = [deque(calls) for calls in self.order]
        while any(left):
            heads = {calls[0].place for calls in left if calls}
            done = next(
                (p for p in heads if all(left[r] and left[r][0].place == p for r in p[1])), None
            )
            if done is None:
                first = next(calls[0] for calls in left if calls)
                other = next(
                    left[r][0]
                    for r in first.place[1]
                    if left[r] and left[r][0].place != first.place
                )
                found = f"comes first here, and '%{other.node}' on rank {other.rank}"
                why = "ranks begin the collectives of all groups in one order"
                raise RankFault(first, found, why)
            for rank in done[1]:
                left[rank].popleft()


def _check_alike(call: RankCall, other: RankCall) -> None:
    mine, its = (
        (c.op, c.operand.dtype, *(() if c.op is _EXCHANGE else (c.operand.shape, c.args)))
        for c in (call, other)
    )
    if mine != its:
        found = f"calls {call}, and rank {other.rank} calls {other} there ('%{other.node}')"
        raise RankFault(call, found, "all ranks of a group call the same collectives in one order")


def _exchange(calls: Sequence[RankCall]) -> None:
    """Compute the results of a collective. calls: in the order of the group."""
    op, xs, n = calls[0].op, [c.sent for c in calls], len(calls)
    if op is _EXCHANGE:
        # Raise RankFault unless each rank expects the rows that others send to it.
        for i, sender in enumerate(calls):
            for j, receiver in enumerate(calls):
                if (sent := sender.args[1][j]) != (expected := receiver.args[0][i]):
                    found = f"sends {sent} rows to rank {receiver.rank}, which expects {expected}"
                    raise RankFault(sender, found, "a rank receives the rows that are sent to it")
        parts = [x.split(c.args[1]) for c, x in zip(calls, xs)]
        results = [torch.cat([each[i] for each in parts]) for i in range(n)]
    elif op is c10d.all_gather_into_tensor.default:
        results = [torch.cat(xs)] * n
    else:
        total = reduce(_COMBINE[calls[0].args[0]], xs)
        is_cut = op is c10d.reduce_scatter_tensor.default
        results = [*total.chunk(n)] if is_cut else [total] * n
    for call, result in zip(calls, results):
        call.arrived = result


# ------------------------------------------------------------------------------- memory in flight


def extent(x: Tensor) -> tuple[int, int, int]:
    """Return the storage of a tensor, and the first and last byte that it may have there."""
    first = int(x.storage_offset()) * x.itemsize
    rows = sum((int(n) - 1) * int(s) for n, s in zip(x.shape, x.stride()))
    last = first + (rows + 1) * x.itemsize
    return x.untyped_storage().data_ptr(), first, last if x.numel() else first


def overlap(a: Tensor, b: Tensor) -> bool:
    (storage, first, last), (other, begin, end) = extent(a), extent(b)
    return storage == other and first < end and begin < last


def accesses(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors whose elements an operation touches, and whether it writes them."""
    schema, name = func._schema, func.__name__
    arguments = schema.arguments
    writes = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    is_view = not writes and any(r.alias_info is not None for r in schema.returns)
    if is_view or name.startswith(("empty", "new_", "zeros_like", "ones_like", "full_like")):
        return
    for argument, value in (*zip((a.name for a in arguments), args), *kwargs.items()):
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, Tensor):
                yield x, argument in writes


@dataclass(frozen=True)
class InFlight:
    """A buffer of a collective or a message that has begun. is_written: by the network."""

    buffer: Tensor
    is_written: bool
    node: fx.Node


def check_access(held: Sequence[InFlight], at: OnRank, touched: Callable[[], Iterator]) -> None:
    """Raise RankFault if an operation writes to a buffer in flight, or reads one that comes."""
    for x, writes in touched() if held else ():
        for each in held:
            if (writes or each.is_written) and overlap(x, each.buffer):
                verb = "writes to" if writes else "reads"
                found = f"{verb} memory of '%{each.node}', which is in flight"
                raise RankFault(at, found, "memory of a collective is the network's until its wait")


class RankGroups(ProcessGroups):
    """The process groups of a rank without a process: the part that lowering asks.

    A group has the name of its axes on all ranks.

    device_type: where tensors of the program are; between CPUs the program is that for gloo.
    """

    def __init__(self, mesh: Mesh, rank: int, device_type: str) -> None:
        self.mesh, self.rank, self.coordinates = mesh, rank, mesh.coordinates(rank)
        self.device_type, self.is_gloo = device_type, device_type == "cpu"
        self.processes, self.checked_on = [*range(mesh.size)], torch.device(device_type)
        self.is_fake = True  # no sum travels with a comparison of the ranks
        self.by_axes: dict[tuple[str, ...], tuple[str, list[int]]] = {}

    def between_stages(self, axis: str, keys: Sequence[Hashable]) -> dict[Hashable, Any]:
        """Return no groups: the walk has messages of its own."""
        return dict.fromkeys(keys)

    def _create(self, axes: tuple[str, ...]) -> str:
        return "+".join(axes)
