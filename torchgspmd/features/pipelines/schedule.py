"""Pipeline schedules: each device's pieces of work, in time.

    F  forward of a stage, for a microbatch        F(s) of a microbatch comes after its F(s-1),
    B  gradient for the stage's input              B(s) after its B(s+1), and after its F(s),
    W  gradient for the stage's weights            W(s) after its B(s)

If backwards are not split, B contains W. A microbatch's activations are kept from F to W.

A device may have several stages: with `rounds`, there are p x rounds stages. list_scheduler.py has
1F1B, interleaved and zero-bubble schedules.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...errors import ShardingError, did_you_mean

# Without a loss all forwards come first, so 1F1B and zero-bubble need a loss.
SCHEDULES = ("auto", "gpipe", "circular")
WITH_LOSS = ("auto", "gpipe", "1f1b", "zero_bubble", "dualpipev")
_COLORS = {"F": "#7aa6d8", "B": "#8cc58a", "W": "#e3b464"}


@dataclass(frozen=True, order=True)
class Piece:
    """A stage's work for a microbatch. kind: F, B or W."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Slot:
    """A piece, and when a device does it. beside: in one program with the piece before it."""

    piece: Piece
    begin: float
    end: float
    beside: bool = False


@dataclass(frozen=True)
class Times:
    """How long a stage's pieces take, in any unit.

    joint: a forward beside a backward and its weight gradients; None: one after the other.
    """

    forward: float = 1.0
    backward: float = 1.0  # the gradient for the stage's input
    weights: float = 1.0  # the gradient for its weights
    joint: float | None = None

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.weights


