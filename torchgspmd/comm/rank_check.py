"""Whether all ranks are about to do the same: a number that each has, sent by each to all, in one
small all_to_all.

The first sum of a program may travel in that message: data parallelism sums nothing but a loss
before its gradients. On two gloo processes an all_reduce of more than two elements takes 0.4 to 0.8
ms of CPU time, an all_to_all of up to 256 bytes 0.2 ms; a small model's step takes 25.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .process_groups import ProcessGroups

SAMPLE = 2**16  # elements of a tensor that are compared
ROUNDING = 1e-3  # relative difference of what may be the same; of other values it is about 1
ROOM = (
    7  # elements of a sum that may travel along; the message has this length with and without one
)


class RankCheck:
    """One comparison of a number (63 bits) between all ranks: first `begin`, then `check`. Every
    rank must come to both.
    """

    def __init__(self, groups: ProcessGroups, number: int, otherwise: Callable[[], None]):
        """otherwise: what every rank calls if the numbers differ; it raises."""
        self.groups, self.number, self.otherwise = groups, number, otherwise

    def begin(self, term: Tensor | None = None) -> RankCheck:
        """term: this rank's term of a sum over all ranks, for which there `is_room`."""
        self.term, groups = term, self.groups
        message = torch.full([groups.mesh.size, 1 + ROOM], self.number, device=groups.checked_on)
        if term is not None:
            _terms(message, term).copy_(term.flatten())
        self.received = torch.empty_like(message)
        self.work = dist.all_to_all_single(
            self.received, message, group=groups.checks, async_op=True
        )
        return self

    def check(self) -> None:
        """Waits for the answer."""
        self.work.wait()
        if self.received[:, 0].tolist() != [self.number] * len(self.received):
            self.otherwise()

    def total(self) -> Tensor:
        """Waits for the answer and for the sum that travelled along; the same on every rank."""
        self.check()
        return _terms(self.received, self.term).sum(0).to(self.term.dtype).view(self.term.shape)


def _terms(message: Tensor, term: Tensor) -> Tensor:
    """[ranks, elements] of a message"""
    return message.view(torch.float64)[:, 1 : 1 + term.numel()]


def check_ranks(groups: ProcessGroups, number: int, otherwise: Callable[[], None]) -> None:
    """Calls `otherwise` on every rank unless all have the same number."""
    RankCheck(groups, number, otherwise).begin().check()


def gathered(groups: ProcessGroups, mine: Any) -> list[Any]:
    """What each rank has. Ranks that disagree all come here, each with an Account
    (disagreement.py).
    """
    found: list[Any] = [None] * groups.mesh.size
    dist.all_gather_object(found, mine, group=groups.checks)
    return found


def differing(groups: ProcessGroups, tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Which of these tensors, that should be the same everywhere, have other values on a rank than
    on rank 0: (place, first such rank).
    """
    found = gathered(groups, [_fingerprint(t) for t in tensors])
    apart = [
        [not _alike(own, found[0][i]) for own in column] for i, column in enumerate(zip(*found))
    ]
    return [(i, row.index(True)) for i, row in enumerate(apart) if any(row)]


def _fingerprint(tensor: Tensor) -> int | tuple[float, float]:
    """Of integers another one for other values; of floats a norm and an irregular mean. Of a large
    tensor a part is read.
    """
    values = tensor.detach().flatten()
    values = values[:: max(1, len(values) // SAMPLE)].cpu()
    if not (values.is_floating_point() or values.is_complex()):
        return zlib.crc32(values.numpy().tobytes())
    values = (
        (torch.view_as_real(values).flatten() if values.is_complex() else values)
        .double()
        .nan_to_num()
        .clamp_(-1e100, 1e100)
    )
    weights = torch.arange(len(values), dtype=torch.float64).mul_(0.618).frac_().sub_(0.5)
    norm = values.norm().item()
    return norm, (weights @ values).item() / (norm or 1.0)


def _alike(one: int | tuple[float, float], other: int | tuple[float, float]) -> bool:
    """Floats that ranks compute alike may differ by rounding."""
    if isinstance(one, int):
        return one == other
    return math.isclose(one[0], other[0], rel_tol=ROUNDING) and abs(one[1] - other[1]) <= ROUNDING


def is_room(groups: ProcessGroups, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> bool:
    """Whether a sum of this shape over so many ranks may travel with a comparison, which it must
    not delay.
    """
    same_device = groups.checked_on.type == groups.device_type
    return (
        same_device
        and dtype.is_floating_point
        and math.prod(shape) <= ROOM
        and ranks == groups.mesh.size
    )
