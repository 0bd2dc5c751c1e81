"""Fates of ranks, and the error's words that the others raise: who, where, in which step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import RankError

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
