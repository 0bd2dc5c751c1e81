"""Order: a pipeline's schedule, as a text that stands in its graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import ShardingError
from .list_scheduler import StagePlacement, curve, forward_schedule, list_schedule
from .schedule import Schedule, Times, in_ticks


@dataclass(frozen=True)
class Order:
    """A pipeline's schedule. Its text: `1f1b 4x8` has 4 devices and 8 microbatches.

    name: forward (no backward), gpipe, 1f1b, zero_bubble, or auto while it is not chosen. limit:
    the most activations that a device keeps. 0: all for gpipe, otherwise one a stage; if 1f1b has
    rounds, also those for which a device waits. memory: bytes that these may take; 0: unlimited.
    recompute: whether a backward computes the forward again. rounds: how many stages a device has.
    vee: whether the second round goes back.
    """

    name: str
    devices: int
    microbatches: int
    limit: int = 0
    memory: int = 0
    recompute: bool = False
    rounds: int = 1
    vee: bool = False

    def __str__(self) -> str:
        words = [self.name, f"{self.devices}x{self.microbatches}"]
        words += [f"rounds {self.rounds}"] if self.rounds > 1 else []
        words += [f"keeps {self.limit}"] if self.limit else []
        words += [f"within {self.memory}"] if self.memory else []
        return " ".join(words + ["recompute"] * self.recompute + ["vee"] * self.vee)

    @classmethod
    def parse(cls, text: str) -> Order:
        """Parse an order."""
        name, sizes, *words = text.split()
        numbers = dict(zip(words, words[1:]))
        limit, memory = (int(numbers.get(word, 0)) for word in ("keeps", "within"))
        devices, microbatches = map(int, sizes.split("x"))
        rounds = int(numbers.get("rounds", 1))
        recompute, vee = "recompute" in words, "vee" in words
        return cls(
            name=name,
            devices=devices,
            microbatches=microbatches,
            limit=limit,
            memory=memory,
            recompute=recompute,
            rounds=rounds,
            vee=vee,
        )

    @property
    def splits(self) -> bool:
        """Whether weight gradients are pieces of their own."""
        return self.name == "zero_bubble"

    @property
    def may_split(self) -> bool:
        """Whether weight gradients may become pieces: auto chooses among such schedules."""
        return self.name in ("zero_bubble", "auto")

    @property
    def places(self) -> StagePlacement:
        """The map between devices and stages."""
        return StagePlacement(self.devices, self.rounds, self.vee)

    def zero_bubble(self, limit: int) -> Order:
        """Return the zero-bubble schedule with a limit on activations."""
        return replace(self, name="zero_bubble", limit=limit)

    @cached_property
    def schedule(self) -> Schedule:
        """The order of all pieces on all devices, if all pieces take equally long."""
        return self.timed(Times())

    def timed(self, times: Times) -> Schedule:
        """Return all devices' pieces in order. times: for one stage's pieces."""
        p, m, rounds = self.devices, self.microbatches, self.rounds
        if self.name == "forward":
            return forward_schedule(self.places, m, times)
        if self.name == "gpipe":
            return in_ticks(p, m, 1, times)
        limit = self.limit or self.usual_limit
        return list_schedule(p, m, split=self.splits, memory=limit, times=times, rounds=rounds)

    @property
    def usual_limit(self) -> int:
        """The activations that 1F1B keeps: one a stage, and with rounds those under way."""
        waits = self.rounds > 1 and not self.splits
        return self.devices * self.rounds + (self.devices - 1) * waits


def order_within(order: Order, activation: int, has_backward: bool) -> Order:
    """Return the order that a pipeline runs. activation: a stage's bytes for a microbatch.

    Without a backward there are forwards alone. "auto" becomes the zero-bubble schedule with the
    shortest step within the memory. Without a memory limit it keeps as many activations as 1F1B.

    Raises:
        ShardingError: The memory does not suffice.
    """
    p, m, rounds = order.devices, order.microbatches, order.rounds
    if not has_backward:
        return replace(order, name="forward", limit=0, memory=0)
    if not order.memory:
        return replace(order, name="zero_bubble") if order.name == "auto" else order
    most = order.memory // activation if activation else m * rounds
    if most < (m if order.name == "gpipe" else rounds):
        raise ShardingError.here(
            f"a pipeline has memory={order.memory} bytes for activations, and a microbatch takes "
            f"{activation}" + f" in each of {rounds} rounds" * (rounds > 1),
            fix="use more microbatches, recompute=True or more memory"
            + ("; schedule='1f1b' keeps fewer" if order.name == "gpipe" else ""),
        )
    # More than the usual limit would gain nothing.
    if order.name in ("gpipe", "1f1b"):
        return replace(order, limit=0 if order.name == "gpipe" else min(most, order.usual_limit))
    # There is a point: the curve begins at `rounds`, and most >= rounds.
    points = [point for point in curve(p, m, rounds=rounds) if point[0] <= most]
    # The shortest bubble; with equal bubbles, the least memory.
    limit, _ = min(points, key=lambda point: (point[1], point[0]))
    return order.zero_bubble(limit)
