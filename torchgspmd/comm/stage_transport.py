"""StageTransport: what the stages of a pipeline send to each other, between processes."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .process_groups import ProcessGroups


class StageTransport:
    """The neighbors of a rank along the axis of the stages; see stage_call.Transport.

    Both directions have a group of their own on a GPU: messages of one group wait for each other.
    """

    def __init__(self, groups: ProcessGroups, axis: str) -> None:
        self.stage = groups.coordinates[axis]
        (ranks,) = (group for group in groups.mesh.groups((axis,)) if groups.rank in group)
        self.processes = [groups.processes[rank] for rank in ranks]
        self.groups = {shift: groups.between_stages(axis, shift) for shift in (1, -1)}
        self.in_flight: deque[tuple[Any, Tensor]] = deque()

    def send(self, link: int, shift: int, x: Tensor) -> None:
        """Begin to send a value to the next stage."""
        x = x.contiguous()
        to, group = self.processes[self.stage + shift], self.groups[shift]
        self.in_flight.append((dist.isend(x, to, group=group, tag=link), x))
        while self.in_flight and self.in_flight[0][0].is_completed():
            self.in_flight.popleft()

    def receive(self, link: int, shift: int, like: Tensor) -> Tensor:
        """Return the next value of a link, from the stage before."""
        x = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(x, self.processes[self.stage - shift], group=self.groups[shift], tag=link)
        return x

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        while self.in_flight:
            self.in_flight.popleft()[0].wait()
