"""Values in pipeline stages, which compute one microbatch at different times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from .devices import At


class Microbatches:
    """Keeps shards until all devices that a comparison needs have come to their microbatch."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        # How often a device has computed a claim for a microbatch: a stage may have loops.
        self.turns: dict[tuple[str, int, int], int] = {}
        self.held: dict[tuple[str, int, int], dict[int, Tensor]] = {}

    def complete(
        self, path: str, shards: Sequence[Tensor], spec: ShardSpec, at: At
    ) -> Iterator[tuple[int, int, list[Tensor], list[int]]]:
        """Take shards; yield (microbatch, turn, shards, devices) of sums that have all terms."""
        groups = {rank: group for group in self.mesh.groups(spec.pending) for rank in group}
        for rank, microbatch in at.microbatches.items():
            turn = self.turns.get((path, rank, microbatch), 0)
            self.turns[path, rank, microbatch] = turn + 1
            held = self.held.setdefault((path, microbatch, turn), {})
            held[rank] = shards[rank]
            if all(other in held for other in groups[rank]):
                terms = {other: held.pop(other) for other in groups[rank]}
                # Nobody compares devices outside of the group.
                filled = [terms.get(r, shards[rank]) for r in range(self.mesh.size)]
                yield microbatch, turn, filled, [*terms]
