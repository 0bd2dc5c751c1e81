"""Fates of ranks, and the error's words that the others raise: who, where, in which step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from ..errors import RankError, user_line
from .json_rows import from_row

PHASES = ("", "planning", "forward", "forward ended", "backward", "backward ended")
COMPARISON = "the comparison of the ranks"
_ANEW = "start anew, from the last checkpoint: the connections are closed"


@dataclass(frozen=True)
class Status:
    """A rank's status, as others read it.

    step: wrapped-module calls that have begun. comparisons: those that the rank has ended, where
    all ranks were. calls: that have begun since the last one.
    """

    step: int = 0
    phase: str = ""  # of the last program, one of PHASES
    waits_in: str = ""  # the collective, if it is in one
    at: str = ""  # of the model's code if it is in a program, otherwise of the user's
    last: str = ""  # the last collective that it has begun, with its line
    raised: str = ""  # by a call of this step: an exception that did not end the process
    comparisons: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"no phase: {self.phase!r:.40}")

    @property
    def moment(self) -> tuple[int, int]:
        """Orders one rank's statuses."""
        return self.step, PHASES.index(self.phase)

    def is_beyond(self, compared: Status) -> bool:
        """Return whether a rank has begun a call that another, in a comparison, has not."""
        if self.comparisons != compared.comparisons or self.waits_in == COMPARISON:
            return False  # It was seen earlier, or the comparison finds the difference.
        begun = bool(self.waits_in) or self.phase not in ("", "forward")
        is_same = self.calls == compared.calls and compared.phase == "forward"
        # Steps say nothing: a rank may have raised in an earlier call, before it was counted.
        return self.calls > compared.calls or is_same and begun

    @property
    def when(self) -> str:
        """The step and phase, as texts have them."""
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

    def as_message(self) -> dict[str, object]:
        """Return it as a message for Peers."""
        return {"kind": "fate", "fate": asdict(self)}

    @staticmethod
    def of_message(message: Mapping[str, object]) -> Fate:
        """Return the fate that a message tells."""
        return from_row(Fate, message["fate"])

    @property
    def name(self) -> str:
        """The rank and its host."""
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
    "raised": Words(
        "{f.name} has raised {f.text}, in {f.status.when}",
        "read the traceback of rank {f.rank}, which says more; " + _ANEW,
    ),
    "stuck": Words(
        "{f.name} has not come",
        "make the same calls on every rank; if one has more to do, wait longer by "
        "parallelize(..., timeout=). Start anew: the connections are closed",
    ),
    "apart": Words(
        "{f.name} runs a program that rank {f.by} does not call: it has begun {f.status.when}",
        "make the same calls on every rank, with arguments of equal shapes; " + _ANEW,
    ),
    "left": Words(
        "{f.name} has left: its program has ended after {f.status.when}",
        "make the same calls on every rank: as many steps, and the same at the end",
        is_final=False,
    ),
    "ended": Words("{f.name} has given up in {f.status.when}: {f.text}", _ANEW),
}


def merged(old: Fate | None, new: Fate) -> Fate:
    """Merge two fates that were told about a rank: the first, with the latest status."""
    if old is None or not is_final(old) and is_final(new):
        return new
    return new if old.kind == new.kind and new.status.moment > old.status.moment else old


def is_final(fate: Fate) -> bool:
    """Whether nobody has to wait any longer."""
    return WORDS[fate.kind].is_final


def failure(rank: int, own: Status, fates: Iterable[Fate], what: str = "") -> RankError:
    """Return the error for a rank that has waited for others, and does not any longer.

    what: the first line if no fate is known.
    """
    known = sorted(fates, key=lambda f: f.rank)
    # Ranks that gave up are victims: the error names the ranks that they waited for.
    causes = [f for f in known if is_final(f) and f.kind != "ended"]
    roots = causes or [f for f in known if f.kind == "left"] or known
    stacks = [f"\n        rank {f.rank}: {row}" for f in roots if f.by == rank for row in f.stack]
    return RankError(
        "; ".join(_headlines(roots))
        or what
        or f"rank {rank} has lost the connection to another rank, of which there is no word",
        where=user_line(),
        why="; ".join([f"rank {rank} {own}", *(f"{f.name} {f.seen}" for f in roots if f.seen)])
        + "".join(stacks),
        fix=WORDS[roots[0].kind].fix.format(f=roots[0]) if roots else _ANEW,
    )


def _headlines(fates: list[Fate]) -> list[str]:
    """Return a sentence for each fate, and one for all ranks that another has waited for."""
    late: dict[tuple[int, str], list[int]] = {}
    for fate in fates:
        if fate.kind == "stuck":
            late.setdefault((fate.by, fate.text), []).append(fate.rank)
    return [str(fate) for fate in fates if fate.kind != "stuck"] + [
        f"rank {by} has waited {time} for {listed(ranks)}" for (by, time), ranks in late.items()
    ]


def listed(ranks: Iterable[int]) -> str:
    """Return ranks as words."""
    names = sorted(ranks)
    return f"rank{'s' * (len(names) > 1)} {', '.join(map(str, names[:8]))}" + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )
