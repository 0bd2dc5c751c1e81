"""Ask PyTorch's kernels, while capturing, about operands that fake tensors do not check.

    y = x[:0] @ w                   y is an empty tensor, and no operation computes it
    torch.polar(float32, float64)   refused, though a decomposition would take it
    torch.add(x[:3], 1, out=x[1:])  refused, though a program without shared memory would take it

Fake tensors skip some of the kernels' checks, and some formulas divide by a size of 0. So the
kernel itself runs, on zeros for operands without elements, on ones for operands of several dtypes
and for what it writes into.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import OPERATOR_ERRORS, draws
from ..compat.private_apis import FunctionalTensor, OpOverload
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .trace_context import at_once

Dtypes = tuple[torch.dtype | None, ...]

_MOST = 1 << 20  # elements of the operands for which a kernel runs while capturing


def has_no_elements(*tensors: Tensor) -> bool:
    """Return whether one of these tensors has a dimension of size 0, which no run changes."""
    return any(isinstance(n, int) and n == 0 for t in tensors for n in t.shape)


def are_without_elements(results: object) -> bool:
    """Return whether an operation returned tensors, and none of them has elements."""
    found = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
    return bool(found) and all(t.layout is torch.strided and has_no_elements(t) for t in found)


def ask_kernel(func: OpOverload, args: tuple, kwargs: dict) -> tuple[Any, Dtypes]:
    """Return an operation's results if they all are without elements, else None; and their dtypes.

    The dtypes are given for operands of several dtypes; None stands for a result that is no tensor.
    Raises the kernel's error if it refuses operands without elements, or of these dtypes.
    """
    if func.namespace != "aten" or func.is_view:
        return None, ()
    if func._schema.is_mutable:
        _check_written(func, args, kwargs)
        return None, ()
    if draws(func):
        return None, ()
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if has_no_elements(*tensors):
        return _of_zeros(func, leaves, tree), ()
    dtypes = {t.dtype for t in tensors if _is_float(t)}
    # Numbers of one byte have scales, whose sizes depend on those of other operands.
    if (
        len(dtypes) > 1
        and min(d.itemsize for d in dtypes) > 1
        and not any(type(leaf) in (int, torch.SymInt) for leaf in leaves)
    ):
        # One element each: of operations without sizes among their arguments.
        kinds = [(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return None, _result_dtypes(func, tuple(kinds), tree, tensors[0].device)
    return None, ()


def with_dtypes(results: Any, dtypes: Dtypes) -> Any:
    """Return an operation's results in the kernel's dtypes: fake tensors may have others."""
    leaves, tree = pytree.tree_flatten(results)
    if len(leaves) != len(dtypes):
        return results
    cast = [
        x.to(dtype) if isinstance(x, Tensor) and dtype not in (None, x.dtype) else x
        for x, dtype in zip(leaves, dtypes)
    ]
    return pytree.tree_unflatten(cast, tree)


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
def _result_dtypes(func: OpOverload, kinds: tuple, tree: Any, device: torch.device) -> Dtypes:
    """Run a kernel on one element of each operand; return the dtypes of its results.

    kinds: dtype and dimensions, or an argument.
    """
    with at_once(), torch.no_grad():
        ones = [
            torch.ones([1] * kind[1], dtype=kind[0], device=device)
            if isinstance(kind, tuple)
            else kind
            for kind in kinds
        ]
        args, kwargs = pytree.tree_unflatten(ones, tree)
        results = pytree.tree_leaves(func(*args, **kwargs))
        return tuple(x.dtype if isinstance(x, Tensor) else None for x in results)


# ---------------------------------------------------------------------------- what a kernel writes


def _check_written(func: OpOverload, args: tuple, kwargs: dict) -> None:
    """Raise the kernel's error about the tensors that it writes: dtype, size, shared memory."""
    if torch.Tag.inplace_view in func.tags:
        return
    parameters = func._schema.arguments
    given = {p.name: p for p in parameters if p.alias_info is not None and p.alias_info.is_write}
    named = {**dict(zip((p.name for p in parameters), args)), **kwargs}
    written = [t for name in given for t in _tensors(named.get(name))]
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [*_tensors(leaves)]
    if any(t.layout is not torch.strided for t in tensors):
        return
    # First: a comparison of sizes that only a run knows has no outcome.
    if not all(isinstance(n, int) for t in tensors for n in _place(t)):
        return
    if not any(p.is_out for p in given.values()) and not _share_memory(written, tensors):
        return
    if all(isinstance(leaf, _PLAIN) for leaf in leaves) and sum(map(_span, tensors)) <= _MOST:
        _run_on_ones(func, leaves, tree)


