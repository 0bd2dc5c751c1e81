"""StageTransport: messages between pipeline stages in different processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.process_groups import ProcessGroups
from .order import Order
from .parts import Message, StageLink


class StageTransport:
    """A rank's devices along the stages' axis; see parts.Transport."""

    def __init__(
        self, groups: ProcessGroups, axis: str, order: Order, links: Sequence[StageLink]
    ) -> None:
        self.device = groups.coordinates[axis]
        self.groups = groups.between_stages(axis, _keys(order, links))
        (ranks,) = (group for group in groups.mesh.groups((axis,)) if groups.rank in group)
        self.processes = [groups.processes[rank] for rank in ranks]
        self.in_flight: deque[tuple[Any, Sequence[Message]]] = deque()

    def send(self, messages: Sequence[Message]) -> None:
        """Begin to send a piece's values."""
        messages = [m._replace(value=m.value.contiguous()) for m in messages]
        for work in self._begin(dist.isend, messages):
            # The values have to live until their sends are complete.
            self.in_flight.append((work, messages))
        while self.in_flight and self.in_flight[0][0].is_completed():
            self.in_flight.popleft()

    def receive(self, messages: Sequence[Message]) -> Callable[[], list[Tensor]]:
        """Begin to receive a piece's values; return a function that returns them.

        It begins before the piece before has sent, and a received value may depend on the sent one.
        So the two use different groups, where a group's messages wait for each other.
        """
        empty = [torch.empty_like(m.value, memory_format=torch.contiguous_format) for m in messages]
        works = self._begin(dist.irecv, [m._replace(value=x) for m, x in zip(messages, empty)])

        def arrived() -> list[Tensor]:
            for work in works:
                work.wait()
            return empty

        return arrived

    def _begin(self, op: Callable, messages: Sequence[Message]) -> list[Any]:
        """Begin messages: in NCCL, those of a group are one kernel in the group's communicator."""
        batches: dict[Key, list[dist.P2POp]] = {}
        for link, other, x in messages:
            ends = (self.device, other) if op is dist.isend else (other, self.device)
            key = key_of(link, *ends)
            one = dist.P2POp(op, x, self.processes[other], self.groups[key], _tag(link))
            batches.setdefault(key, []).append(one)
        return [work for batch in batches.values() for work in dist.batch_isend_irecv(batch)]

    def finish(self) -> None:
        """Wait until all sent values have arrived."""
        while self.in_flight:
            self.in_flight.popleft()[0].wait()


Key = tuple[str, int, int, int]


def key_of(link: StageLink, sender: int, receiver: int) -> Key:
    """Return a message's group: by its kind, round and step, and the sender's parity.

    So a device that receives from one neighbor and sends to the other has a group for each.
    """
    return link.kind, link.round, receiver - sender, sender % 2


def _keys(order: Order, links: Sequence[StageLink]) -> list[Key]:
    places = order.places
    keys: dict[Key, None] = {}
    for link in links:
        for stage in range(places.stages):
            other = stage + link.step
            if places.round(stage) == link.round and 0 <= other < places.stages:
                sender, receiver = places.device(stage), places.device(other)
                keys |= {key_of(link, sender, receiver): None} if sender != receiver else {}
    return [*keys]


def _tag(link: StageLink) -> int:
    """Return the tag for a link's messages. Messages with one tag arrive in order."""
    # Distinct as long as a pipeline has fewer than 64 rounds.
    return (link.leaf * 64 + link.round) * 2 + (link.kind == "F")
