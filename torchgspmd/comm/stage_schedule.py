"""Schedules of pipelines: which piece of work each device does when.

    F  forward of a stage, for a microbatch        F(s) of a microbatch comes after its F(s-1),
    B  gradient of what the stage takes            B(s) after its B(s+1), and after its F(s),
    W  gradient of the stage's weights             W(s) after its B(s)

Where backwards are whole, B has W in it. A microbatch's activations are kept from F to W.

list_schedule is a list scheduler: a device that is free does the most urgent piece that is ready,
F and B in turn, W if there is nothing else, within a limit of the activations that it keeps. With
p stages and a limit of p it is 1F1B; with pieces W it is ZB-H1, and with a limit of 2p - 1 ZB-H2:
points of one curve, bubble against memory. Sources: PipeDream-Flush
(arXiv 2006.09503), Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import ShardingError, user_line

_COLORS = {"F": "#7aa6d8", "B": "#8cc58a", "W": "#e3b464"}


@dataclass(frozen=True, order=True)
class Piece:
    """Work of a stage for a microbatch. kind: F, B or W."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Slot:
    """A piece, and when a device does it."""

    piece: Piece
    begin: float
    end: float


@dataclass(frozen=True)
class Times:
    """How long the pieces of a stage take, in any unit."""

    forward: float = 1.0
    backward: float = 1.0  # of the gradient of what the stage takes
    weights: float = 1.0  # of the gradient of its weights

    @property
    def whole(self) -> float:
        """All work of a stage for a microbatch."""
        return self.forward + self.backward + self.weights


@dataclass(frozen=True)
class Schedule:
    """What each device does. Print it: a line a device, a column a unit of time.

    rows: the slots of each device. kept: the most activations that each keeps at once, of stages.
    """

    rows: tuple[tuple[Slot, ...], ...]
    kept: tuple[int, ...]

    @cached_property
    def end(self) -> float:
        """The time of the step."""
        return max(row[-1].end for row in self.rows)

    @cached_property
    def bubble(self) -> float:
        """How long a device is idle between its first piece and its last; the most of all."""
        return max(
            row[-1].end - row[0].begin - sum(slot.end - slot.begin for slot in row)
            for row in self.rows
        )

    @cached_property
    def share(self) -> float:
        """The share of the step in which devices are idle."""
        busy = sum(slot.end - slot.begin for row in self.rows for slot in row)
        return 1 - busy / (self.end * len(self.rows))

    @cached_property
    def idle(self) -> float:
        """The share of a device's time, from its first piece to its last, that is bubble."""
        return self.bubble / max(row[-1].end - row[0].begin for row in self.rows)

    @cached_property
    def table(self) -> tuple[tuple[str, ...], ...]:
        """The pieces of each device in order, as torch.distributed.pipelining writes them.

        `2F0` is the forward of stage 2, `2B0` its backward, `2I0` and `2W0` the two parts of it.
        """
        split = any(slot.piece.kind == "W" for row in self.rows for slot in row)
        return tuple(
            tuple(str(slot.piece).replace("B", "I") if split else str(slot.piece) for slot in row)
            for row in self.rows
        )

    def __str__(self) -> str:
        unit = min(slot.end - slot.begin for row in self.rows for slot in row)
        width = (
            max(len(_label(slot.piece, len(self.rows))) for row in self.rows for slot in row) + 1
        )
        lines = []
        for i, row in enumerate(self.rows):
            line = ""
            for slot in row:
                begin, length = (
                    round(t / unit) * width for t in (slot.begin, slot.end - slot.begin)
                )
                line = (
                    line.ljust(begin)
                    + _label(slot.piece, len(self.rows)).ljust(length, ".")[: length - 1]
                    + " "
                )
            lines.append(f"{i}  {line}".rstrip())
        return "\n".join(lines)

    def svg(self) -> str:
        """Return a picture: a row a device, time from left to right; F, B and W have colors."""
        unit = 24 / min(slot.end - slot.begin for row in self.rows for slot in row)
        boxes = [
            f'<g><title>{html.escape(str(slot.piece))}</title><rect x="{40 + slot.begin * unit:g}" '
            f'y="{i * 24 + 4}" width="{(slot.end - slot.begin) * unit:g}" height="20" '
            f'fill="{_COLORS[slot.piece.kind]}" stroke="white" '
            f'fill-opacity="{1 - 0.35 * (slot.piece.stage // len(self.rows) % 2):g}"/>'
            f'<text x="{40 + (slot.begin + slot.end) / 2 * unit:g}" y="{i * 24 + 18}" '
            f'text-anchor="middle">{slot.piece.microbatch}</text></g>'
            for i, row in enumerate(self.rows)
            for slot in row
        ]
        names = [f'<text x="4" y="{i * 24 + 18}">{i}</text>' for i in range(len(self.rows))]
        words = {"F": "forward", "B": "backward", "W": "weights"}
        used = dict.fromkeys(slot.piece.kind for row in self.rows for slot in row)
        below = len(self.rows) * 24 + 22
        legend = [
            f'<text x="{40 + 80 * i}" y="{below}" fill="{_COLORS[kind]}">{words[kind]}</text>'
            for i, kind in enumerate(used)
        ]
        note = f"{self.share:.1%} idle, activations kept: {max(self.kept)}"
        legend.append(f'<text x="{40 + 80 * len(used)}" y="{below}">{note}</text>')
        width = max(60 + self.end * unit, 480)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{below + 8}" '
            f'font-family="sans-serif" font-size="11">\n'
            + "\n".join([*names, *boxes, *legend])
            + "\n</svg>\n"
        )


