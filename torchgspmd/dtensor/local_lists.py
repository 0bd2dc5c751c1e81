"""Elementwise operations on our DTensors with one layout: one call on their local tensors.

    torch._foreach_lerp_(averages, ps, 0.01)
    p.add_(p.grad, alpha=-lr)

DTensor propagates layouts for every operation: 20 to 60 us, where a small local tensor takes 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, neg
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..comm.process_groups import find_groups
from ..rules import is_elementwise

_WRITES = {"copy_", "zero_", "fill_", "addcmul_", "addcdiv_"}  # elementwise too, without a rule
_NUMBERS = (int, float, bool, complex, str, type(None), torch.dtype)


@functools.cache
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
    if _WRITTEN.get(id(spec)) is not spec:  # two comparisons of layouts cost as much as the change
        if not _is_ours_and_whole(spec):
            return False
        if len(_WRITTEN) == _MANY:
            _WRITTEN.clear()
        _WRITTEN[id(spec)] = spec
    method(
        self._local_tensor,
        *[value._local_tensor if type(value) is DTensor else value for value in args],
        **{name: local_tensors(value) for name, value in kwargs.items()},
    )
    increment_version(self)
    return True


_WRITTEN: dict[int, Any] = {}  # layouts of tensors that were changed lately, by id
_MANY = 4096


def _is_ours_and_whole(spec: Any) -> bool:
    """Whether a layout is on one of parallelize's meshes, without a pending sum."""
    return find_groups(spec.mesh) is not None and not any(p.is_partial() for p in spec.placements)


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


class Matched:
    """Layouts that match: a row for each list, a number for a tensor that is plain."""

    def __init__(self, rows: Sequence[list]) -> None:
        self.rows = rows

    @functools.cached_property
    def lack_states(self) -> bool:
        """Whether a state is missing."""
        return any(isinstance(spec, int) and spec == _MISSING for row in self.rows for spec in row)

    @functools.cached_property
    def are_on_one_mesh(self) -> bool:
        """Whether the DTensors in the first list are on one mesh."""
        return len({id(spec.mesh) for spec in self.rows[0] if not isinstance(spec, int)}) == 1

    @functools.cached_property
    def axes(self) -> list[tuple[str, ...]]:
        """The axes that shard each tensor in the first list."""
        return [() if isinstance(spec, int) else _axes(spec) for spec in self.rows[0]]


def _axes(spec: Any) -> tuple[str, ...]:
    groups = find_groups(spec.mesh)
    assert groups is not None, "layouts of others do not match"
    return tuple(a for a, p in zip(groups.mesh.names, spec.placements) if not p.is_replicate())


def matched(first: Sequence[Any] = (), *others: Sequence[Any]) -> Matched | None:
    """Return the layouts if all lists have, at each index, one of ours without a pending sum.

    A plain tensor in the first list stands beside plain ones. Beside a DTensor a number may be
    plain, such as a step count, and a state may be missing (None).
    """
    if not first or any(len(each) != len(first) for each in others):
        return None
    rows = (first, *others)
    layouts = [*map(_layouts, rows)]
    # By identity: a comparison of layouts takes longer than the step.
    key = (len(rows), *map(id, chain.from_iterable(layouts)))
    if key in _CHECKED:
        return _CHECKED[key]
    for column in zip(*layouts):
        if not _column_matches(*column):
            return None
    # Bounded: an optimizer has a few calls a step, but layouts come and go with models.
    for old in [*_CHECKED][:-29]:
        del _CHECKED[old]
    result = _CHECKED[key] = Matched(layouts)  # which keeps the ids valid
    return result


# Layouts that matched lately, by their ids.
_CHECKED: dict[tuple[Any, ...], Matched] = {}


def _layouts(row: Sequence[Any]) -> list[Any]:
    """Return the tensors' layouts; a number for a tensor that is plain, and for None."""
    kinds = [*map(type, row)]
    if kinds.count(DTensor) == len(kinds):  # without a loop in Python: six lists a step
        return [*map(_SPEC, row)]
    if kinds.count(Tensor) == len(kinds):
        return [*map(neg, map(Tensor.dim, row))]
    return [t._spec if type(t) is DTensor else _plain(t) for t in row]


_SPEC, _MISSING = attrgetter("_spec"), 1


def _plain(value: object) -> Any:
    """Return a value's stand-in, if it is no DTensor: its number of dimensions, negative."""
    if value is None:
        return _MISSING
    # A subclass, such as FSDP2's DTensor, has no layout that is compared here.
    return -value.dim() if isinstance(value, Tensor) and not isinstance(value, DTensor) else 2


def _column_matches(first: Any, *others: Any) -> bool:
    if isinstance(first, int):
        return first < 1 and all(isinstance(other, int) and other < 2 for other in others)
    if not _is_ours_and_whole(first):
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
