"""The five collectives as nodes of a graph, on mesh axes; and Collective, what a plan reports of
them.

In a graph a collective is a call of one of the functions below. They are names: a simulator or a
lowering gives them their meaning. B bytes of payload and n devices in a group, bandwidth-optimal
algorithms send per device

    all_reduce      2 (n-1)/n B         payload: the reduced tensor
    all_gather        (n-1)/n B         payload: the gathered tensor
    reduce_scatter    (n-1)/n B         payload: the tensor before it is scattered
    all_to_all        (n-1)/n B         payload: the local tensor
    permute                   B         payload: what the busiest device really sends or receives
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

ALPHA = 8.0  # what a collective costs besides its bytes, in bytes: between equals, fewer win


@dataclass(frozen=True)
class Collective:
    """A communication that every device takes part in, as often as `count` says, at one place of
    the user's code.
    """

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, permute
    axes: tuple[str, ...]  # mesh axes that a group runs over
    group_size: int  # devices
    dtype: str
    payload_bytes: float  # of one of `count`
    sent_bytes: float  # by one device, of all `count`
    count: int = 1
    source: str | None = None  # file:line of the operation that needed it


def sent_bytes(kind: str, payload: float, group: int) -> float:
    """Bytes that a device sends."""
    if kind == "permute":
        return payload
    share = (group - 1) / group * payload
    return 2 * share if kind == "all_reduce" else share


def _only_in_graphs(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} is a node of a plan's graph; run it with Plan.simulate or parallelize"
    )


def all_reduce(x: Any, reduction: str, axes: str) -> Any:
    """x is a term on every device; all devices get the sum (or max, ...) over `axes`."""
    _only_in_graphs("all_reduce")


def all_gather(x: Any, dim: int, axes: str) -> Any:
    """x is a part; all devices get the parts along `axes`, joined at dimension `dim`."""
    _only_in_graphs("all_gather")


def reduce_scatter(x: Any, reduction: str, dim: int, axes: str) -> Any:
    """x is a term; every device gets its part, along dimension `dim`, of the sum over `axes`."""
    _only_in_graphs("reduce_scatter")


def all_to_all(x: Any, gather_dim: int, scatter_dim: int, axes: str) -> Any:
    """x is a part along `gather_dim`; every device gets its part along `scatter_dim` of the joined
    tensor.
    """
    _only_in_graphs("all_to_all")


def permute(x: Any, before: str, after: str) -> Any:
    """x is laid out as `before`; every device gets its part as laid out by `after`, what it lacks
    from those that hold it. In the program of one device the global shape follows.
    """
    _only_in_graphs("permute")


def halo(x: Any, dim: int, axes: str, window: str, size: int) -> Any:
    """x is a part of a dimension of global length `size`; every device gets the rows of its window
    (see window.py) from those that have them. Counts as a permute.
    """
    _only_in_graphs("halo")


def start(kind: str, operands: tuple, arguments: tuple) -> Any:
    """Begins collectives of one kind, named as above, sent as one: for every operand the arguments
    that follow it. Whoever needs result number i calls `wait` first; between the two the device
    computes while it communicates.
    """
    _only_in_graphs("start")


def wait(started: Any, index: int) -> Any:
    """Result number `index` of what `start` began."""
    return started[index]


def window(x: Any, dim: int, axes: str, window: str) -> Any:
    """Every device keeps the rows of its window out of a dimension that it has whole. Nothing is
    sent.
    """
    _only_in_graphs("window")


def term(x: Any, axes: str) -> Any:
    """The first device along `axes` keeps x, the others get zeros: terms of a sum that is x.
    Nothing is sent.
    """
    _only_in_graphs("term")


def shard(x: Any, dim: int, axes: str) -> Any:
    """Every device keeps its part along `dim`. Nothing is sent."""
    _only_in_graphs("shard")


COLLECTIVES = {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, all_to_all, permute)}
SENDING = {**COLLECTIVES, "halo": halo}
STEPS = {**SENDING, "shard": shard, "term": term, "window": window}


def split_axes(axes: str) -> tuple[str, ...]:
    """'data+model' as ('data', 'model')."""
    return tuple(axes.split("+"))