_PLAIN = (Tensor, int, float, bool, complex, str, type(None), torch.dtype)


def _tensors(value: object) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _place(x: Tensor) -> tuple[Any, ...]:
    return (*x.shape, *x.stride(), x.storage_offset())


def _span(x: Tensor) -> Any:
    """Return the elements of the memory from its beginning to the tensor's last element."""
    if not x.numel():
        return x.storage_offset()
    return x.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))


def _memory(x: Tensor) -> int:
    return (x.elem if isinstance(x, FunctionalTensor) else x).untyped_storage()._cdata


def _share_memory(written: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Return whether a written tensor has elements, or memory with others, in another way."""
    return any(
        any(s == 0 and n != 1 for n, s in zip(out.shape, out.stride()))
        or any(_memory(x) == _memory(out) and _place(x) != _place(out) for x in tensors)
        for out in written
    )


def _run_on_ones(func: OpOverload, leaves: Sequence[Any], tree: Any) -> None:
    """Run a kernel on ones, and zeros for integers, which share memory as the operands do."""
    memories: dict[tuple[int, torch.dtype], Tensor] = {}
    keys = {i: (_memory(x), x.dtype) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    with at_once(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for i, key in keys.items():
            size = max(_span(leaves[k]) for k, other in keys.items() if other == key)
            if key not in memories:
                make = torch.ones if _is_float(leaves[i]) else torch.zeros
                memories[key] = make(size, dtype=key[1], device=leaves[i].device)
        real = [
            memories[keys[i]].as_strided(x.shape, x.stride(), x.storage_offset())
            if i in keys
            else x
            for i, x in enumerate(leaves)
        ]
        args, kwargs = pytree.tree_unflatten(real, tree)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a resized result
            try:
                func(*args, **kwargs)
            except (torch.linalg.LinAlgError, NotImplementedError):  # of these values
                pass
            except RuntimeError as error:
                if "ZeroDivisionError" not in str(error):
                    raise


# ------------------------------------------------------------------------- what a pass cannot take


def refused_operation(graph: fx.Graph) -> ShardingError | None:
    """Return the error for a captured operation that PyTorch's kernel refuses, if there is one.

    For a graph that a pass cannot take: the kernel may refuse shapes that fake tensors let through.
    """
    for node in graph.nodes:
        func = node.target
        if node.op != "call_function" or not isinstance(func, OpOverload):
            continue
        if func.namespace != "aten" or func._schema.is_mutable or draws(func):
            continue
        leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
        leaves = [x.meta.get("val") if isinstance(x, fx.Node) else x for x in leaves]
        tensors = [*_tensors(leaves)]
        if any(t.layout is not torch.strided for t in tensors):
            continue
        if not all(isinstance(n, int) for t in tensors for n in _place(t)):
            continue
        if not all(isinstance(x, _PLAIN) for x in leaves) or sum(map(_span, tensors)) > _MOST:
            continue
        try:
            _run_on_ones(func, leaves, tree)
        except OPERATOR_ERRORS as error:
            text = str(error).partition("\n")[0]
            return ShardingError(
                f"PyTorch refuses {func.name().removeprefix('aten::')}: {text}",
                where=node.meta.get("source"),
                fix="correct the call; eager PyTorch raises the same error",
            )
    return None
