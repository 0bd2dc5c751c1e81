"""Stragglers: ranks for which the others wait, and the lines on stderr that name them.

A rank that has waited for some seconds, or for much of the last seconds, asks all others where they
are. The first rank among those that wait writes. The next line needs twice the wait.

A rank that plans is no straggler: the first rank says once that it plans. Before the first step has
begun, no rank is late again and again: they read data and load programs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .json_rows import from_row
from .rank_failure import Status, listed

EARLY, SOON = 0.6, 3.0  # Seconds to wait before the others are asked; before a line says so.
PLANNING = 60.0  # Seconds to wait for a line while a rank plans.
LONG_PLAN = 10.0  # Seconds of planning after which the first rank says that it plans.
WINDOW, TICK = 20, 0.25  # How many looks are counted, and the seconds between two.
MUCH, LITTLE = 0.4, 0.1  # Parts of that time that the others wait, and a straggler does.
ANSWER = 2.5  # Seconds in which a rank answers.


@dataclass(frozen=True)
class Answer:
    """Where a rank is. share: the part of the last seconds spent waiting. beside: see Peers."""

    rank: int
    host: str
    status: Status
    share: float = 0.0
    stack: tuple[str, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)


class Stragglers:
    """This rank's waits, and all ranks' answers."""

    def __init__(self, rank: int, processes: Sequence[int]) -> None:
        self.rank, self.processes = rank, processes
        self.share = 0.0  # of the last seconds, in which this rank has waited
        self._answers: dict[int, tuple[float, Answer]] = {}
        self._waits: deque[bool] = deque(maxlen=WINDOW)
        self._place: Any = None
        self._since = self._waited_since = time.monotonic()
        self._has_told = self._is_long = False
        self._asked = self._shared = 0.0
        self._least, self._pause = 0.0, 2 * WINDOW * TICK
        self._named: list[int] = []  # ranks of which a line has told, in this wait
        self._plans_since, self._has_told_plan = 0.0, False  # 0: it does not plan

    def has_to_ask(self, status: Status, place: object, limit: float) -> bool:
        """Note where this rank is; return whether to ask the others."""
        now, plans = time.monotonic(), status.phase == "planning"
        if place != self._place or not status.waits_in:
            self._place, self._since, self._waited_since = place, now, self._since
        self._waits.append(bool(status.waits_in) and not plans)
        self.share = sum(self._waits) / WINDOW
        soon = max(min(limit / 2, PLANNING if plans else SOON), self._least)
        is_long = bool(status.waits_in) and now - self._since >= soon
        if EARLY <= now - self._since < soon and status.waits_in and not plans:
            # The others' calls may say at once that nobody comes; no line is written.
            return not self.fresh()
        is_much = self.share >= MUCH and now - self._shared >= self._pause
        if not (is_long or is_much) or self._named or now - self._asked < ANSWER:
            return False
        self._asked, self._is_long = now, is_long
        return True

    def take(self, answer: Answer) -> None:
        """Note an answer, whoever has asked."""
        self._answers[answer.rank] = time.monotonic(), answer

    def fresh(self) -> dict[int, Answer]:
        """Return the answers from the last seconds, besides this rank's."""
        oldest = time.monotonic() - ANSWER
        return {r: a for r, (t, a) in self._answers.items() if t >= oldest and r != self.rank}

    def late(self, status: Status, with_silent: bool = False) -> dict[int, Answer]:
        """Return the ranks for which this one waits, by their fresh answers.

        These are the ranks in no collective, or else in another one. with_silent: and those that
        have not answered, as the ranks beside them have seen them last.
        """
        fresh = self.fresh()
        idle = {r: a for r, a in fresh.items() if not a.status.waits_in}
        late = idle or {r: a for r, a in fresh.items() if a.status.place() != status.place()}
        if with_silent:
            silent = set(self.processes) - {self.rank, *fresh}
            late = {r: self._seen(r) for r in sorted(silent)} or late
        return late if status.waits_in else {}

    def _seen(self, rank: int) -> Answer:
        """Return the last known status, for a rank that does not answer."""
        rows = [a.beside[str(rank)] for _, a in self._answers.values() if str(rank) in a.beside]
        known = [Answer(rank, str(row["host"]), from_row(Status, row["status"])) for row in rows]
        silent = Answer(rank, "unknown", Status())
        return max(known, key=lambda a: a.status.moment, default=silent)

    def report(self, status: Status, limit: float) -> str:
        """Return lines for stderr, if there is something to say; empty otherwise."""
        now = time.monotonic()
        if text := self._plans(status, now):
            return text
        if self._named and now - self._since < TICK:
            named, self._named = self._named, []
            seconds = self._since - self._waited_since
            told = f"torchgspmd: straggler: {listed(named)} came after {seconds:.1f} s"
            return told if self._has_told else ""
        answered = len(self.fresh()) == len(self.processes) - 1
        if not self._asked or now - self._asked < (TICK if answered else ANSWER):
            return ""
        self._asked, waited = 0.0, now - self._since
        if self._is_long and status.waits_in:
            late = self.late(status, with_silent=True)
            late = {r: a for r, a in late.items() if a.status.phase != "planning"}
            self._least, text = 2 * waited, self._waits_for(status, late, waited, limit)
            self._named, self._has_told = [*late], bool(text)
            return text
        return self._is_slow()

    def _plans(self, status: Status, now: float) -> str:
        """Return a line once in a long planning, on the first rank."""
        if status.phase != "planning" or status.waits_in or self.rank != self.processes[0]:
            self._plans_since, self._has_told_plan = 0.0, False
            return ""
        self._plans_since = self._plans_since or now
        if self._has_told_plan or now - self._plans_since < LONG_PLAN:
            return ""
        self._has_told_plan = True
        return f"torchgspmd: rank {self.rank} plans ({now - self._plans_since:.0f} s so far)"

    def _waits_for(
        self, status: Status, late: Mapping[int, Answer], seconds: float, limit: float
    ) -> str:
        """Return lines that name the ranks for which this one waits."""
        if not late or any(rank < self.rank and rank not in late for rank in self.fresh()):
            return ""
        return "\n".join(
            [
                f"torchgspmd: rank {self.rank} has waited {seconds:.1f} s for {listed(late)} "
                f"(straggler{'s' * (len(late) > 1)})",
                f"  rank {self.rank} {status}",
                *(f"  rank {r} on host {a.host} {a.status}" for r, a in sorted(late.items())),
                *(f"    rank {r}: {row}" for r, a in sorted(late.items()) for row in a.stack),
                f"  the wait ends after {limit:g} s: parallelize(..., timeout=)",
            ]
        )

    def _is_slow(self) -> str:
        """Return a line that names a rank that comes late again and again."""
        self._shared = time.monotonic()
        fresh = self.fresh()
        slow = min(fresh.values(), key=lambda a: a.share, default=None)
        waiting = [self.rank, *(r for r, a in fresh.items() if a.share >= MUCH)]
        if slow is None or slow.share > LITTLE or 2 * len(waiting) < len(fresh):
            return ""
        if slow.status.phase == "planning" or not slow.status.step:
            return ""
        self._pause *= 2
        if min(waiting) != self.rank:
            return ""
        return (
            f"torchgspmd: straggler: rank {slow.rank} on host {slow.host}: the others have waited "
            f"{self.share * WINDOW * TICK:.1f} s of the last {WINDOW * TICK:g} s for it"
            f" (step {slow.status.step})"
        )
