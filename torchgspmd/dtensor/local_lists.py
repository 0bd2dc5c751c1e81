"""Elementwise operations on our DTensors with one layout: one call on their local tensors.

    torch._foreach_lerp_(averages, ps, 0.01)
    p.add_(p.grad, alpha=-lr)

DTensor propagates layouts for every operation: 20 to 60 us, where a small local tensor takes 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..comm.process_groups import find_groups
from ..rules import is_elementwise

_WRITES = {"copy_", "zero_", "fill_", "addcmul_", "addcdiv_"}  # elementwise too, without a rule
_NUMBERS = (int, float, bool, complex, str, type(None), torch.dtype)


def is_elementwise_method(name: str) -> bool:
    """Whether a tensor's method, such as add_, computes each element from those at its place."""
    return name in _WRITES or is_elementwise(name.removeprefix("__i").rstrip("_"))


def change_local(method: Callable, self: Any, args: tuple, kwargs: dict) -> bool:
    """Run an elementwise in-place method on local tensors; return False if layouts forbid it."""
    if type(self) is not DTensor or hasattr(self, "_view_of"):
        return False
    records, spec = torch.is_grad_enabled(), self._spec
    # Autograd has to see the DTensors.
    if records and self.requires_grad:
        return False
    for value in (*args, *kwargs.values()):
        if type(value) is DTensor:
            if (
                records
                and value.requires_grad
                or not (value._spec is spec or _layouts_match(spec, value._spec))
            ):
                return False
        elif not isinstance(value, _NUMBERS):
            return False
    if find_groups(spec.mesh) is None or any(p.is_partial() for p in spec.placements):
        return False
    method(
        self._local_tensor,
        *map(local_tensors, args),
        **{name: local_tensors(value) for name, value in kwargs.items()},
    )
    increment_version(self)
    return True


def tensor_lists(arguments: Sequence[object]) -> list[Any]:
    """Return the lists of tensors among arguments."""
    return [a for a in arguments if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]


def is_replicated_number(tensor: Tensor) -> bool:
    """Return whether every rank has a tensor's number."""
    return tensor.dim() == 0 and (
        type(tensor) is Tensor
        or isinstance(tensor, DTensor)
        and all(p.is_replicate() for p in tensor.placements)
    )


def have_same_layouts(first: Sequence[Any] = (), *others: Sequence[Any]) -> bool:
    """Whether all lists have, at each index, one layout of ours without a pending sum.

    A plain tensor in the first list stands beside plain ones. Beside a DTensor a number may be
    plain, such as a step count, and a state may be missing (None).
    """
    if not first or any(len(each) != len(first) for each in others):
        return False
    rows = (first, *others)
    layouts = [[t._spec if type(t) is DTensor else _plain(t) for t in row] for row in rows]
    # By identity: a comparison of layouts takes longer than the step.
    key = tuple(
        [layout if layout.__class__ is int else id(layout) for row in layouts for layout in row]
    )
    if key in _CHECKED:
        return True
    for column in zip(*layouts):
        if not _column_matches(*column):
            return False
    # Bounded: an optimizer has a few calls a step, but layouts come and go with models.
    for old in [*_CHECKED][:-29]:
        del _CHECKED[old]
    _CHECKED[key] = layouts  # which keeps the ids valid
    return True


# Layouts that matched lately, by their ids.
_CHECKED: dict[tuple[Any, ...], list] = {}


def _plain(value: object) -> Any:
    """Return a value's stand-in, if it is no DTensor: its number of dimensions, negative."""
    if value is None:
        return 1
    # A subclass, such as FSDP2's DTensor, has no layout that is compared here.
    return -value.dim() if isinstance(value, Tensor) and not isinstance(value, DTensor) else 2


def _column_matches(first: Any, *others: Any) -> bool:
    if isinstance(first, int):
        return first < 1 and all(isinstance(other, int) and other < 2 for other in others)
    if find_groups(first.mesh) is None or any(p.is_partial() for p in first.placements):
        return False
    return all(
        other in (0, 1) if isinstance(other, int) else _layouts_match(first, other)
        for other in others
    )


def _layouts_match(first: Any, other: Any) -> bool:
    return other is first or (
        first.placements == other.placements
        and first.mesh == other.mesh
        and first.shape == other.shape
    )


def local_tensors(argument: object) -> Any:
    """Return a DTensor's local tensor, or a list of these; other arguments as they are."""
    if type(argument) is DTensor:
        return argument._local_tensor
    if isinstance(argument, (list, tuple)):
        return [t._local_tensor if type(t) is DTensor else t for t in argument]
    return argument
