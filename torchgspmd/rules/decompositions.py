"""Decompositions for operations without a rule: ours first, then PyTorch's.

addmm(bias, a, b)       einsum("mk,kn->mn", a, b) + bias
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.fx_nodes import drop_unused, fake_mode
from ..compat.operators import aten, draws
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
from .custom_ops.updates import adam_formula
from .flat_call import FlatCall
from .ops import uneven_reshape  # noqa: F401 (registers its operations)
from .ops.pointwise import named
from .registry import rule_function
from .rewrites import DECLINED, Declined, SplitRequest, rewrite, rewrite_of

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


# Decompositions for XLA's partitioner.
#
# It has good rules for einsums, sums, slices and elementwise operations. It gathers whole tensors
# for a fused norm, an attention with merged batch dimensions, or a roll.


ours = torch.ops.torchgspmd

NORMS = named("""
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm native_batch_norm_backward
""")


def unpartitioned_of(op: object, *, splitting: SplitRequest | None = None) -> Callable | None:
    """Return a decomposition as decomposition_of does. XLA draws random numbers itself."""
    function = rewrite_of("xla", op)
    if draws(op):
        return function
    # Fused norms are always split: XLA's partitioner would gather their operand.
    in_any_case = SplitRequest() if op in NORMS else None
    return function or decomposition_of(op, splitting=splitting or in_any_case)


@rewrite("xla", ours.adam.default)
def _adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    # By plain operations: XLA does not know ours.
    return adam_formula(p, g, m, v, None, *rest)[:3]


@rewrite("xla", aten.roll.default)
def _roll(x: Tensor, shifts: list[int], dims: Sequence[int] = ()) -> Tensor:
    """Compute roll by two slices and a cat, in which XLA sees a shift between neighbours."""
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims):
        size = x.shape[dim]
        cut = size - shift % size if size else 0
        if cut != size:
            x = torch.cat([x.narrow(dim, cut, size - cut), x.narrow(dim, 0, cut)], dim)
    return x


@rewrite("xla", aten.scatter.src)
def _scatter(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | Declined:
    """Write one element a row by comparison, as in the gradient of a cross entropy.

    XLA's partitioner aborts on a scatter whose rows are sharded unevenly.
    """
    place = _places(x, dim, index, source)
    return DECLINED if place is None else torch.where(place == index, source, x)


@rewrite("xla", aten.scatter_add.default)
def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | Declined:
    place = _places(x, dim, index, source)
    return DECLINED if place is None else x + torch.where(place == index, source, 0)


def _places(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | None:
    """Return 0, 1, ... along dim if index has one element for every row along it, else None."""
    if not x.dim():
        return None
    dim %= x.dim()
    row = [1 if d == dim else size for d, size in enumerate(x.shape)]
    if list(index.shape) != row or list(source.shape) != row:
        return None
    place = torch.arange(x.shape[dim], device=x.device)
    return place.view([-1] + [1] * (x.dim() - 1 - dim))


@rewrite("xla", ours.join_rows.default)
def _join_rows(x: Tensor, dim: int) -> Tensor:
    return x.flatten(dim, dim + 1)


@rewrite("xla", ours.split_rows.default)
def _split_rows(x: Tensor, dim: int, width: int) -> Tensor:
    return x.unflatten(dim, (-1, width))


@rewrite("xla", aten.native_dropout.default)
def _native_dropout(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = aten.bernoulli.p(torch.zeros_like(x), 1 - p)
    return x * (mask / (1 - p)), mask.bool()


for _op, _draw in (
    (aten.rand_like.default, aten.rand.default),
    (aten.randn_like.default, aten.randn.default),
):

    @rewrite("xla", _op)
    def _draw_like(
        x: Tensor, draw: Any = _draw, dtype: Any = None, device: Any = None, **_: object
    ) -> Tensor:
        return draw(list(x.shape), dtype=dtype or x.dtype, device=device or x.device)
