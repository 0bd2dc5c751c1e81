"""How an operation without a rule is expressed by operations that have one: our decompositions, then PyTorch's tables.

PyTorch's tables are a private API (torch._decomp), checked on 2.9.0 and 2.13.0.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .registry import BLOCKWISE, DECOMPOSITIONS, SPLITS, rule_function

RENAMED = {torch.ops.aten.view.default: torch.ops.aten.reshape.default,          # local parts need not be contiguous
           torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default}


@cache
def _core() -> dict[Any, Callable]:
    return dict(core_aten_decompositions())


def decomposition_of(op: Any, *, splitting: int = 0) -> Callable | None:
    """A function that computes the operation by others; None if it stands for itself.

    splitting: of an operation with a rule whose `whole` factors are sharded, over so many devices (1: not known).
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
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
        return op.decompose
    return None


def trace(function: Callable, args: tuple, kwargs: dict) -> fx.Graph:
    """The graph of a decomposition on fake tensors: a placeholder for every tensor among the arguments, in order."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def flat(*given: torch.Tensor) -> Any:
        rest = iter(given)
        a, k = pytree.tree_unflatten([next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)
        return function(*a, **k)
    mode = tensors[0].fake_mode if tensors else FakeTensorMode()
    with mode, torch.no_grad(), fx_traceback.preserve_node_meta(False):
        seen: set[int] = set()                                              # one tensor twice stands for any two
        tensors = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) if id(t) in seen or seen.add(id(t)) else t
                   for t in tensors]
        graph = make_fx(flat)(*tensors).graph
    for node in graph.nodes:
        node.meta.setdefault("val", None)
    graph.eliminate_dead_code()
    return graph
