"""The list scheduler for pipelines: a free device does the most urgent piece that is ready.

Its rule: F and B in turn, W if there is nothing else, within a limit on the activations that a
device keeps. With p stages and a limit of p it is 1F1B. With W pieces it is ZB-H1, and with a limit
of 2p - 1 ZB-H2: points on one curve, bubble against memory.

A device may have several stages: in rounds that go round (interleaved), or in one that goes there
and back (ZBV's V). Then several rules are tried, and the best schedule is taken: first by its end,
then by its memory. Sources: PipeDream-Flush (arXiv 2006.09503), Megatron's interleaved
schedule (arXiv 2104.04473), Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ...errors import ShardingError
from .dual_pipe import dual_pipe, pairs
from .schedule import (
    Piece,
    Schedule,
    Steps,
    Times,
    in_ticks,
    needed_by,
    seconds_of,
    single,
    timed,
)

DUAL = "dualpipev"


@dataclass(frozen=True)
class StagePlacement:
    """Maps stages to devices. vee: the second round goes back, from the last device."""

    devices: int
    rounds: int = 1
    vee: bool = False

    @property
    def stages(self) -> int:
        return self.devices * self.rounds

    def device(self, stage: int) -> int:
        round_, at = divmod(stage, self.devices)
        return self.devices - 1 - at if self.vee and round_ % 2 else at

    def round(self, stage: int) -> int:
        return stage // self.devices

    def stage(self, device: int, round_: int) -> int:
        at = self.devices - 1 - device if self.vee and round_ % 2 else device
        return round_ * self.devices + at


def list_schedule(
    stages: int,
    microbatches: int,
    *,
    split: bool = False,
    memory: int | None = None,
    times: Times | None = None,
    rounds: int = 1,
) -> Schedule:
    """Return a list scheduler's schedule. Orders are chosen as if all pieces took equally long.

    Args:
        stages: One a device, in each round.
        microbatches: How many parts the batch is divided into.
        split: Whether weight gradients are pieces of their own, which fill gaps.
        memory: The most microbatch activations that a device keeps at once; None: no limit.
        times: How long the pieces take.
        rounds: How many stages a device has, neighbors in a round. Two rounds with split backwards
            are a V: the second one goes back.

    Returns:
        The schedule.

    Raises:
        ShardingError: The memory does not hold a microbatch.

    Example:
        >>> print(list_schedule(2, 3, memory=2))
        0  F0 F1    B0... F2 B1... B2...
        1     F0 B0... F1 B1... F2 B2...
    """
    if memory is not None and memory < rounds:
        raise ShardingError.here(
            f"no schedule can keep only {memory} activations", fix=f"give memory={rounds}, or more"
        )
    places = StagePlacement(stages, rounds, split and rounds == 2)
    return _shortest(places, microbatches, "FBW" if split else "FB", memory, times or Times())


@lru_cache(maxsize=256)
def _shortest(
    places: StagePlacement, microbatches: int, kinds: str, memory: int | None, times: Times
) -> Schedule:
    schedules = [timed(table, times) for table in _tables(places, microbatches, kinds, memory)]
    # Among equal ends: less idle time, then less memory.
    return min(schedules, key=lambda schedule: (schedule.end, schedule.bubble, max(schedule.kept)))


@lru_cache(maxsize=256)
def _tables(
    places: StagePlacement, microbatches: int, kinds: str, memory: int | None
) -> list[list[list[Piece]]]:
    """Return each rule's order of pieces: that of pieces that take equally long."""
    # With one stage a device, one rule is best for all sizes; with rounds no rule is.
    rules = _RULES[1:] if places.rounds > 1 else _RULES[:1]
    return [_Order(places, microbatches, kinds, memory, rule).run() for rule in rules]


def forward_schedule(places: StagePlacement, microbatches: int, times: Times) -> Schedule:
    return timed(_Order(places, microbatches, "F", None, _RULES[-1]).run(), times)


