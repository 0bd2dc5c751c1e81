"""Which operands are indices, and into how many rows: the bound for each index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

_Rows = Callable[[tuple[Any, ...]], Iterator[tuple[Any, int]]]


def _along_dim(args: tuple[Any, ...]) -> Iterator[tuple[Any, int]]:
    shape = args[0].meta["val"].shape
    # A tensor without dimensions is read as one row.
    yield args[2], (shape[args[1]] if shape else 1)


def _of_each_dim(args: tuple[Any, ...]) -> Iterator[tuple[Any, int]]:
    yield from zip(args[1], args[0].meta["val"].shape)


# By name without overload: all overloads have their index in one place.
_READERS: dict[str, _Rows] = {
    "embedding": lambda args: iter([(args[1], args[0].meta["val"].shape[0])]),
    "embedding_dense_backward": lambda args: iter([(args[1], args[2])]),
    "nll_loss_forward": lambda args: iter([(args[1], args[0].meta["val"].shape[-1])]),
    "nll_loss2d_forward": lambda args: iter([(args[1], args[0].meta["val"].shape[1])]),
    "index": _of_each_dim,
    "index_put": _of_each_dim,
    **dict.fromkeys(
        ("gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add"),
        _along_dim,
    ),
}


def rows_read(node: fx.Node) -> Iterator[tuple[Any, int]]:
    """Yield (indices, rows) for a node's operands that look rows up."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in _READERS:
        yield from _READERS[name](node.args)
