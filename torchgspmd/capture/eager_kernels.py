"""Ask PyTorch's kernels, while capturing, about operands without elements and of several dtypes.

    y = x[:0] @ w                 y is an empty tensor, and no operation computes it
    torch.polar(float32, float64) refused, though a decomposition would take it

Fake tensors skip some of the kernels' checks, and some formulas divide by a size of 0. So the
kernel itself runs, on zeros for operands without elements, on ones for operands of several dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..compat.private_apis import OpOverload
from ..compat.private_apis import _pytree as pytree
from .draws import draws
from .trace_context import at_once

_MOST = 1 << 20  # elements of the operands for which a kernel runs while capturing


def has_no_elements(*tensors: Tensor) -> bool:
    """Return whether one of these tensors has a dimension of size 0, which no run changes."""
    return any(isinstance(n, int) and n == 0 for t in tensors for n in t.shape)


def are_without_elements(results: object) -> bool:
    """Return whether an operation returned tensors, and none of them has elements."""
    found = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
    return bool(found) and all(t.layout is torch.strided and has_no_elements(t) for t in found)


def ask_kernel(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Return an operation's results if they all are without elements, else None.

    Raises the kernel's error if it refuses operands without elements, or of these dtypes.
    """
    if func.namespace != "aten" or func.is_view or func._schema.is_mutable or draws(func):
        return None
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if has_no_elements(*tensors):
        return _of_zeros(func, leaves, tree)
    if len({t.dtype for t in tensors if _is_float(t)}) > 1 and not any(
        type(leaf) in (int, torch.SymInt) for leaf in leaves
    ):
        # One element each: of operations without sizes among their arguments.
        kinds = [(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        _check_dtypes(func, tuple(kinds), tree, tensors[0].device)
    return None


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _of_zeros(func: OpOverload, leaves: Sequence[Any], tree: Any) -> Any:
    """Run a kernel on zeros; return its results if they all are without elements, else None."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [n for t in tensors for n in t.shape]
    # A kernel may refuse zeros as indices, and sizes of a run have no numbers.
    if any(0 not in t.shape and not _is_float(t) for t in tensors) or not all(
        isinstance(n, int) for n in (*sizes, *(x for x in leaves if isinstance(x, torch.SymInt)))
    ):
        return None
    if sum(t.numel() for t in tensors) > _MOST:
        return None
    with at_once(), torch.no_grad():
        real = [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(real, tree)
        try:
            results = func(*args, **kwargs)
        except torch.linalg.LinAlgError:  # of the zeros
            return None
    return results if are_without_elements(results) else None


@lru_cache(maxsize=4096)
def _check_dtypes(func: OpOverload, kinds: tuple, tree: Any, device: torch.device) -> None:
    """Run a kernel on one element of each operand. kinds: dtype and dimensions, or an argument."""
    with at_once(), torch.no_grad():
        ones = [
            torch.ones([1] * kind[1], dtype=kind[0], device=device)
            if isinstance(kind, tuple)
            else kind
            for kind in kinds
        ]
        args, kwargs = pytree.tree_unflatten(ones, tree)
        func(*args, **kwargs)