def curve(
    stages: int, microbatches: int, times: Times | None = None, rounds: int = 1
) -> list[tuple[int, float]]:
    """Return the bubble by the number of activations that a device may keep, until it is 0.

    With several rounds the number grows in steps, by one activation a round.
    """
    result: list[tuple[int, float]] = []
    # Every round needs room for at least one activation.
    for memory in range(rounds, rounds * microbatches + 1, rounds):
        schedule = list_schedule(
            stages, microbatches, split=True, memory=memory, times=times, rounds=rounds
        )
        result.append((memory, schedule.bubble))
        # More memory cannot shorten a schedule without a bubble.
        if not schedule.bubble:
            break
    return result


class _Order:
    """The list scheduler. done: the end of each piece that has begun."""

    def __init__(
        self, places: StagePlacement, microbatches: int, kinds: str, memory: int | None, rule: _Rule
    ) -> None:
        self.places, self.microbatches, self.memory, self.rule = places, microbatches, memory, rule
        self.kinds, self.seconds = kinds, seconds_of("W" in kinds, Times())
        self.done: dict[Piece, float] = {}
        self.rows: list[list[Piece]] = [[] for _ in range(places.devices)]
        self.turns = ["F"] * places.devices  # the last kind of F and B
        self.kept = [0] * places.devices
        rounds = range(places.rounds)
        self.next = [
            {(kind, places.stage(device, r)): 0 for kind in kinds for r in rounds}
            for device in range(places.devices)
        ]

    def run(self) -> list[list[Piece]]:
        """Return each device's pieces in order. A device that is free chooses."""
        now, total = 0.0, self.places.stages * self.microbatches * len(self.kinds)
        while len(self.done) < total:
            for device, row in enumerate(self.rows):
                is_free = not row or self.done[row[-1]] <= now
                if is_free and (piece := self.choose(device, now)):
                    self.add(device, piece)
                    self.done[piece] = now + self.seconds[piece.kind]
            # Nothing can begin before the next piece ends.
            now = min(end for row in self.rows if row and (end := self.done[row[-1]]) > now)
        return self.rows

    def add(self, device: int, piece: Piece) -> None:
        self.rows[device].append(piece)
        self.next[device][piece.kind, piece.stage] += 1
        # The last kind of piece frees the activation: B, or W where gradients of weights come
        # later.
        self.kept[device] += (piece.kind == "F") - (piece.kind == self.kinds[-1])
        # W fills gaps, and takes no turn from F and B.
        if piece.kind != "W":
            self.turns[device] = piece.kind

    def may_begin(self, device: int, stage: int) -> bool:
        """Return whether a device may keep an activation more.

        Later rounds need room, or no microbatch would leave. Without W pieces, activations beyond
        those under way are useless.
        """
        # Room for the later rounds of microbatches under way.
        later = self.places.rounds - 1 - self.places.round(stage)
        limit = self.microbatches * self.places.rounds if self.memory is None else self.memory
        if self.places.rounds == 1 and self.kinds == "FB":
            limit = min(limit, self.places.devices - device)
        return self.kept[device] + later < limit

    def choose(self, device: int, now: float) -> Piece | None:
        ready = [
            Piece(kind, stage, i)
            for (kind, stage), i in self.next[device].items()
            if i < self.microbatches and (kind != "F" or self.may_begin(device, stage))
        ]
        last = self.places.stages - 1
        ready = [
            piece
            for piece in ready
            # A piece that has not begun counts as not done: now + 1 > now.
            if all(self.done.get(other, now + 1) <= now for other in needed_by(piece, last))
        ]
        if not ready:
            return None
        return min(ready, key=lambda piece: self.rule(piece, self.turns[device], self.places))


# (piece, last kind of F and B, places) -> its urgency; the least one goes first.
_Rule = Callable[[Piece, str, StagePlacement], tuple]


def _rank(piece: Piece, kinds: str) -> int:
    return kinds.index(piece.kind)


def _in_turn(turn: str) -> str:
    return "FBW" if turn == "B" else "BFW"


def _depth(piece: Piece) -> int:
    """Return a piece's urgency: forwards near the end first, backwards near the start."""
    return piece.stage if piece.kind == "B" else -piece.stage


def _group(piece: Piece, places: StagePlacement) -> tuple[int, int]:
    """Group as many microbatches as devices, round by round."""
    return piece.microbatch // places.devices, -_depth(piece)


