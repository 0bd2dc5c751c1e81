"""Operations on lists of DTensors, as optimizers take them: one call on lists of local tensors.

DTensor propagates layouts for every listed tensor. For fused ones (fused=True) it does so at every
step, 2 ms for 70 parameters; for the others (foreach=True) at the first one, 0.6 s. An elementwise
operation on tensors with one layout needs no propagation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..compat.operators import aten, c10d
from ..compat.private_apis import OpOverload
from .op_handlers import without_pending
from .ours import as_before, groups_of_ours
from .waits import meet

STEPS = tuple(
    getattr(packet, overload)
    for packet in (
        aten._fused_adam_,
        aten._fused_adamw_,
        aten._fused_adagrad_,
        aten._fused_sgd_,
    )
    for overload in packet.overloads()
)


def foreach_in_place() -> Iterator[Any]:
    """Yield all in-place operations on lists of tensors."""
    for name in dir(torch):
        if name.startswith("_foreach_") and name.endswith("_"):
            packet = getattr(aten, name)
            yield from (getattr(packet, o) for o in packet.overloads() if o != "out")


def fused_step(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Step on lists of local tensors if the tensors at one index have one layout."""
    if any(isinstance(a, DTensor) for a in (*args, *kwargs.values())) or not _same_layouts(
        _lists((*args, *kwargs.values()))
    ):
        return as_before(op, args, kwargs)
    return _on_local_tensors(op, args, kwargs)


