"""Sparse matrices (torch.sparse_coo_tensor) as dense indices and values.

    near @ x            torch.zeros(n, k).index_add(0, rows, values[:, None] * x[columns])

A layout needs a dense tensor. A sparse argument is taken apart into both (object_trees.py). A
sparse tensor that the program creates, or reads from an attribute or variable, carries both beside
it. Entries with one index count as their sum, as in PyTorch. Functions that are not linear in the
entries are therefore not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat.private_apis import _pytree as pytree
from ...compat.private_apis import is_missing
from ...rules.rewrites import DECLINED, Declined, rewrite, rewrite_of
from ..trace_context import at_once, is_capturing
from ..unsupported import check_dense

_PROPERTIES: Any = Tensor  # properties' types are not methods' types


@dataclass(frozen=True)
class Entries:
    """A sparse tensor's indices and values."""

    indices: Tensor  # [dimensions, entries]
    values: Tensor  # [entries]
    shape: tuple[int, ...]
    coalesced: bool = False  # sorted by index, without duplicates

    @staticmethod
    def of(tensor: Tensor) -> Entries:
        """Return a sparse tensor's entries.

        Raises ShardingError if an unsupported function computed the tensor. Entries with values are
        read each time: they may change in place.
        """
        entries = getattr(tensor, "_entries", None)
        if entries is not None:
            return entries
        if type(tensor) is not Tensor or tensor.requires_grad or tensor.dense_dim():
            check_dense("a tensor", tensor)
        return Entries(
            tensor._indices(), tensor._values(), tuple(tensor.shape), tensor.is_coalesced()
        )

    def tensor(self) -> Tensor:
        """Return the sparse tensor; during a capture a stand-in."""
        if is_capturing():
            return stand_in(self)
        sparse = torch.sparse_coo_tensor(self.indices, self.values, self.shape)
        sparse._entries = self  # type: ignore[attr-defined]
        return sparse

    def scaled(self, values: Tensor) -> Tensor:
        """Return a sparse tensor with these values at the same indices."""
        return Entries(self.indices, values, self.shape, self.coalesced).tensor()


def _with_keys(entries: Any) -> Any:
    keys = map(pytree.MappingKey, ("indices", "values"))
    return [*zip(keys, (entries.indices, entries.values))], (entries.shape, entries.coalesced)


if not is_missing(pytree):
    pytree.register_pytree_node(
        Entries,
        lambda e: ([e.indices, e.values], (e.shape, e.coalesced)),
        lambda children, context: Entries(*children, *context),
        flatten_with_keys_fn=_with_keys,
    )


def is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def with_entries(value: Any) -> object:
    """Return a sparse tensor with entries attached; anything else as it is."""
    return (
        Entries.of(value).tensor() if is_sparse(value) and not hasattr(value, "_entries") else value
    )


def body(function: Callable) -> Callable | None:
    """Return a body that computes a function on sparse operands.

    The body declines unsupported calls. Return None if the function itself works.
    """
    name = getattr(function, "__name__", "")
    # Functions and methods share names.
    return (
        rewrite_of("sparse", function)
        or rewrite_of("sparse", name)
        or (None if name in _METADATA_ONLY else lambda *_, **__: DECLINED)
    )


def stand_in(entries: Entries) -> Tensor:
    """Return a sparse tensor without entries, since a trace can have none."""
    with at_once():
        empty = torch.empty(0, dtype=entries.values.dtype, device=entries.values.device)
        sparse = torch.sparse_coo_tensor(
            torch.empty([len(entries.shape), 0], dtype=torch.int64), empty, entries.shape
        )
    sparse._entries = entries  # type: ignore[attr-defined]
    return sparse


def sparse_coo_tensor(
    indices: Any, values: Any, size: Any = None, *, dtype: torch.dtype | None = None, **options: Any
) -> Tensor | Declined:
    """Run torch.sparse_coo_tensor on a value vector, else decline."""
    if (
        not (isinstance(indices, Tensor) and isinstance(values, Tensor) and values.dim() == 1)
        or size is None
        or options.keys() - _CHECKS
    ):
        return DECLINED
    return stand_in(Entries(indices, values.to(dtype or values.dtype), tuple(size)))


@rewrite("sparse", "mm", "matmul", "mv", "_sparse_mm")
def _product(a: Tensor, b: Tensor) -> Any:
    """Multiply by a sparse matrix, as an index_add of scaled rows."""
    if is_sparse(a) and is_sparse(b) or a.dim() != 2 or b.dim() > 2:
        return DECLINED
    if is_sparse(b):
        # a b = (b^T a^T)^T has the sparse matrix first.
        return _product(_transpose(b), a.t()).t()
    entries = Entries.of(a)
    rows, columns = entries.indices.unbind(0)
    values = entries.values if b.dim() == 1 else entries.values[:, None]
    return b.new_zeros(entries.shape[0], *b.shape[1:]).index_add(
        0, rows, values * b.index_select(0, columns)
    )


