"""Whose memory a value in one device's program has: its own, or that of a value it views.

    %q = getitem(%unbind, 0);  %t = transpose(%q, 1, 2)     # the memory of what %unbind takes apart
    %r = reshape(%t, [b, s, d])                             # its own: the rows of %t are apart

Views are computed on the meta device, from operands with their own strides, so that PyTorch tells
which results are views. All else is taken to be allocated, and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...compat.private_apis import OpOverload
from ...rules.custom_ops.costs import WORKSPACE


class Strided(NamedTuple):
    """A tensor without its elements. strides: None if it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        return cls(tuple(x.shape), x.dtype, None if x.is_contiguous() else x.stride())

    def meta(self) -> Tensor:
        empty = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return empty if self.strides is None else empty.as_strided(self.shape, self.strides)


class Aliasing:
    """The memory that values use, asked for in an order in which operands come first."""

    def __init__(self) -> None:
        self._owners: dict[fx.Node, fx.Node] = {}
        self._views: dict[fx.Node, Strided | tuple[Strided, ...]] = {}

    def owner(self, node: fx.Node) -> fx.Node:
        """Return the value whose memory a node's result is in: the node, if it allocates any."""
        if node not in self._owners:
            self._owners[node] = self._owner(node)
        return self._owners[node]

    def workspace(self, node: fx.Node) -> int:
        """Return the bytes that an operation allocates besides its results."""
        if (count := WORKSPACE.get(node.target)) is None or not _has_known_sizes(node):
            return node.meta.get("bytes", 0)
        return _bytes(count, *self._arguments(node))

    def _owner(self, node: fx.Node) -> fx.Node:
        if node.target is getitem:
            if (parts := self._views.get(node.args[0])) is None:
                return node
            self._views[node] = parts[node.args[1]]
            return self.owner(node.args[0])
        if not _may_be_view(node):
            return node
        is_view, self._views[node] = _view(node.target, *self._arguments(node))
        return self.owner(node.args[0]) if is_view else node

    def _arguments(self, node: fx.Node) -> tuple[Any, Any]:
        """Return a node's arguments, a Strided in place of each tensor."""
        args, kwargs = fx.map_arg((node.args, tuple(node.kwargs.items())), self._value)
        return args, kwargs

    def _value(self, node: fx.Node) -> Any:
        return self._views.get(node) or Strided(tuple(node.meta["shape"]), node.meta["dtype"])


def _has_known_sizes(node: fx.Node) -> bool:
    """Return True if operands and result are tensors whose sizes do not depend on values."""
    values = (node, *node.all_input_nodes)
    return not any(x.meta.get("unknown") for x in values) and all(
        x.meta.get("dtype") is not None and "shape" in x.meta for x in node.all_input_nodes
    )


def _may_be_view(node: fx.Node) -> bool:
    """Return True for an operation whose result may share memory with its first operand."""
    if not isinstance(node.target, OpOverload) or not node.all_input_nodes:
        return False
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None and _has_known_sizes(node)


@lru_cache(maxsize=4096)  # like layers have equal ones
def _view(op: Any, args: Any, kwargs: Any) -> tuple[bool, Strided | tuple[Strided, ...]]:
    """Return whether a result views the first operand, and the result."""
    args, kwargs = _on_meta((args, kwargs))
    result = op(*args, **dict(kwargs))
    several = isinstance(result, Sequence)
    is_view = _memory(result[0] if several else result) == _memory(args[0])
    return is_view, tuple(map(Strided.of, result)) if several else Strided.of(result)


@lru_cache(maxsize=4096)
def _bytes(count: Callable[..., int], args: Any, kwargs: Any) -> int:
    args, kwargs = _on_meta((args, kwargs))
    return count(*args, **dict(kwargs))


def _on_meta(arguments: object) -> Any:
    if isinstance(arguments, Strided):
        return arguments.meta()
    return tuple(map(_on_meta, arguments)) if isinstance(arguments, tuple) else arguments


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
