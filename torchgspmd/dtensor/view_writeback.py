"""Views of DTensors that share no memory with them: what is written into such a part is written
into the whole, too.

    w[3] = 0, w[3].zero_()
    for q in w.chunk(3): nn.init.xavier_uniform_(q)
    for row in w: row /= row.norm()

Where a sharded dimension is cut, torch's DTensor gathers; the part then knows what it is a part of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..compat.operators import aten
from ..compat.private_apis import OpOverload
from ..errors import ShardingError, user_line
from .op_handlers import as_before, handle, is_ours
from .replicated_fallback import check_read_by_all, is_cut, like, on_whole, whole

_SETITEM, _COPY = Tensor.__setitem__, Tensor.copy_
_CUTS = (
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.diagonal.default,
)
_RESHAPES = (
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
)  # methods: what others do with DTensors calls the operations
_TURNS = (
    "t_",
    "transpose_",
    "swapaxes_",
    "swapdims_",
    "squeeze_",
    "unsqueeze_",
)  # in place, of the shape alone
_OF_METADATA = {
    *_TURNS,
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
_CHANGES = [
    name
    for name in dir(Tensor)
    if name.endswith("_") and not name.startswith("_") and name not in _OF_METADATA
]
_CHANGES += [
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")
]


def install_views() -> None:
    """From here on, for DTensors on the meshes of parallelize."""
    handle(dict.fromkeys(_CUTS, _cut))
    DTensor.__setitem__ = _setitem
    for name in _RESHAPES:
        setattr(DTensor, name, _reshaping(getattr(Tensor, name)))
    for name in ("T", "mT"):
        setattr(DTensor, name, property(_reshaping(getattr(Tensor, name).__get__)))
    for name in _CHANGES:
        setattr(DTensor, name, _changing(getattr(Tensor, name)))
    for name in _TURNS:
        setattr(DTensor, name, _turning(name.removesuffix("_")))


def become(tensor: DTensor, other: DTensor) -> None:
    """Gives a DTensor the shape, the layout and the memory of another one."""
    Tensor.data.__set__(tensor, other)
    tensor._local_tensor, tensor._spec = other._local_tensor.detach(), other._spec


def _turning(name: str) -> Callable:
    """A method that turns a DTensor in place, which keeps the shape that it was made with
    otherwise.
    """
    method = getattr(Tensor, f"{name}_")

    @functools.wraps(method)
    def turning(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        if not is_ours(self) or torch.is_grad_enabled() and self.requires_grad:
            return method(self, *args, **kwargs)
        become(self, getattr(self, name)(*args, **kwargs))
        if hasattr(self, "_part_of"):
            owner, view = self._part_of
            self._part_of = owner, lambda values: getattr(view(values), name)(*args, **kwargs)
        return self

    return turning


def _cut(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    base, spec = args[0], args[0]._spec
    if torch.__version__ < "2.10":
        base._spec = copy(spec)  # the part gets it, with the part's shape
    try:
        found = as_before(op, args, kwargs)
    except RuntimeError:  # of a layout that is not had so
        if not (is_ours(base) and is_cut(base)):
            raise
        found = on_whole(op, args, kwargs, base)
    finally:
        base._spec = spec
    if _loses_parts(base):
        for i, part in enumerate([found] if isinstance(found, Tensor) else found):
            _remember(part, base, lambda values, i=i: _nth(op(values, *args[1:], **kwargs), i))
    return found


def _nth(found: Any, i: int) -> Tensor:
    return found if isinstance(found, Tensor) else found[i]


def _reshaping(method: Callable) -> Callable:
    @functools.wraps(method)
    def reshaping(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        if not _loses_parts(self):
            return method(self, *args, **kwargs)
        try:
            found = method(self, *args, **kwargs)
        except RuntimeError:  # what is cut does not become that
            found = method(_replicated(self), *args, **kwargs)
        _remember(found, self, lambda values: method(values, *args, **kwargs))
        return found

    return reshaping


def _loses_parts(base: DTensor) -> bool:
    """Whether views of it may share no memory with it, or with what it is a part of."""
    return is_ours(base) and (is_cut(base) or hasattr(base, "_part_of"))


def _remember(part: DTensor, base: DTensor, view: Callable[[Tensor], Tensor]) -> None:
    """view: the part of whole values. Of a part of a part, what both are parts of: where one is a
    copy, so it is there.
    """
    if hasattr(base, "_part_of"):
        owner, before = base._part_of
        part._part_of = owner, lambda values: view(before(values))
    elif not _share_memory(part, base):
        one = torch.empty_strided(base.shape, base.stride(), device="meta")
        if _storage(view(one)) == _storage(one):  # on one device it is no copy
            part._part_of = base, view


def _changing(method: Callable) -> Callable:
    """A method that changes a DTensor in place, and with it what it is a part of."""

    @functools.wraps(method)
    def changing(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if isinstance(self, DTensor):
            _spread(self)
        return result

    return changing


def _spread(part: DTensor) -> None:
    """Changes what it is a part of as it has been changed."""
    owner, view = getattr(part, "_part_of", (None, None))
    if owner is None:
        return
    if torch.is_grad_enabled() and (owner.requires_grad or part.requires_grad):
        raise ShardingError(
            "a part of a sharded tensor is changed in place while gradients are recorded",
            where=user_line(),
            why="the part was gathered, and autograd would not know that the whole has changed",
            fix="assign to entries (y[..., 0] = 0), which it knows of, or make a new tensor (torch.where, torch.cat)",
        )
    values = whole(owner)
    view(values).copy_(whole(part))
    _COPY(owner, like(owner, values))


def _share_memory(one: DTensor, other: DTensor) -> bool:
    return _storage(one._local_tensor) == _storage(other._local_tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _setitem(self: DTensor, index: Any, value: Any) -> None:
    mask = (
        isinstance(index, DTensor)
        and index.dtype is torch.bool
        and index.shape == self.shape
        and not isinstance(value, Tensor)
    )
    if not (mask or is_cut(self)):
        _SETITEM(self, index, value)
    elif mask:
        _COPY(self, torch.where(index, value, self))  # nothing is sent
    else:
        check_read_by_all(self)
        entries = tuple(_replicated(e) for e in (index if isinstance(index, tuple) else (index,)))
        values = _replicated(self).clone()
        _SETITEM(values, entries, _replicated(value))
        _COPY(
            self,
            values.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in self.placements]
            ),
        )
    _spread(self)


def _replicated(value: Any) -> Any:
    return (
        value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        if isinstance(value, DTensor)
        else value
    )
