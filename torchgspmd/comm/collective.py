"""The five collectives as graph nodes on mesh axes, and Collective, a plan's record of one.

In a graph, a collective is a call of one of the functions below. They are only names: a simulator
or a lowering gives them their meaning. With B bytes of payload and n devices in a group,
bandwidth-optimal algorithms send per device

    all_reduce      2 (n-1)/n B         payload: the reduced tensor
    all_gather        (n-1)/n B         payload: the gathered tensor
    reduce_scatter    (n-1)/n B         payload: the tensor before it is scattered
    all_to_all        (n-1)/n B         payload: the local tensor
    permute                   B         payload: what the busiest device really sends or receives
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Collective:
    """A collective at one line of the user's code, which every device runs `count` times.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
        axes: Mesh axes that a group runs over.
        group_size: Devices of a group.
        dtype: What is sent, such as "f32".
        payload_bytes: Bytes of one run; the module says of which tensor.
        sent_bytes: Bytes that one device sends in all `count` runs.
        count: How often it runs in a call.
        source: file:line of the operation that needs it.

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


def sent_bytes(kind: str, payload: float, group: int) -> float:
    """Return the bytes that one device sends."""
    if kind == "permute":
        return payload
    share = (group - 1) / group * payload
    return 2 * share if kind == "all_reduce" else share


def _only_in_graphs(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} is a node of a plan's graph; run it with Plan.simulate or parallelize"
    )


def all_reduce(x: Any, reduction: str, axes: str) -> Any:
    """Reduce terms x: all devices get the sum (or max, ...) over `axes`."""
    _only_in_graphs("all_reduce")


def all_gather(x: Any, dim: int, axes: str) -> Any:
    """Gather shards x: all devices get the shards along `axes`, joined at dimension `dim`."""
    _only_in_graphs("all_gather")


def reduce_scatter(x: Any, reduction: str, dim: int, axes: str) -> Any:
    """Reduce terms x over `axes`: every device gets its shard of the sum along `dim`."""
    _only_in_graphs("reduce_scatter")


def all_to_all(x: Any, gather_dim: int, scatter_dim: int, axes: str) -> Any:
    """Join shards x along `gather_dim`: every device gets its shard along `scatter_dim`."""
    _only_in_graphs("all_to_all")


def permute(x: Any, before: str, after: str) -> Any:
    """Reshard x from layout `before` to `after`: devices receive only what they lack.

    In the program of one device, the global shape is the last argument.
    """
    _only_in_graphs("permute")


def halo(x: Any, dim: int, axes: str, window: str, size: int) -> Any:
    """Exchange halos of shards x: every device gets the rows of its window (see halo.py).

    x is a shard of a dimension of global length `size`. A halo counts as a permute.
    """
    _only_in_graphs("halo")


def start(kind: str, operands: tuple, arguments: tuple) -> Any:
    """Start collectives of one kind, merged into one message; `arguments` has a tuple per operand.

    `wait` gives result number i. Between the two the device computes while it communicates.
    """
    _only_in_graphs("start")


def wait(started: Any, index: int) -> Any:
    """Return result number `index` of the collectives that `start` began."""
    return started[index]


def window(x: Any, dim: int, axes: str, window: str) -> Any:
    """Slice a replicated dimension to the rows of each device's window. Nothing is sent."""
    _only_in_graphs("window")


def term(x: Any, axes: str) -> Any:
    """Make x an unreduced sum: the first device along `axes` keeps x, the others get zeros.

    Nothing is sent.
    """
    _only_in_graphs("term")


def shard(x: Any, dim: int, axes: str) -> Any:
    """Slice x to each device's shard along `dim`. Nothing is sent."""
    _only_in_graphs("shard")


COLLECTIVES = {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, all_to_all, permute)}
SENDING = {**COLLECTIVES, "halo": halo}
STEPS = {**SENDING, "shard": shard, "term": term, "window": window}


def split_axes(axes: str) -> tuple[str, ...]:
    """Return the axes of a text: 'data+model' gives ('data', 'model')."""
    return tuple(axes.split("+"))
