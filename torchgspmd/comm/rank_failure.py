"""Where ranks are and how they end, and the words for it: of an error, and of lines on stderr.

Fates are ranks that have died, raised or left; the error of those that wait says who, where, and in
which step.

Stragglers are ranks for which the others wait. A rank that has waited for some seconds, or for much
of the last seconds, asks all others where they are. The first rank among those that wait writes.
The next line needs twice the wait. A rank that plans is no straggler: the first rank says once that
it plans. Before the first step has begun, no rank is late again and again: they read data and load
programs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RankError
from .json_rows import from_row

PHASES = ("", "planning", "forward", "forward ended", "backward", "backward ended")
PROGRAMS = CALL, BACKWARD = "a call of the module", "the backward of the module"
COMPARISON = "the comparison of the ranks"
_SHOWN = 8  # ranks that a text names
_ANEW = "start anew, from the last checkpoint: the connections are closed"


@dataclass(frozen=True)
class Status:
    """A rank's status, as others read it.

    step: wrapped-module calls that have begun. met: how often all ranks have met. calls: those that
    communicate, begun since then, the last ones. begun: how many these are in all.
    """

    step: int = 0
    phase: str = ""  # of the last program, one of PHASES
    waits_in: str = ""  # the collective, if it is in one
    at: str = ""  # of the model's code if it is in a program, otherwise of the user's
    last: str = ""  # the last collective that it has begun, with its line
    raised: str = ""  # by a call of this step: an exception that did not end the process
    met: int = 0
    calls: tuple[str, ...] = ()
    begun: int = 0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"no phase: {self.phase!r:.40}")

    @property
    def moment(self) -> tuple[int, int]:
        """Orders one rank's statuses."""
        return self.step, PHASES.index(self.phase)

    def other_call(self, other: Status) -> tuple[str, str] | None:
        """Return the first calls that differ since both ranks have met; None if none does yet.

        All ranks make the same calls in the same order: one rank's are the beginning of another's.
        """
        if self.met != other.met or self.met < 0:
            return None  # One was seen earlier, or it did not hold still.
        mine, others = (dict(enumerate(s.calls, s.begun - len(s.calls))) for s in (self, other))
        return next(
            ((mine[i], others[i]) for i in mine if i in others and mine[i] != others[i]), None
        )

    @property
    def when(self) -> str:
        return f"step {self.step}" + (f", {self.phase}" if self.phase else "")

    def place(self) -> tuple:
        """Return a key that is equal for ranks in the same collective."""
        runs = self.phase in ("forward", "backward")
        return self.step, self.phase, self.waits_in, self.at if runs else ""

    def __str__(self) -> str:
        return self.text("is")

    def text(self, verb: str) -> str:
        """Return words for the place, with "is" or "was"."""
        is_new = self.last and not (self.waits_in and self.last.startswith(self.waits_in))
        last = f", its last collective {self.last}" if is_new else ""
        where = f"in {self.waits_in} at" if self.waits_in else "in no collective, but at"
        raised = f"; a call of it raised {self.raised}" if self.raised else ""
        return f"{verb} {where} {self.at or '?'} ({self.when}{last}{raised})"