def foreach_step(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Reduce pending operands, then run an operation in place on lists of local tensors."""
    args = without_pending(args)
    numbers = [a for a in args if isinstance(a, Tensor)]
    # A scale, for example: each rank has to have the same one.
    if all(_is_whole_number(a) for a in numbers) and _same_layouts(_lists(args)):
        _on_local_tensors(op, args, kwargs)
        return None  # as the operator does; torch's function returns the list
    return as_before(op, args, kwargs)


def foreach_root(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Return DTensors' roots, computed on the list of their local tensors."""
    if not _same_layouts(_lists(args)) or not all(type(t) is DTensor for t in args[0]):
        return as_before(op, args, kwargs)
    # Elementwise, so the result has its operand's layout.
    roots = _on_local_tensors(op, args, kwargs)
    return [DTensor(root, t._spec, requires_grad=False) for root, t in zip(roots, args[0])]


def foreach_norm(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Return DTensors' norms on every rank; those that are sharded alike are reduced at once.

    clip_grad_norm_ takes them.
    """
    tensors, order = args[0], args[1] if len(args) > 1 else 2
    if not 0 < order or not all(type(t) is DTensor and t.numel() for t in tensors):
        return as_before(op, args, kwargs)
    mesh, layouts = tensors[0].device_mesh, [t.placements for t in tensors]
    is_pending = any(p.is_partial() for layout in set(layouts) for p in layout)
    if is_pending or any(t.device_mesh != mesh for t in tensors):
        return as_before(op, args, kwargs)
    shards = [t._local_tensor for t in tensors]
    shards = [t if t.numel() else t.new_zeros(1) for t in shards]  # no numbers have no maximum
    norms = [*torch._foreach_norm(shards, order, **kwargs)]
    alike: dict[Any, list[int]] = {}
    for i, (layout, norm) in enumerate(zip(layouts, norms)):
        if any(p.is_shard() for p in layout):
            alike.setdefault((layout, norm.dtype), []).append(i)
    for members in alike.values():
        # One message for all parameters with one layout, in place of one for each.
        terms = torch.stack([norms[i] for i in members])
        for i, norm in zip(members, _reduced(terms, order, tensors[members[0]]).unbind()):
            norms[i] = norm
    return _replicated(norms, mesh)


def _reduced(norms: Tensor, order: float, like: DTensor) -> Tensor:
    """Return whole tensors' norms, from the norms of shards that have one layout."""
    groups = groups_of_ours(like)
    axes = [a for a, p in zip(groups.mesh.names, like.placements) if p.is_shard()]
    name, is_largest = groups.group(tuple(axes))[0], order == math.inf
    # Powers of half-precision norms would overflow or round away before the sum.
    terms = norms.to(torch.promote_types(norms.dtype, torch.float32))
    terms = terms if is_largest else terms.pow(order)
    meet(groups, "the norms of DTensors (clip_grad_norm_)", len(terms), like.placements, order)
    begun = c10d.all_reduce.default(terms, "max" if is_largest else "sum", name)
    total = c10d.wait_tensor.default(begun)
    return (total if is_largest else total.pow(1 / order)).to(norms.dtype)


def stack(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Stack replicated numbers without propagating all their layouts."""
    numbers = args[0]
    if len(args) + len(kwargs) > 1 or not all(type(t) is DTensor and not t.dim() for t in numbers):
        return as_before(op, args, kwargs)
    first = numbers[0]
    if not all(
        t.device_mesh == first.device_mesh and all(p.is_replicate() for p in t.placements)
        for t in numbers
    ):
        return as_before(op, args, kwargs)
    return _replicated([torch.stack(_local_tensors(numbers))], first.device_mesh)[0]


def _replicated(numbers: Sequence[Tensor], mesh: DeviceMesh) -> list[DTensor]:
    """Return tensors with one shape, which every rank has, as DTensors."""
    everywhere = [Replicate()] * mesh.ndim
    specs = {
        dtype: DTensor.from_local(each, mesh, everywhere, run_check=False)._spec
        for dtype, each in {t.dtype: t for t in numbers}.items()
    }
    return [DTensor(each, specs[each.dtype], requires_grad=False) for each in numbers]


def _lists(arguments: Sequence[object]) -> list[Any]:
    """Return the lists of tensors among arguments."""
    return [a for a in arguments if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]


def _is_whole_number(tensor: Tensor) -> bool:
    """Return whether every rank has a tensor's number."""
    return tensor.dim() == 0 and (
        type(tensor) is Tensor
        or isinstance(tensor, DTensor)
        and all(p.is_replicate() for p in tensor.placements)
    )


def _on_local_tensors(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    # torch's own function parses lists of tensors in half the time.
    call = getattr(torch, op.overloadpacket.__name__)
    options = {name: _local_tensors(value) for name, value in kwargs.items()}
    return call(*map(_local_tensors, args), **options)


def _same_layouts(lists: list) -> bool:
    """Whether all lists have, at each index, one layout without a pending sum.

    Step counts may be plain tensors.
    """
    layouts = [[t._spec if type(t) is DTensor else t.dim() for t in tensors] for tensors in lists]
    if len(set(map(len, layouts))) > 1:
        return False
    if layouts in _CHECKED:  # Comparing identical objects does not look into them.
        return True
    if not all(
        _layouts_match(layouts[0][i], layout) for row in layouts for i, layout in enumerate(row)
    ):
        return False
    # Bounded: an optimizer has a few calls a step, but layouts come and go with models.
    del _CHECKED[:-29]
    _CHECKED.append(layouts)
    return True


# Layouts that matched lately. A full comparison of layouts takes longer than the step.
_CHECKED: list[list] = []


def _layouts_match(first: Any, other: Any) -> bool:
    """Whether two layouts are equal; a plain tensor has its number of dimensions instead."""
    if isinstance(first, int) or isinstance(other, int):
        return not isinstance(first, int) and other == 0
    return (
        first.placements == other.placements
        and first.mesh == other.mesh
        and first.shape == other.shape
        and not any(p.is_partial() for p in first.placements)
    )


def _local_tensors(argument: object) -> Any:
    if type(argument) is DTensor:
        return argument._local_tensor
    if isinstance(argument, (list, tuple)):
        return [t._local_tensor if type(t) is DTensor else t for t in argument]
    return argument
