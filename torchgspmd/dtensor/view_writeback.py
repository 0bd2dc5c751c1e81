"""Write-back: in-place changes to a DTensor's view change its base, too.

    w[3] = 0, w[3].zero_()
    for q in w.chunk(3): nn.init.xavier_uniform_(q)
    for row in w: row /= row.norm()

torch's DTensor gathers to slice a sharded dimension, so the view shares no memory with its base.
Such a view records its base in `_view_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..compat.operators import aten
from ..compat.patches import wrapping
from ..compat.private_apis import OpOverload
from ..errors import ShardingError
from .local_lists import change_local, is_elementwise_method
from .ours import as_before, is_ours
from .replicated_fallback import (
    check_read_by_all,
    distribute_like,
    full_tensor,
    is_distributed,
    run_replicated,
)

_COPY, _DATA = Tensor.copy_, cast(Any, Tensor.data)
SLICES = (
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.diagonal.default,
)
RESHAPES = (
    "view",
    "view_as",
    "reshape",
    "flatten",
    "ravel",
    "unflatten",
    "t",
    "transpose",
    "swapaxes",
    "swapdims",
    "permute",
    "movedim",
    "moveaxis",
    "squeeze",
    "unsqueeze",
    "expand",
)  # methods; other views of DTensors go through the dispatcher
RESHAPES_IN_PLACE = ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_")
_METADATA_ONLY = {
    *RESHAPES_IN_PLACE,
    "as_strided_",
    "detach_",
    "requires_grad_",
    "rename_",
    "resize_",
    "resize_as_",
    "resize_as_sparse_",
    "set_",
    "share_memory_",
    "sparse_resize_",
    "sparse_resize_and_clear_",
}
MUTATIONS = [
    name
    for name in dir(Tensor)
    if name.endswith("_") and not name.startswith("_") and name not in _METADATA_ONLY
]
MUTATIONS += [
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")
]


def replace_data(tensor: DTensor, other: DTensor) -> None:
    """Give a DTensor another one's shape, layout and memory."""
    _DATA.__set__(tensor, other)
    tensor._local_tensor, tensor._spec = other._local_tensor.detach(), other._spec


@wrapping
def in_place_reshape_method(method: Callable, self: Any, *args: Any, **kwargs: Any) -> DTensor:
    """Return a method such as t_ that also updates a DTensor's shape."""
    if not is_ours(self) or torch.is_grad_enabled() and self.requires_grad:
        return method(self, *args, **kwargs)
    name = method.__name__.removesuffix("_")
    replace_data(self, getattr(self, name)(*args, **kwargs))
    if hasattr(self, "_view_of"):
        owner, view = self._view_of
        self._view_of = owner, lambda values: getattr(view(values), name)(*args, **kwargs)
    return self


def slice_base(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run a slicing operation and record its results' base."""
    base, spec = args[0], args[0]._spec
    if torch.__version__ < "2.10":
        base._spec = copy(spec)  # The view gets this one and changes its shape.
    try:
        results = as_before(op, args, kwargs)
    except RuntimeError:  # The layout has no such slice.
        if not (is_ours(base) and is_distributed(base)):
            raise
        results = run_replicated(op, args, kwargs, base)
    finally:
        base._spec = spec
    if _views_may_copy(base):
        for i, view in enumerate([results] if isinstance(results, Tensor) else results):

            def again(values: Tensor, i: int = i) -> Tensor:
                found = op(values, *args[1:], **kwargs)
                return found if isinstance(found, Tensor) else found[i]

            _record_base(view, base, again)
    return results


@wrapping
def reshape_method(method: Callable, self: DTensor, *args: object, **kwargs: object) -> DTensor:
    """Return a view method that records its result's base."""
    if not _views_may_copy(self):
        return method(self, *args, **kwargs)
    try:
        result = method(self, *args, **kwargs)
    except RuntimeError:  # The sharded layout has no such view.
        result = method(_replicate(self), *args, **kwargs)
    _record_base(result, self, lambda values: method(values, *args, **kwargs))
    return result


def _views_may_copy(base: DTensor) -> bool:
    """Whether a DTensor's views may share no memory with it or with its own base."""
    return is_ours(base) and (is_distributed(base) or hasattr(base, "_view_of"))


def _record_base(part: Any, base: Any, view: Callable[[Tensor], Tensor]) -> None:
    """Record (base, view) in a view that shares no memory; view: maps whole values to the part.

    A view's view records the outermost base.
    """
    if hasattr(base, "_view_of"):
        owner, before = base._view_of
        part._view_of = owner, lambda values: view(before(values))
    elif not _share_memory(part, base):
        # On meta, where the question costs no memory.
        one = torch.empty_strided(base.shape, base.stride(), device="meta")
        if _storage(view(one)) == _storage(one):  # On one device the result is a view, not a copy.
            part._view_of = base, view


@wrapping
def mutation_method(method: Callable, self: DTensor, *args: object, **kwargs: object) -> object:
    """Return an in-place method that also changes a view's base."""
    if is_elementwise_method(method.__name__) and change_local(method, self, args, kwargs):
        return self
    result = method(self, *args, **kwargs)
    _write_back(self)
    return result


def _write_back(part: DTensor) -> None:
    owner, view = getattr(part, "_view_of", (None, None))
    if owner is None or view is None:
        return
    if torch.is_grad_enabled() and (owner.requires_grad or part.requires_grad):
        raise ShardingError.here(
            "a part of a sharded tensor is changed in place while gradients are recorded",
            why="the part was gathered, and autograd would not know that the whole has changed",
            fix="assign to entries (y[..., 0] = 0), which it knows of, "
            "or make a new tensor (torch.where, torch.cat)",
        )
    # The base is gathered again: it may have changed since the view was taken.
    values = full_tensor(owner)
    view(values).copy_(full_tensor(part))
    _COPY(owner, distribute_like(owner, values))


def _share_memory(one: DTensor, other: DTensor) -> bool:
    return _storage(one._local_tensor) == _storage(other._local_tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@wrapping
def setitem_method(setitem: Callable, self: DTensor, index: Any, value: Any) -> None:
    """Return the assignment to entries, also along sharded dimensions."""
    if not is_ours(self):
        return setitem(self, index, value)
    mask = (
        isinstance(index, DTensor)
        and index.dtype is torch.bool
        and index.shape == self.shape
        and not isinstance(value, Tensor)
    )
    if mask:
        _COPY(self, torch.where(index, value, self))  # Nothing is sent.
    elif not is_distributed(self):
        setitem(self, index, value)
    else:
        check_read_by_all(self)
        entries = tuple(_replicate(e) for e in (index if isinstance(index, tuple) else (index,)))
        # A copy: a replicated tensor is its own gathered form.
        values = _replicate(self).clone()
        setitem(values, entries, _replicate(value))
        _COPY(
            self,
            values.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in self.placements]
            ),
        )
    _write_back(self)


def _replicate(value: object) -> Any:
    return (
        value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        if isinstance(value, DTensor)
        else value
    )