@dataclass(frozen=True)
class Schedule:
    """Each device's pieces over time. Printed: a line a device, a column a unit of time.

    rows: each device's slots. kept: the most stage activations that each device keeps at once.
    """

    rows: tuple[tuple[Slot, ...], ...]
    kept: tuple[int, ...]

    @cached_property
    def end(self) -> float:
        return max(row[-1].end for row in self.rows)

    @cached_property
    def bubble(self) -> float:
        """A device's idle time between its first piece and its last; the maximum over devices."""
        return max(
            row[-1].end - row[0].begin - sum(slot.end - slot.begin for slot in row)
            for row in self.rows
        )

    @cached_property
    def share(self) -> float:
        """The idle share of the devices' time in a step."""
        busy = sum(slot.end - slot.begin for row in self.rows for slot in row)
        return 1 - busy / (self.end * len(self.rows))

    @cached_property
    def idle(self) -> float:
        """The bubble's share of a device's time, from its first piece to its last."""
        return self.bubble / max(row[-1].end - row[0].begin for row in self.rows)

    @cached_property
    def table(self) -> tuple[tuple[str, ...], ...]:
        """Each device's pieces in order, as torch.distributed.pipelining writes them.

        `2F0` is stage 2's forward, `2B0` its backward, `2I0` and `2W0` the backward's two parts.
        """
        # torch writes I for a backward whose weight gradients are apart.
        split = any(slot.piece.kind == "W" for row in self.rows for slot in row)
        return tuple(
            tuple(str(slot.piece).replace("B", "I") if split else str(slot.piece) for slot in row)
            for row in self.rows
        )

    def __str__(self) -> str:
        # The shortest piece is one column wide.
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
                # Pieces of one program: `F4+B0'+W0'`.
                line = line[:-1] + "+" if slot.beside else line
                line = (
                    line.ljust(begin)
                    + _label(slot.piece, len(self.rows)).ljust(length, ".")[: length - 1]
                    + " "
                )
            lines.append(f"{i}  {line}".rstrip())
        return "\n".join(lines)

    def svg(self) -> str:
        """Render as SVG: one row per device, time from left to right; F, B and W have colors."""
        unit = 24 / min(slot.end - slot.begin for row in self.rows for slot in row)
        boxes = [
            f'<g><title>{html.escape(str(slot.piece))}</title><rect x="{40 + slot.begin * unit:g}" '
            f'y="{i * 24 + 4}" width="{(slot.end - slot.begin) * unit:g}" height="20" '
            f'fill="{_COLORS[slot.piece.kind]}" stroke="white" '
            # Odd rounds are paler.
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
    """Return a piece's letters in a picture; a device's later stages get primes."""
    return f"{piece.kind}{piece.microbatch}" + "'" * (piece.stage // devices)


def in_ticks(
    stages: int, microbatches: int, repeats: int = 1, times: Times | None = None
) -> Schedule:
    """Return the schedule of `pipeline` in one program: all forwards, then all backwards.

    In tick t device d computes microbatch (t - d) mod m, in round (t - d) div m.
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


def timed(
    table: Sequence[Sequence[Piece]], times: Times, joint: Callable[..., Steps] | None = None
) -> Schedule:
    """Return the schedule in which each device does its pieces in order, as early as it can.

    joint: divides a device's pieces into programs; None: each is one.
    """
    split = any(piece.kind == "W" for row in table for piece in row)
    last = max(piece.stage for row in table for piece in row)
    seconds = seconds_of(split, times)
    done: dict[Piece, float] = {}
    steps = [*map(joint or single, table)]
    rows: list[list[Slot]] = [[] for _ in table]
    at = [0] * len(table)
    while any(n < len(each) for n, each in zip(at, steps)):
        before = sum(at)
        for device, (row, each) in enumerate(zip(rows, steps)):
            # A device keeps its order: no piece overtakes one that waits.
            for pieces in each[at[device] :]:
                needs = {x for piece in pieces for x in needed_by(piece, last)} - {*pieces}
                if not all(other in done for other in needs):
                    break
                begin = max([done[other] for other in needs], default=0.0)
                begin = max(begin, row[-1].end) if row else begin
                length = sum(seconds[piece.kind] for piece in pieces)
                scale = 1.0
                if len(pieces) > 1 and times.joint is not None:
                    scale = times.joint / length
                for piece in pieces:
                    end = begin + scale * seconds[piece.kind]
                    row.append(Slot(piece, begin, end, piece != pieces[0]))
                    begin = end
                done |= dict.fromkeys(pieces, begin)  # a program sends when it ends
                at[device] += 1
        assert sum(at) > before, "a device waits for a piece that comes later"
    kept = tuple(max(_kept(row, "W" if split else "B")) for row in rows)
    return Schedule(tuple(map(tuple, rows)), kept)


Steps = Sequence[Sequence[Piece]]


def single(pieces: Sequence[Piece]) -> Steps:
    """Return the pieces, each as a program of its own."""
    return [(piece,) for piece in pieces]


def needed_by(piece: Piece, last: int) -> tuple[Piece, ...]:
    kind, stage, microbatch = piece.kind, piece.stage, piece.microbatch
    if kind == "F":
        return (Piece("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Piece("B", stage, microbatch),)
    own = Piece("F", stage, microbatch)
    # The last stage's backward begins at its own loss.
    return (own,) if stage == last else (own, Piece("B", stage + 1, microbatch))


def seconds_of(split: bool, times: Times) -> dict[str, float]:
    backward = times.backward + (0 if split else times.weights)
    return {"F": times.forward, "B": backward, "W": times.weights}


def _kept(row: Sequence[Slot], last: str) -> Iterator[int]:
    """Yield the number of activations that a device keeps, after each piece."""
    kept = 0
    for slot in row:
        # A forward needs its activation while it runs; the last kind frees it when it ends.
        yield kept + (slot.piece.kind == "F")
        kept += (slot.piece.kind == "F") - (slot.piece.kind == last)


def check_schedule(
    schedule: str, repeats: int, microbatches: int, loss: object, memory: int | None
) -> None:
    """Raise ShardingError unless there is such a schedule."""
    names = SCHEDULES if loss is None else WITH_LOSS
    if schedule not in (*SCHEDULES, *WITH_LOSS):
        raise ShardingError.here(
            f"there is no schedule '{schedule}'",
            fix=did_you_mean(schedule, dict.fromkeys((*SCHEDULES, *WITH_LOSS))),
        )
    if schedule not in names:
        raise ShardingError.here(
            f"schedule '{schedule}' is used with{'out' if loss is None else ''} a loss",
            why="backwards between forwards need the loss of a microbatch, which is outside"
            if loss is None
            else "the stages of a pipeline with its loss have neighboring blocks",
            fix="pass loss=fn, and call self.blocks(x, targets=...): docs/pipelines.md"
            if loss is None
            else "leave loss= out, or schedule='zero_bubble'",
        )
    # GPipe's stages are neighboring blocks, which a second round would split.
    if (schedule == "gpipe" and repeats > 1) or min(repeats, microbatches) < 1:
        raise ShardingError.here(
            f"schedule '{schedule}' is used with {repeats} repeats and {microbatches} microbatches",
            fix="use schedule='circular' for repeats, or with a loss '1f1b' or 'zero_bubble'; "
            "both numbers have to be at least 1",
        )
    if memory is not None and (loss is None or memory < 1):
        raise ShardingError.here(
            f"a pipeline with{'out' if loss is None else ''} a loss is given memory={memory}",
            fix="give a number of bytes, and loss=fn: without it all forwards come before all "
            "backwards",
        )
