"""Decompositions for operations without a rule: ours first, then PyTorch's.

addmm(bias, a, b)       einsum("mk,kn->mn", a, b) + bias
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.fake_mode import fake_mode
from ..compat.fx_nodes import drop_unused
from ..compat.operators import aten
from ..compat.private_apis import (
    DispatchKey,
    OpOverload,
    TorchDispatchMode,
    _DisableAutocast,
    _dispatch_has_kernel_for_dispatch_key,
    core_aten_decompositions,
    decomposition_table,
)
from ..compat.private_apis import _pytree as pytree
from .flat_call import FlatCall
from .registry import rule_function
from .rewrites import DECLINED, Declined, SplitRequest, rewrite_of

RENAMED = {
    aten.view.default: aten.reshape.default,  # local shards need not be contiguous
    aten._unsafe_view.default: aten.reshape.default,
}


@cache
def _core() -> dict[Any, Callable]:
    return dict(core_aten_decompositions())


def decomposition_of(op: object, *, splitting: SplitRequest | None = None) -> Callable | None:
    """Return a function that computes an operation by others; None if it is not decomposed.

    splitting: how the rule's replicated factors are sharded, None if they are not.
    """
    if isinstance(op, FlatCall):
        inner = decomposition_of(op.target, splitting=op.cuts(splitting))
        return inner and partial(op.applied, inner)
    if function := rewrite_of("decompose", op):
        return function
    if not isinstance(op, OpOverload) or rule_function(op) and not splitting:
        return None
    if splitting and (function := rewrite_of("split", op)):
        known = {"shards": splitting.shards, "cuts": splitting}
        taken = known.keys() & inspect.signature(function).parameters
        return partial(function, **{name: known[name] for name in taken}) if taken else function
    if op in _core():
        return _core()[op]
    if op in decomposition_table:
        return decomposition_table[op]
    return op.decompose if _is_composite(op) else None


@cache
def _is_composite(op: OpOverload) -> bool:
    return _dispatch_has_kernel_for_dispatch_key(op.name(), DispatchKey.CompositeImplicitAutograd)


def trace(function: Callable, args: tuple, kwargs: dict) -> fx.Graph | Declined:
    """Trace a decomposition into a graph, with a placeholder for each tensor argument, in order.

    Raises ValueError if the function creates a constant tensor, and its own errors.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    inputs: list[Any] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with inputs[0].fake_mode if inputs else fake_mode(), torch.no_grad(), _DisableAutocast():
        recorder = _Recorder()
        tensors = iter([recorder.add_input(_in_mode(t, inputs[0])) for t in inputs])
        a, k = pytree.tree_unflatten(
            [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        )
        with recorder:
            results = function(*a, **k)
    if results is DECLINED:
        return DECLINED
    if isinstance(results, tuple):  # torch 2.11 cannot map over named tuples
        results = tuple(results)
    recorder.graph.output(recorder.nodes_of(results))
    drop_unused(recorder.graph)
    return recorder.graph


def _in_mode(tensor: Any, first: Any) -> Any:
    """Return a fake tensor in the first one's mode; each decomposition's graph has its own."""
    if tensor.fake_mode is first.fake_mode:
        return tensor
    kwargs: Any = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_strided(tensor.shape, tensor.stride(), **kwargs)


class _Recorder(TorchDispatchMode):
    """A mode that records the operations that are called, five times as fast as make_fx."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.entries = fx.Graph(), {}  # tensor's id -> its node, the tensor

    def add_input(self, tensor: Tensor) -> Tensor:
        """Return the tensor as an input of the graph.

        A tensor that is an input already is replaced by another one with its strides.
        """
        if id(tensor) in self.entries:
            tensor = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        return self._record(tensor, self.graph.placeholder("tensor"))

    def nodes_of(self, tree: object) -> Any:
        return pytree.tree_map(
            lambda leaf: self._node(leaf) if isinstance(leaf, Tensor) else leaf, tree
        )

    def _node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.entries:
            raise ValueError("a tensor of values that no argument has")
        return self.entries[id(tensor)][0]

    def _record(self, tensor: Tensor, node: fx.Node) -> Tensor:
        self.entries[id(tensor)] = node, tensor
        node.meta["val"] = tensor
        return tensor

    def __torch_dispatch__(
        self, op: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation on fake tensors, and record its node."""
        kwargs = kwargs or {}
        if op.namespace == "prim":  # asks for a tensor's device
            return op(*args, **kwargs)
        # Under no_grad detach is the value itself, so it gets no node.
        if op is aten.detach.default:
            return self._record(op(*args), self._node(*args))
        if _is_composite(op):
            # The mode is off inside __torch_dispatch__; the composite's parts are to be recorded.
            with self:
                result = op.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        node = self.graph.create_node(
            "call_function", op, *self.nodes_of((args, kwargs)), name=op.overloadpacket.__name__
        )
        result = node.meta["val"] = op(*args, **kwargs)
        if isinstance(result, Tensor):
            self._record(result, node)
        for i, element in enumerate(result if isinstance(result, (tuple, list)) else ()):
            # An element that is None gets a node too, so that later names keep their numbers.
            node_of_element = self.graph.call_function(operator.getitem, (node, i))
            if isinstance(element, Tensor):
                self._record(element, node_of_element)
        return result
