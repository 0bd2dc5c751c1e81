"""Tries to put a search's best proposals into stages.

The axes for the batch and for weights give devices to STAGE. Few stages are tried first, and more
until a step gets longer; for each some numbers of microbatches, the layers computed again if
nothing fits otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from ...errors import ShardingError
from ...layout.mesh import Mesh
from . import candidates
from .judge import Judge
from .proposal import Marks, Proposal, Savings


class Search(Protocol):
    """The search that is asked; search.py has it."""

    judge: Judge
    limit: float
    tried: dict[tuple[Mesh, Marks, int], Proposal]

    def is_over(self) -> bool: ...

    def is_divisible(self, mesh: Mesh, count: int) -> bool: ...

    def planned(self, mesh: Mesh, marks: Marks, savings: Savings) -> Proposal: ...

    def order(self, proposal: Proposal) -> tuple[float, float]: ...


def put_into_stages(search: Search, keys: Sequence[tuple[Mesh, Marks, int]]) -> None:
    """Try stages with the meshes and marks of these proposals, with ZeRO and without."""
    if search.judge.has_loss and search.judge.stages.may_exist:
        for mesh, marks, _ in keys:
            for zero in dict.fromkeys([False, marks.zero]):
                try_stages(search, mesh, replace(marks, zero=zero, outputs=()))


def try_stages(search: Search, mesh: Mesh, marks: Marks) -> None:
    """Try few stages and then more, until a step gets longer."""
    best = math.inf
    for staged in candidates.staged(mesh, search.judge.layers.length):
        if not marks.zero and search.judge.least_memory(staged) > search.limit:
            continue
        found = min(proposals(search, staged, marks.on(staged)), default=None)
        if search.is_over() or found is None or found[1] > best:
            return
        best = math.inf if found[0] else found[1]


def proposals(search: Search, mesh: Mesh, marks: Marks) -> Iterator[tuple[float, float]]:
    """Try numbers of microbatches on a mesh with stages; yield each proposal's sort key."""
    every = (("", search.judge.layers.length),)
    for count in candidates.of_stages(mesh, search.judge.rows):
        for recomputed in ((), every) if search.is_divisible(mesh, count) else ():
            if search.is_over():
                return
            try:
                proposal = search.planned(mesh, marks, Savings("auto", recomputed, count))
            except ShardingError:  # these layers cannot be stages
                return
            search.tried[mesh, marks, count] = proposal
            yield search.order(proposal)
            if proposal.memory <= search.limit:
                break
