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
from .parts import StageLink


class StageTransport:
    """A rank's devices along the stages' axis; see parts.Transport."""

    def __init__(
        self, groups: ProcessGroups, axis: str, order: Order, links: Sequence[StageLink]
    ) -> None:
        self.device = groups.coordinates[axis]
        self.groups = groups.between_stages(axis, _keys(order, links))
        (ranks,) = (group for group in groups.mesh.groups((axis,)) if groups.rank in group)
        self.processes = [groups.processes[rank] for rank in ranks]
        self.in_flight: deque[tuple[Any, Tensor]] = deque()

    def send(self, link: StageLink, to: int, x: Tensor) -> None:
        """Begin to send a value to a device."""
        group, tag = self.groups[key_of(link, self.device, to)], _tag(link)
        x = x.contiguous()
        # x has to live until its send is complete.
        self.in_flight.append((dist.isend(x, self.processes[to], group=group, tag=tag), x))
        # A completed send no longer needs its tensor.
        while self.in_flight and self.in_flight[0][0].is_completed():
            self.in_flight.popleft()

    def receive(self, link: StageLink, source: int, like: Tensor) -> Callable[[], Tensor]:
        """Begin to receive a link's next value; return a function that returns it.

        It begins before this piece has sent, and the received value may depend on the sent one. So
        the two use different groups, where a group's messages wait for each other.
        """
        group, tag = self.groups[key_of(link, source, self.device)], _tag(link)
        x = torch.empty_like(like, memory_format=torch.contiguous_format)
        work: Any = dist.irecv(x, self.processes[source], group=group, tag=tag)

        def arrived() -> Tensor:
            work.wait()
            return x

        return arrived

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
    """Return all messages' keys."""
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
