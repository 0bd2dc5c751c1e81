"""LateGroup: a gloo group whose collectives end as late as they may. It finds missing waits.

    dist.init_process_group("late", ...)        # what it carries is gloo's

Between its start and its wait a collective may read its operands and write its results at any time.
A LateGroup makes every program that counts on a certain time fail, on every run:

    start       gloo's threads get copies of the operands, and send them; results become poison
    between     a read of a result reads poison: NaN, the largest integer, True
    wait        operands must be as they were, results must still be poison; then results arrive

`RANKS_GROUP=late pytest tests/distributed` runs all tests on processes in such groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

# Positions of arguments with results and with operands. In place both are one; PyTorch 2.13 has new
# names for some calls.
RESULT, OPERAND = (0,), (1,)
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "allreduce": ((0,), (0,)),
    "allreduce_coalesced": ((0,), (0,)),
    "broadcast": ((0,), (0,)),
    "reduce": ((0,), (0,)),
    "send": ((), (0,)),
    "recv": ((0,), ()),
    "recv_anysource": ((0,), ()),
    "barrier": ((), ()),
    "monitored_barrier": ((), ()),
} | dict.fromkeys(
    (
        "allgather",
        "_allgather_base",
        "all_gather_single",
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
        "alltoall",
        "alltoall_base",
        "all_to_all_single",
        "gather",
        "scatter",
    ),
    (RESULT, OPERAND),
)


def poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same numbers; NaN is one."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
    wide = torch.float64 if a.itemsize < 8 else a.dtype
    return torch.allclose(a.to(wide), b.to(wide), rtol=0, atol=0, equal_nan=True)


class LateWork(dist._Work):
    """A collective in flight. operands, results: pairs of a tensor and the copy that gloo has."""

    def __init__(self, name: str, work: Any, operands: list, results: list) -> None:
        super().__init__()
        self.name, self.work, self.done = name, work, False
        self.operands, self.results = operands, results

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.done:
            return True
        self.done = True
        if self.work is not None:
            self.work.wait()
        with torch.no_grad():
            for mine, copy in self.operands:
                assert same(mine, copy), f"the operand of {self.name} was written in flight"
            for mine, copy in self.results:
                poison = torch.full_like(mine, poison_of(mine.dtype))
                assert same(mine, poison), f"the result of {self.name} was written in flight"
                mine.copy_(copy)
        return True


class LateGroup(dist.ProcessGroup):
    """See above. It has gloo's backend, too: torch asks that for names, devices and hooks."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo: Any = dist.ProcessGroup(store, rank, size)  # what sends
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self.gloo, self):
            group._register_backend(torch.device("cpu"), kind, backend)
            group._set_default_backend(kind)

    def begin(self, name: str, *args: Any, **options: Any) -> LateWork:
        """Begin a collective on copies."""
        results, operands = CALLS[name]
        copied: dict[int, tuple[Tensor, Tensor]] = {}

        def copy_of(x: Tensor) -> Tensor:
            if id(x) not in copied:
                copied[id(x)] = x, x.detach().clone(memory_format=torch.contiguous_format)
            return copied[id(x)][1]

        sent = [
            tree_map_only(Tensor, copy_of, a) if i in {*results, *operands} else a
            for i, a in enumerate(args)
        ]

        def pairs(positions: Sequence[int]) -> list:
            found = [x for i in positions for x in tree_leaves(args[i]) if isinstance(x, Tensor)]
            return [copied[id(x)] for x in found]

        arriving = [(mine.detach(), copy) for mine, copy in pairs(results)]
        # In place, an operand is a result, or a part of its memory.
        written = {mine.untyped_storage().data_ptr() for mine, _ in arriving}
        kept = [
            pair
            for pair in pairs([i for i in operands if i not in results])
            if pair[0].untyped_storage().data_ptr() not in written
        ]
        # gloo has its own copy of an operand, so this one is what it was at the start.
        with torch.no_grad():
            for mine, _ in arriving:
                mine.fill_(poison_of(mine.dtype))
        return LateWork(name, getattr(self.gloo, name)(*sent, **options), kept, arriving)

    # What torch asks a group, beside collectives.

    def size(self) -> int:
        return self.gloo.size()

    def rank(self) -> int:
        return self.gloo.rank()

    def getBackendName(self) -> str:
        return "late"

    def name(self) -> str:
        return "late"


def _method(name: str) -> Callable[..., LateWork]:
    return lambda self, *args, **options: self.begin(name, *args, **options)


for _name in CALLS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(LateGroup, _name, _method(_name))


dist.Backend.register_backend("late", LateGroup, devices=["cpu"])