_RULES: Sequence[_Rule] = (
    lambda piece, turn, places: (_rank(piece, _in_turn(turn)),),
    lambda piece, turn, places: (_rank(piece, _in_turn(turn)), _depth(piece)),
    lambda piece, turn, places: (_rank(piece, "BFW"), _depth(piece)),
    lambda piece, turn, places: (_rank(piece, "FBW"), _depth(piece)),
    lambda piece, turn, places: (_rank(piece, _in_turn(turn)), _group(piece, places)),
    lambda piece, turn, places: (_rank(piece, "BFW"), _group(piece, places)),
)


@dataclass(frozen=True)
class Order:
    """A pipeline's schedule. Its text: `1f1b 4x8` has 4 devices and 8 microbatches.

    name: forward (no backward), gpipe, 1f1b, zero_bubble, dualpipev, or auto while it is not
    chosen. limit: the most activations that a device keeps. 0: all for gpipe, otherwise one a
    stage; if 1f1b has rounds, also those for which a device waits. memory: bytes that these may
    take; 0: unlimited.
    recompute: whether a backward computes the forward again. rounds: how many stages a device has.
    vee: whether the second round goes back. joint: whether pairs of dualpipev are one program.
    """

    name: str
    devices: int
    microbatches: int
    limit: int = 0
    memory: int = 0
    recompute: bool = False
    rounds: int = 1
    vee: bool = False
    joint: bool = False

    def __str__(self) -> str:
        words = [self.name, f"{self.devices}x{self.microbatches}"]
        words += [f"rounds {self.rounds}"] if self.rounds > 1 else []
        words += [f"keeps {self.limit}"] if self.limit else []
        words += [f"within {self.memory}"] if self.memory else []
        words += ["recompute"] * self.recompute + ["vee"] * self.vee
        return " ".join(words + ["joint"] * self.joint)

    @classmethod
    def parse(cls, text: str) -> Order:
        name, sizes, *words = text.split()
        numbers = dict(zip(words, words[1:]))
        devices, microbatches = map(int, sizes.split("x"))
        limit, memory = (int(numbers.get(word, 0)) for word in ("keeps", "within"))
        rounds = int(numbers.get("rounds", 1))
        marks = {mark: mark in words for mark in ("recompute", "vee", "joint")}
        return cls(name, devices, microbatches, limit, memory, rounds=rounds, **marks)

    @property
    def splits(self) -> bool:
        """Whether weight gradients are pieces of their own."""
        return self.name in ("zero_bubble", DUAL)

    @property
    def may_join(self) -> bool:
        """Whether pairs of pieces may become one program."""
        return self.name == DUAL and not self.joint

    @property
    def may_split(self) -> bool:
        """Whether weight gradients may become pieces: auto chooses among such schedules."""
        return self.splits or self.name == "auto"

    def steps(self, pieces: Sequence[Piece]) -> Steps:
        """Return a device's pieces, with those of one program together."""
        return pairs(pieces) if self.joint else single(pieces)

    @property
    def places(self) -> StagePlacement:
        return StagePlacement(self.devices, self.rounds, self.vee)

    def zero_bubble(self, limit: int) -> Order:
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
        if self.name == DUAL:
            return timed(dual_pipe(p, m), times, self.steps)
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
    least = {"gpipe": m, DUAL: 2 * p + 1}.get(order.name, rounds)
    if most < least:
        raise ShardingError.here(
            f"a pipeline has memory={order.memory} bytes for activations, and a microbatch takes "
            f"{activation}" + f" in each of {rounds} rounds" * (rounds > 1),
            fix="use more microbatches, recompute=True or more memory"
            + ("; schedule='1f1b' keeps fewer" if order.name in ("gpipe", DUAL) else ""),
        )
    if order.name == DUAL:
        return replace(order, memory=0)
    # More than the usual limit would gain nothing.
    if order.name in ("gpipe", "1f1b"):
        return replace(order, limit=0 if order.name == "gpipe" else min(most, order.usual_limit))
    # There is a point: the curve begins at `rounds`, and most >= rounds.
    points = [point for point in curve(p, m, rounds=rounds) if point[0] <= most]
    # The shortest bubble; with equal bubbles, the least memory.
    limit, _ = min(points, key=lambda point: (point[1], point[0]))
    return order.zero_bubble(limit)
