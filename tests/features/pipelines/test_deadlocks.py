"""No schedule waits for itself, where a communicator does its messages one after the other.

    python tests/features/pipelines/test_deadlocks.py     # sizes up to 32 stages x 64 microbatches

NCCL's messages are rendezvous: a send ends when its receive has begun. All messages of one rank in
one communicator are in the order in which the rank began them (a stream), and a message begins
after what the rank had begun to compute by then. `StageCall` itself says that order here, to a
transport that writes it down.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchgspmd.features.pipelines import parts
from torchgspmd.features.pipelines.call import StageCall, key_of
from torchgspmd.features.pipelines.list_scheduler import Order
from torchgspmd.features.pipelines.parts import StageLink
from torchgspmd.rules.custom_ops.loops import Loop

Stream = Callable[[StageLink, int, int], Hashable]  # which communicator a message has


class Message(NamedTuple):
    """A send or receive: of a communicator, between two devices; computed: pieces begun before."""

    stream: Hashable
    sender: int
    receiver: int
    link: Hashable
    computed: int


class Recorder:
    """A transport that notes the messages of one device, and those that each piece awaits."""

    def __init__(self, call: Any, device: int, stream: Stream) -> None:
        self.call, self.device, self.stream = call, device, stream
        self.messages: list[Message] = []
        self.awaits: list[list[int]] = [[]]  # for each piece, and the end, numbers of messages

    def send(self, messages: Sequence[parts.Message]) -> None:
        for link, to, _ in messages:
            self._note(link, self.device, to)

    def receive(self, messages: Sequence[parts.Message]) -> Callable[[], list[Tensor]]:
        first = len(self.messages)
        for link, source, _ in messages:
            self._note(link, source, self.device)
        numbers = range(first, len(self.messages))

        def arrived() -> list[Tensor]:
            self.awaits[-1].extend(numbers)
            return [m.value for m in messages]

        return arrived

    def _note(self, link: StageLink, sender: int, receiver: int) -> None:
        stream, key = self.stream(link, sender, receiver), (link.kind, link.round)
        self.messages.append(Message(stream, sender, receiver, key, self.call.computed))

    def finish(self) -> None:
        pass


class Recorded(StageCall):
    """A pipeline whose pieces compute nothing."""

    calls = 0  # of bodies_of

    @property
    def computed(self) -> int:
        """How many pieces have begun. `StageRun` asks for all bodies once, before."""
        return max(0, self.calls - 3 * self.order.rounds)

    def bodies_of(self, kind: str, stage: int) -> list:
        self.calls += 1
        if self.computed:
            self.transport.awaits.append([])
        return []


def by_direction(link: StageLink, sender: int, receiver: int) -> Hashable:
    """Return one communicator for what a device sends on and what it receives."""
    return link.kind, link.round, receiver - sender


def messages_of(order: Order, stream: Stream) -> list[Recorder]:
    """Return what each device sends, receives and awaits."""
    rounds, devices = range(order.rounds), []
    kinds = "F" if order.name == "forward" else "FB"
    links = tuple(
        StageLink(kind, r, 0, "x", ("x",) * order.rounds, None) for kind in kinds for r in rounds
    )
    for device in range(order.devices):
        call = Recorded(
            Loop(1, 1, order.microbatches, False), "stage", order, (), links, ("x",), (), (), (), ()
        )
        call.transport = recorder = Recorder(call, device, stream)
        call([torch.zeros(())], [], [])
        devices.append(recorder)
    return devices


def is_deadlock(devices: list[Recorder]) -> bool:
    """Return whether the devices stop before all messages have ended."""
    queues: dict[tuple[int, Hashable], list[int]] = {}
    for d, device in enumerate(devices):
        for number, message in enumerate(device.messages):
            queues.setdefault((d, message.stream), []).append(number)
    at = dict.fromkeys(queues, 0)
    done: list[set[int]] = [set() for _ in devices]
    computed = [0] * len(devices)

    def head(d: int, stream: Hashable) -> Message | None:
        """Return the message that a stream has reached and may begin."""
        queue = queues.get((d, stream), [])
        if at.get((d, stream), 0) >= len(queue):
            return None
        message = devices[d].messages[queue[at[d, stream]]]
        return message if computed[d] >= message.computed else None

    moved = True
    while moved:
        moved = False
        for d, device in enumerate(devices):
            while computed[d] < len(device.awaits) - 1 and done[d].issuperset(
                device.awaits[computed[d]]
            ):
                computed[d] += 1
                moved = True
        for d, stream in queues:
            message = head(d, stream)
            if message is None or message.sender != d:
                continue
            other = message.receiver
            there = head(other, stream)
            if there is not None and there[:4] == message[:4]:
                for end in (d, other):
                    done[end].add(queues[end, stream][at[end, stream]])
                    at[end, stream] += 1
                moved = True
    return any(at[key] < len(queue) for key, queue in queues.items())


def orders(
    devices: Iterable[int], microbatches: Iterable[int], rounds: Iterable[int]
) -> Iterable[Order]:
    for name, p, m, r in itertools.product(
        ("gpipe", "1f1b", "zero_bubble", "forward"), devices, microbatches, rounds
    ):
        if name == "gpipe" and r == 2 and m >= 2 * p:
            yield Order("dualpipev", p, m, rounds=r, vee=True)
            yield Order("dualpipev", p, m, rounds=r, vee=True, joint=True)
        if not (name == "gpipe" and r > 1):
            yield Order(name, p, m, rounds=r, vee=name == "zero_bubble" and r == 2)


SMALL = [*orders((2, 3, 4, 6, 8), (1, 2, 5, 8, 16), (1, 2, 3))]


@pytest.mark.parametrize("name", ("gpipe", "1f1b", "zero_bubble", "forward", "dualpipev"))
def test_no_schedule_waits_for_itself(name: str) -> None:
    for order in SMALL:
        if order.name == name:
            assert not is_deadlock(messages_of(order, key_of)), str(order)


def test_one_communicator_for_both_neighbors_would() -> None:
    """The checker finds the deadlock where a send waits for a receive that began before it."""
    order = Order("1f1b", 6, 16, rounds=2)
    assert is_deadlock(messages_of(order, by_direction))


if __name__ == "__main__":
    count = 0
    for each in orders(range(2, 33), (1, 2, 3, 4, 7, 8, 16, 31, 32, 64), (1, 2, 3)):
        assert not is_deadlock(messages_of(each, key_of)), str(each)
        count += 1
    print(f"{count} orders, no deadlock")
