"""A pipeline on simulated devices: all stages whose next piece is of one kind do it at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..layout.mesh import Mesh
from .stage_call import Link, StageCall, StageRun
from .stage_schedule import Piece

RunBody = Callable[[fx.Graph, Sequence[list]], list[list]]


def simulate_stages(
    call: StageCall, mesh: Mesh, arguments: Sequence[Sequence], run_body: RunBody
) -> list[list[Tensor]]:
    """Return the results of all devices.

    arguments: carries, rows and others of each device. run_body: runs a graph on all devices, from
    inputs that are lists over the devices, to the results of each.
    """
    return _Simulation(call, mesh, arguments, run_body).run()


class _Simulation:
    """The devices of a pipeline, and the messages between them."""

    def __init__(
        self, call: StageCall, mesh: Mesh, arguments: Sequence[Sequence], run_body: RunBody
    ) -> None:
        self.call, self.run_body, self.devices = call, run_body, range(mesh.size)
        axes = (call.axis,)
        places = [mesh.index(axes, mesh.coordinates(device)) for device in self.devices]
        self.runs = [StageRun(call, place, *args) for place, args in zip(places, arguments)]
        groups = {device: group for group in mesh.groups(axes) for device in group}
        self.at = [dict(enumerate(groups[device])) for device in self.devices]
        self.messages: dict[tuple[int, int, Link], deque[Tensor]] = {}  # to, from, link
        self.done = [0] * mesh.size

    def run(self) -> list[list[Tensor]]:
        """Return the results of all devices."""
        while left := {d: p for d in self.devices if (p := self._next(d)) is not None}:
            ready = {d: piece for d, piece in left.items() if self._has_arrived(d, piece)}
            assert ready, "a stage waits for a piece that comes later"
            kind = next(iter(ready.values())).kind
            round_ = self.call.order.places.round(next(iter(ready.values())).stage)
            self._do({d: p for d, p in ready.items() if self._is_of(p, kind, round_)})
        return [run.results() for run in self.runs]

    def _is_of(self, piece: Piece, kind: str, round_: int) -> bool:
        return piece.kind == kind and self.call.order.places.round(piece.stage) == round_

    def _next(self, device: int) -> Piece | None:
        pieces, done = self.runs[device].pieces, self.done[device]
        return pieces[done] if done < len(pieces) else None

    def _has_arrived(self, device: int, piece: Piece) -> bool:
        received = self.runs[device].received(piece)
        return all(self.messages.get((device, self.at[device][d], x)) for x, _, d in received)

    def _do(self, pieces: dict[int, Piece]) -> None:
        """Do pieces of one kind, each device its own."""
        for device, piece in pieces.items():
            for link, carry, source in self.runs[device].received(piece):
                message = self.messages[device, self.at[device][source], link].popleft()
                self.runs[device].arrive(piece, carry, message)
        lists = {d: self.call.bodies_of(p.kind, p.stage) for d, p in pieces.items()}
        for body in max(lists.values(), key=len):
            active = [d for d in pieces if body in lists[d]]
            inputs = {d: self.runs[d].inputs(pieces[d], body) for d in active}
            columns = [
                [
                    inputs[d][i] if d in inputs else _poison(inputs[active[0]][i])
                    for d in self.devices
                ]
                for i in range(len(body.inputs))
            ]
            results = self.run_body(body.graph, columns)
            for device in active:
                self.runs[device].take(pieces[device], body, results[device])
        for device, piece in pieces.items():
            run = self.runs[device]
            for link, _, to in run.sent(piece):
                value = run.value(piece.microbatch, link.sent)
                key = self.at[device][to], device, link
                self.messages.setdefault(key, deque()).append(value)
            run.finish(piece)
            self.done[device] += 1


def _poison(like: Any) -> Any:
    """Return what a device without work has: nobody may read it."""
    if isinstance(like, (tuple, list)):
        return type(like)(map(_poison, like))
    if isinstance(like, Tensor) and like.is_floating_point():
        return torch.full_like(like, math.nan)
    return like