@rewrite("sparse", "addmm", "_sparse_addmm")
def _addmm(addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> object:
    product = _product(a, b)
    return DECLINED if product is DECLINED else beta * addend + alpha * product


@rewrite("sparse", "linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    product = DECLINED if is_sparse(weight) else _product(x, weight.t())
    return product if product is DECLINED or bias is None else product + bias


@rewrite("sparse", _PROPERTIES.T.__get__, _PROPERTIES.mT.__get__, "t", "transpose")
def _transpose(a: Tensor, dim0: int = 0, dim1: int = 1) -> Any:
    if a.dim() != 2 or dim0 % 2 == dim1 % 2:
        return DECLINED
    entries = Entries.of(a)
    return Entries(entries.indices.flip(0), entries.values, entries.shape[::-1]).tensor()


@rewrite("sparse", "to_dense")
def _to_dense(a: Tensor, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    entries = Entries.of(a)
    values = entries.values.to(dtype or entries.values.dtype)
    return values.new_zeros(entries.shape).index_put(
        entries.indices.unbind(0), values, accumulate=True
    )


@rewrite("sparse", "mul", "multiply")
def _scale(a: Any, b: Any) -> Tensor | Declined:
    """Multiply by a number or a dense tensor."""
    a, b = (a, b) if is_sparse(a) else (b, a)
    entries = Entries.of(a)
    if is_sparse(b):
        return DECLINED
    if isinstance(b, Tensor) and b.dim():
        b = b.expand(entries.shape)[entries.indices.unbind(0)]
    return entries.scaled(entries.values * b)


@rewrite("sparse", "div", "true_divide")
def _divide(a: Any, b: Any) -> Tensor | Declined:
    return (
        DECLINED
        if not is_sparse(a) or isinstance(b, Tensor) and b.dim()
        else Entries.of(a).scaled(Entries.of(a).values / b)
    )


@rewrite("sparse", "add")
def _add(a: Any, b: Any) -> Tensor | Declined:
    """Add two sparse tensors, or scatter a sparse one into a dense one."""
    first = Entries.of(a if is_sparse(a) else b)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
        return DECLINED
    if is_sparse(a) and is_sparse(b):
        # Entries with one index count as their sum, so joining the lists adds.
        indices, values = (
            torch.cat(both, -1)
            for both in zip(*((e.indices, e.values) for e in (first, Entries.of(b))))
        )
        return Entries(indices, values, first.shape).tensor()
    return (b if is_sparse(a) else a).index_put(
        first.indices.unbind(0), first.values, accumulate=True
    )


@rewrite("sparse", "sum", "_sparse_sum")
def _sum(a: Tensor, dim: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    entries = Entries.of(a)
    values = entries.values.to(dtype or entries.values.dtype)
    if dim is None:
        return values.sum()
    summed = {d % a.dim() for d in ((dim,) if isinstance(dim, int) else dim)}
    remaining = [d for d in range(a.dim()) if d not in summed]
    return (
        Entries(
            entries.indices[remaining], values, tuple(entries.shape[d] for d in remaining)
        ).tensor()
        if remaining
        else values.sum()
    )


@rewrite("sparse", _PROPERTIES.data.__get__, "detach")
def _detach(a: Tensor) -> Tensor:
    return Entries.of(a).scaled(Entries.of(a).values.detach())


@rewrite("sparse", "to")
def _cast(a: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return Entries.of(a).scaled(Entries.of(a).values.to(*args, **kwargs))


def _cast_to(dtype: torch.dtype) -> Callable:
    return lambda a: _cast(a, dtype)


def _coalesced_field(part: str) -> Callable:
    def body(a: Tensor) -> Any:
        entries = Entries.of(a)
        return getattr(entries, part) if entries.coalesced else DECLINED

    return body


_CHECKS = {"check_invariants", "is_coalesced", "device"}
_METADATA_ONLY = {
    "__get__",
    "size",
    "dim",
    "ndimension",
    "__len__",
    "numel",
    "is_floating_point",
    "is_complex",
    "sparse_dim",
    "dense_dim",
    "is_coalesced",
    "get_device",
    "element_size",
    "is_same_size",
}


rewrite("sparse", "coalesce", "cpu")(lambda a: a)
rewrite("sparse", "_indices")(lambda a: Entries.of(a).indices)
rewrite("sparse", "_values")(lambda a: Entries.of(a).values.detach())
rewrite("sparse", "_nnz")(lambda a: len(Entries.of(a).values))
rewrite("sparse", "indices")(_coalesced_field("indices"))
rewrite("sparse", "values")(_coalesced_field("values"))
rewrite("sparse", "neg")(lambda a: _scale(a, -1))
rewrite("sparse", "type_as")(lambda a, b: _cast(a, b.dtype))
rewrite("sparse", "float")(_cast_to(torch.float32))
rewrite("sparse", "double")(_cast_to(torch.float64))
rewrite("sparse", "half")(_cast_to(torch.float16))
rewrite("sparse", "bfloat16")(_cast_to(torch.bfloat16))
