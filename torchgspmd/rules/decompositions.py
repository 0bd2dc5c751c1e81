"""How an operation without a rule is expressed by operations that have one: our decompositions,
then PyTorch's tables.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import aten
from ..compat.private_apis import (
    DispatchKey,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    _DisableAutocast,
    _dispatch_has_kernel_for_dispatch_key,
    core_aten_decompositions,
    decomposition_table,
)
from ..compat.private_apis import _pytree as pytree
from .registry import BLOCKWISE, DECOMPOSITIONS, SPLITS, rule_function

RENAMED = {
    aten.view.default: aten.reshape.default,  # local parts need not be contiguous
    aten._unsafe_view.default: aten.reshape.default,
}


@cache
def _core() -> dict[Any, Callable]:
    return dict(core_aten_decompositions())


def decomposition_of(op: Any, *, splitting: int = 0) -> Callable | None:
    """A function that computes the operation by others; None if it stands for itself.

    splitting: of an operation with a rule whose `whole` factors are sharded, over so many devices
    (1: not known).
    """
    if op in DECOMPOSITIONS:
        return DECOMPOSITIONS[op]
    if not isinstance(op, OpOverload):
        return None
    if rule_function(op) and not splitting:
        return None
    if splitting and SPLITS.get(op):
        return partial(SPLITS[op], shards=int(splitting)) if op in BLOCKWISE else SPLITS[op]
    if op in _core():
        return _core()[op]
    if op in decomposition_table:
        return decomposition_table[op]
    return op.decompose if _is_composite(op) else None


@cache
def _is_composite(op: OpOverload) -> bool:
    return _dispatch_has_kernel_for_dispatch_key(op.name(), DispatchKey.CompositeImplicitAutograd)


def trace(function: Callable, args: tuple, kwargs: dict) -> fx.Graph:
    """The graph of a decomposition on fake tensors: a placeholder for every tensor among the
    arguments, in order.

    Raises what the function does, and NotImplementedError if it makes a tensor of values of its
    own.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with given[0].fake_mode if given else FakeTensorMode(), torch.no_grad(), _DisableAutocast():
        recorder = _Recorder()
        tensors = iter([recorder.place(t) for t in given])
        a, k = pytree.tree_unflatten(
            [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        )
        with recorder:
            made = function(*a, **k)
    recorder.graph.output(recorder.nodes_of(made))
    recorder.graph.eliminate_dead_code()
    return recorder.graph


class _Recorder(TorchDispatchMode):
    """Writes down the operations that are called. What make_fx does besides takes five times as
    long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.made = fx.Graph(), {}  # node and tensor, by the tensor's id

    def place(self, tensor: Tensor) -> Tensor:
        """An input: the tensor, or another one if it is an input already; one tensor twice stands
        for any two.
        """
        if id(tensor) in self.made:
            tensor = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        return self._keep(tensor, self.graph.placeholder("tensor"))

    def nodes_of(self, tree: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: self._node(leaf) if isinstance(leaf, Tensor) else leaf, tree
        )

    def _node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.made:
            raise NotImplementedError("a tensor of values that are known only here")
        return self.made[id(tensor)][0]

    def _keep(self, tensor: Tensor, node: fx.Node) -> Tensor:
        self.made[id(tensor)] = node, tensor
        node.meta["val"] = tensor
        return tensor

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "prim":  # which device a tensor is on
            return op(*args, **kwargs)
        if op is aten.detach.default:
            return self._keep(op(*args), self._node(*args))
        if _is_composite(op):
            with self:
                result = op.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        node = self.graph.create_node(
            "call_function", op, *self.nodes_of((args, kwargs)), name=op.overloadpacket.__name__
        )
        result = node.meta["val"] = op(*args, **kwargs)
        if isinstance(result, Tensor):
            self._keep(result, node)
        for i, part in enumerate(result if isinstance(result, (tuple, list)) else ()):
            taken = self.graph.call_function(
                operator.getitem, (node, i)
            )  # of None, too: names count on
            if isinstance(part, Tensor):
                self._keep(part, taken)
        return result