def _label(piece: Piece, devices: int) -> str:
    """Return a piece in a picture of letters; stages that follow on a device are primed."""
    return f"{piece.kind}{piece.microbatch}" + "'" * (piece.stage // devices)


def in_ticks(
    stages: int, microbatches: int, repeats: int = 1, times: Times | None = None
) -> Schedule:
    """Return the schedule of `pipeline` in one program: all forwards, then all backwards.

    In tick t device d computes for microbatch (t - d) mod m, in round (t - d) div m.
    """
    order = [(n // microbatches * stages, n % microbatches) for n in range(microbatches * repeats)]
    return timed(
        [
            [Piece("F", first + device, i) for first, i in order]
            + [Piece("B", first + device, i) for first, i in reversed(order)]
            for device in range(stages)
        ],
        times or Times(),
    )


def list_schedule(
    stages: int,
    microbatches: int,
    *,
    split: bool = False,
    memory: int | None = None,
    times: Times | None = None,
) -> Schedule:
    """Return the schedule of a list scheduler. Orders are chosen as if all pieces took as long.

    Args:
        stages: One a device.
        microbatches: How many parts the batch is divided into.
        split: Whether gradients of weights are pieces of their own, which fill gaps.
        memory: The most activations of microbatches that a device keeps at once; None: no limit.
        times: How long the pieces take.

    Returns:
        The schedule.

    Raises:
        ShardingError: There is no memory for a microbatch.

    Example:
        >>> print(list_schedule(2, 3, memory=2))
        0  F0 F1    B0... F2 B1... B2...
        1     F0 B0... F1 B1... F2 B2...
    """
    if memory is not None and memory < 1:
        raise ShardingError(
            f"a schedule that keeps {memory} activations",
            where=user_line(),
            fix="memory=1, or more",
        )
    order = _Order(stages, microbatches, split, memory).run()
    return timed(order, times or Times())


def curve(stages: int, microbatches: int, times: Times | None = None) -> list[tuple[int, float]]:
    """Return the bubble for each number of activations that a device may keep, until it is 0."""
    result: list[tuple[int, float]] = []
    for memory in range(1, microbatches + 1):
        schedule = list_schedule(stages, microbatches, split=True, memory=memory, times=times)
        result.append((memory, schedule.bubble))
        if not schedule.bubble:
            break
    return result


def timed(table: Sequence[Sequence[Piece]], times: Times) -> Schedule:
    """Return the schedule in which each device does its pieces in order, as early as it can."""
    split = any(piece.kind == "W" for row in table for piece in row)
    last = max(piece.stage for row in table for piece in row)
    seconds = _seconds(split, times)
    done: dict[Piece, float] = {}
    rows: list[list[Slot]] = [[] for _ in table]
    left = sum(map(len, table))
    while left:
        before = left
        for row, pieces in zip(rows, table):
            for piece in pieces[len(row) :]:
                needs = needed_by(piece, last)
                if not all(other in done for other in needs):
                    break
                begin = max([done[other] for other in needs], default=0.0)
                begin = max(begin, row[-1].end) if row else begin
                row.append(Slot(piece, begin, begin + seconds[piece.kind]))
                done[piece] = row[-1].end
                left -= 1
        assert left < before, "a device waits for a piece that comes later"
    kept = tuple(max(_kept(row, "W" if split else "B")) for row in rows)
    return Schedule(tuple(map(tuple, rows)), kept)


@dataclass(frozen=True)
class Order:
    """Which schedule a pipeline has. Its text: `1f1b 4x8` has 4 stages and 8 microbatches.

    name: forward (no backward), gpipe, 1f1b, zero_bubble, or auto while it is not chosen.
    limit: the most activations that a device keeps; 0: as many as there are stages, of gpipe all.
    memory: bytes that these may take; 0: any number. recompute: whether a backward computes the
    forward again.
    """

    name: str
    stages: int
    microbatches: int
    limit: int = 0
    memory: int = 0
    recompute: bool = False

    def __str__(self) -> str:
        words = [self.name, f"{self.stages}x{self.microbatches}"]
        words += [f"keeps {self.limit}"] if self.limit else []
        words += [f"within {self.memory}"] if self.memory else []
        return " ".join(words + ["recompute"] * self.recompute)

    @classmethod
    def parse(cls, text: str) -> Order:
        """Return the order of a text."""
        name, sizes, *words = text.split()
        numbers = dict(zip(words, words[1:]))
        limit, memory = (int(numbers.get(word, 0)) for word in ("keeps", "within"))
        stages, microbatches = map(int, sizes.split("x"))
        return cls(name, stages, microbatches, limit, memory, "recompute" in words)

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are pieces of their own."""
        return self.name == "zero_bubble"

    def zero_bubble(self, limit: int) -> Order:
        """Return the zero-bubble schedule with a limit of activations."""
        return replace(self, name="zero_bubble", limit=limit)

    @cached_property
    def schedule(self) -> Schedule:
        """Who does what when, if all pieces take as long."""
        return self.timed(Times())

    def timed(self, times: Times) -> Schedule:
        """Return who does what when. times: of the pieces of a stage."""
        p, m = self.stages, self.microbatches
        if self.name == "forward":
            return timed([[Piece("F", s, i) for i in range(m)] for s in range(p)], times)
        if self.name == "gpipe":
            return in_ticks(p, m, 1, times)
        return list_schedule(p, m, split=self.splits, memory=self.limit or p, times=times)


def order_within(order: Order, activation: int, has_backward: bool) -> Order:
    """Return the order that a pipeline runs. activation: bytes that a stage keeps of a microbatch.

    Without a backward there are forwards alone. "auto" is the zero-bubble schedule with the
    shortest step within the memory; without a limit of it, with the activations of 1F1B.

    Raises:
        ShardingError: The memory does not suffice.
    """
    p, m = order.stages, order.microbatches
    if not has_backward:
        return replace(order, name="forward", limit=0, memory=0)
    if not order.memory:
        return replace(order, name="zero_bubble") if order.name == "auto" else order
    most = order.memory // activation if activation else m
    if most < (m if order.name == "gpipe" else 1):
        raise ShardingError(
            f"memory={order.memory} bytes for activations of a pipeline, of which a microbatch "
            f"takes {activation}",
            where=user_line(),
            fix="more microbatches, recompute=True or more memory"
            + ("; schedule='1f1b' keeps fewer" if order.name == "gpipe" else ""),
        )
    if order.name in ("gpipe", "1f1b"):
        return replace(order, limit=0 if order.name == "gpipe" else min(most, p))
    points = [point for point in curve(p, m) if point[0] <= most]
    limit, _ = min(points, key=lambda point: (point[1], point[0]))
    return order.zero_bubble(limit)


def needed_by(piece: Piece, last: int) -> tuple[Piece, ...]:
    """Return the pieces that come before one. last: the last stage."""
    kind, stage, microbatch = piece.kind, piece.stage, piece.microbatch
    if kind == "F":
        return (Piece("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Piece("B", stage, microbatch),)
    own = Piece("F", stage, microbatch)
    return (own,) if stage == last else (own, Piece("B", stage + 1, microbatch))


def _seconds(split: bool, times: Times) -> dict[str, float]:
    backward = times.backward + (0 if split else times.weights)
    return {"F": times.forward, "B": backward, "W": times.weights}


def _kept(row: Sequence[Slot], last: str) -> Iterator[int]:
    """Yield how many activations a device keeps, after each piece."""
    kept = 0
    for slot in row:
        yield kept + (slot.piece.kind == "F")
        kept += (slot.piece.kind == "F") - (slot.piece.kind == last)


class _Order:
    """The list scheduler. done: when each piece ends, of those that have begun."""

    def __init__(self, stages: int, microbatches: int, split: bool, memory: int | None) -> None:
        self.stages, self.microbatches, self.memory = stages, microbatches, memory
        self.kinds, self.seconds = "FBW" if split else "FB", _seconds(split, Times())
        self.done: dict[Piece, float] = {}
        self.rows: list[list[Piece]] = [[] for _ in range(stages)]
        self.counts = [dict.fromkeys(self.kinds, 0) for _ in range(stages)]

    def run(self) -> list[list[Piece]]:
        """Return the pieces of each device in order. A device that is free chooses."""
        now, total = 0.0, self.stages * self.microbatches * len(self.kinds)
        while len(self.done) < total:
            for device, row in enumerate(self.rows):
                is_free = not row or self.done[row[-1]] <= now
                if is_free and (piece := self.choose(device, now)):
                    row.append(piece)
                    self.counts[device][piece.kind] += 1
                    self.done[piece] = now + self.seconds[piece.kind]
            now = min(end for row in self.rows if row and (end := self.done[row[-1]]) > now)
        return self.rows

    def limit(self, device: int) -> int:
        """Return the most activations that a device keeps: more are of no use without pieces W."""
        useful = self.microbatches if "W" in self.kinds else self.stages - device
        return useful if self.memory is None else min(self.memory, useful)

    def choose(self, device: int, now: float) -> Piece | None:
        """Return the most urgent piece that is ready: F and B in turn, or else W."""
        row, count = self.rows[device], self.counts[device]
        turn = next((piece.kind for piece in reversed(row) if piece.kind != "W"), "F")
        is_full = count["F"] - count[self.kinds[-1]] >= self.limit(device)
        for kind in dict.fromkeys(("F" if turn == "B" else "B", *self.kinds)):
            piece = Piece(kind, device, count[kind])
            if count[kind] == self.microbatches or (kind == "F" and is_full):
                continue
            needs = needed_by(piece, self.stages - 1)
            if all(self.done.get(other, now + 1) <= now for other in needs):
                return piece
        return None