@dataclass(frozen=True)
class Fate:
    """How a rank's part in the mesh has ended.

    kind: a key in WORDS. status: with the exact step and phase. seen: where it was last seen, up to
    a second before. text: the exception that it raised, or how long `by` has waited for it. stack:
    Python's, the innermost call last.
    """

    rank: int
    host: str
    kind: str
    status: Status = field(default_factory=Status)
    seen: str = ""
    text: str = ""
    by: int = -1
    stack: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether nobody has to wait any longer."""
        return WORDS[self.kind].is_final

    @property
    def name(self) -> str:
        return f"rank {self.rank} on host {self.host}"

    def __str__(self) -> str:
        return WORDS[self.kind].what.format(f=self)


@dataclass(frozen=True)
class Words:
    """Words for one fate kind. is_final: whether others end their waits at once."""

    what: str
    fix: str
    is_final: bool = True


WORDS = {
    "died": Words(
        "{f.name} has died in {f.status.when}",
        "read the output of rank {f.rank} and the kernel's log of its host (killed for memory?), "
        "which say why; " + _ANEW,
    ),
    "lost": Words(
        "{f.name} has not answered since {f.status.when}: its host or a link to it is down",
        "check the host and its network (ping, ip link); " + _ANEW,
    ),
    "raised": Words(
        "{f.name} has raised {f.text}, in {f.status.when}",
        "read the traceback of rank {f.rank}, which says more; " + _ANEW,
    ),
    "stuck": Words(
        "{f.name} has not come",
        "make the same calls on every rank; if one has more to do, wait longer by "
        "parallelize(..., timeout=). Start anew: the connections are closed",
    ),
    "apart": Words("{f.text}", "make the same calls on every rank; " + _ANEW),
    "left": Words(
        "{f.name} has left: its program has ended after {f.status.when}",
        "make the same calls on every rank: as many steps, and the same at the end",
        is_final=False,
    ),
    "ended": Words("{f.name} has given up in {f.status.when}: {f.text}", _ANEW),
}


def apart(calls: Mapping[int, tuple[str, int, str]]) -> tuple[str, str]:
    """Return the headline and the reason of the error for ranks that make different calls.

    calls: by rank, the name of its call, its step, and its phase and line.
    """
    names = [name for name, _, _ in calls.values()]

    def order(rank: int) -> tuple:
        name, step, _ = calls[rank]
        # A rank whose step is behind is in the call that the others have left out. In one step,
        # programs are what all ranks go on with.
        return step, name in PROGRAMS, -names.count(name), rank

    first = min(calls, key=order)
    those = [rank for rank in calls if calls[rank][0] == calls[first][0]]
    others = [rank for rank in calls if rank not in those]
    places: dict[str, list[int]] = {}
    for rank, (name, step, at) in sorted(calls.items()):
        places.setdefault(f"in {name} (step {step}{at})", []).append(rank)
    has, wait = "has" if len(others) == 1 else "have", "waits" if len(those) == 1 else "wait"
    return (
        f"{listed(others)} {has} not come to {calls[first][0]}, where {listed(those)} {wait}",
        "; ".join(
            f"{listed(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}"
            for place, ranks in places.items()
        ),
    )


def merged(old: Fate | None, new: Fate) -> Fate:
    """Merge two fates that were told about a rank: the first, with the latest status."""
    if old is None or not old.is_final and new.is_final:
        return new
    return new if old.kind == new.kind and new.status.moment > old.status.moment else old


def failure(rank: int, own: Status, fates: Iterable[Fate], what: str = "") -> RankError:
    """Return the error for a rank that has waited for others, and does not any longer.

    what: the first line if no fate is known.
    """
    known = sorted(fates, key=lambda f: f.rank)
    # Ranks that gave up are victims: the error names the ranks that they waited for.
    causes = [f for f in known if f.is_final and f.kind != "ended"]
    roots = causes or [f for f in known if f.kind == "left"] or known
    for fate in roots:
        # Each rank that has found the difference tells of all ranks.
        if fate.kind == "apart":
            fix = WORDS["apart"].fix
            return RankError.here(fate.text, why=fate.seen, fix=fix)
    stacks = [f"\n        rank {f.rank}: {row}" for f in roots if f.by == rank for row in f.stack]
    late: dict[tuple[int, str], list[int]] = {}
    for fate in roots:
        if fate.kind == "stuck":
            late.setdefault((fate.by, fate.text), []).append(fate.rank)
    headlines = [str(fate) for fate in roots if fate.kind != "stuck"] + [
        f"rank {by} has waited {time} for {listed(ranks)}" for (by, time), ranks in late.items()
    ]
    return RankError.here(
        "; ".join(headlines)
        or what
        or f"rank {rank} has lost the connection to another rank, of which there is no word",
        why="; ".join([f"rank {rank} {own}", *(f"{f.name} {f.seen}" for f in roots if f.seen)])
        + "".join(stacks),
        fix=WORDS[roots[0].kind].fix.format(f=roots[0]) if roots else _ANEW,
    )


def listed(ranks: Iterable[int]) -> str:
    """Return ranks as words."""
    names = sorted(ranks)
    return f"rank{'s' * (len(names) > 1)} {', '.join(map(str, names[:_SHOWN]))}" + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )


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
