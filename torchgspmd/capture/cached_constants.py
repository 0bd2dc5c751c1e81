"""Values for a trace's constants that user code caches.

    @functools.lru_cache
    def causal(n):                                          # called by a forward
        return torch.ones(n, n).tril()

Values computed in a trace are unknown. A tensor gets the values that it would have had if it
depends on no input and user code still references it after the trace.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.fx_nodes import reached
from ..compat.operators import draws


class CachedConstants:
    """The trace's tensors that depend on none of its inputs, by weak references."""

    def __init__(self, traced: type[Tensor]) -> None:
        self.traced = traced
        self.alive: dict[int, weakref.ref] = {}
        # ids of tensors with values that were passed to functions
        self.operands: set[int] = set()

    def record_operands(self, args: tuple, kwargs: dict) -> None:
        """Record a call's operands that are no tensors of the trace."""
        self.operands.update(
            id(x) for x in _tensors((*args, *kwargs.values())) if not isinstance(x, self.traced)
        )

    def record_result(self, args: tuple, kwargs: dict, result: object) -> None:
        """Record a call's results if all its traced operands are constants."""
        if any(
            id(x) not in self.alive
            for x in _tensors((*args, *kwargs.values()))
            if isinstance(x, self.traced)
        ):
            return
        for tensor in _tensors((result,)):
            if isinstance(tensor, self.traced) and id(tensor) not in self.alive:
                # A dead tensor is forgotten, since its id may come again.
                self.alive[id(tensor)] = weakref.ref(
                    tensor, lambda _, key=id(tensor): self.alive.pop(key, None)
                )

    def tensors(self) -> list[Tensor]:
        """Return the constants that are still alive."""
        return [tensor for ref in [*self.alive.values()] if (tensor := ref()) is not None]

    def fill_values(self, nodes: dict[int, fx.Node], owner: torch.nn.Module) -> None:
        """Give values to the constants that are still alive.

        nodes: the node that computes each constant, by the constant's id.
        """
        constants = [(ref(), nodes[key]) for key, ref in self.alive.items() if key in nodes]
        # swap_tensors below refuses tensors that have weak references.
        self.alive.clear()
        values: dict[fx.Node, Any] = {}
        for tensor, node in constants:
            if tensor is not None and _is_computable(node) and tensor._use_count() == 1:
                with torch.no_grad():
                    torch.utils.swap_tensors(tensor, _evaluate(node, owner, values).clone())


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from _tensors(value)


def _is_computable(node: fx.Node) -> bool:
    """Return whether the node depends on no input and no random number."""
    return not any(n.op == "placeholder" or draws(n.target) for n in reached([node]))


def _evaluate(node: fx.Node, owner: torch.nn.Module, values: dict[fx.Node, object]) -> Any:
    """Compute a node's value, and its operands' values, into the table."""
    if node not in values:
        if node.op == "get_attr":
            values[node] = getattr(owner, node.target)
        else:
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda n: _evaluate(n, owner, values)
            )
            values[node] = node.target(*args, **kwargs)
    return values[node]
