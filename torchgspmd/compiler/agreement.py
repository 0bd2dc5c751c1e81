"""The communication that a program may have: `communication=` of plan and parallelize.

    all_gather data blocks.*            a kind, its axes, globs over modules; * stands for any
    backward * data                     a phase before it: the other one is not agreed
    all_reduce model *.down *.out 1GiB  a device sends at most so much by these in a run
    2GiB                                at most so much in all
    named                               what `reshard` names in the source

A module's glob holds for the modules in it, and for its weights. A path stands for the collectives
in that golden text, and "explicit" for what the source names, and the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ..comm.collective import Collective
from ..comm.kinds import collective_kinds
from ..errors import ShardingError, did_you_mean
from ..fx_passes.units import parse_size, short_source, size_text
from ..layout.mesh import Mesh
from ..layout.sub_axes import whole_axis
from .golden import COMMUNICATION, Row, collective_row, place_text, read

EXPLICIT, NAMED = "explicit", "named"
_PHASES = ("forward", "backward")


class AgreedRow(NamedTuple):
    """A row that agrees to some communication. budget: bytes that a device sends by it in a run."""

    text: str
    phase: str = "*"
    kind: str = "*"
    axes: str = "*"
    globs: tuple[str, ...] = ()
    budget: int | None = None
    named: bool = False

    def allows(self, each: Collective) -> bool:
        """Return whether a collective is of this row."""
        if self.named:
            return each.named
        axes = {whole_axis(axis) for axis in each.axes}
        return (
            self.phase in ("*", _PHASES[each.backward])
            and self.kind in ("*", each.kind)
            and (self.axes == "*" or {*self.axes.split("+")} == axes)
            and (not self.globs or any(_matches(glob, each.module) for glob in self.globs))
        )


@dataclass(frozen=True)
class Agreement:
    """The communication that is agreed: rows and a budget for all, or a golden text's rows."""

    rules: tuple[AgreedRow, ...] = ()
    budget: int | None = None  # bytes
    golden: tuple[tuple[Row, int], ...] | None = None
    path: str = ""

    @classmethod
    def of(cls, given: object) -> Agreement | None:
        """Return the agreement of an option's value.

        Raises:
            ShardingError: A row cannot be read, or there is no such file.
        """
        if given is None or isinstance(given, cls):
            return given
        if given == EXPLICIT:
            return cls((AgreedRow(NAMED, named=True), AgreedRow("backward * *", "backward")))
        if isinstance(given, (str, Path)):
            rows = read(given).sections[COMMUNICATION]
            return cls(golden=tuple(sorted(rows.items())), path=str(given))
        if not isinstance(given, Iterable):
            raise ShardingError.here(
                f"communication is {given!r}",
                fix='give rows, such as ["all_reduce model *.down"], or a file of Plan.check',
            )
        rows = [_rule(str(row)) for row in given]
        budgets = [row.budget for row in rows if not row.kind and row.budget is not None]
        rules = tuple(row for row in rows if row.kind)
        # A budget alone agrees to any kind.
        rules = rules or ((AgreedRow("* *"),) if budgets else ())
        return cls(rules, min(budgets, default=None))

    def faults(self, collectives: Sequence[Collective]) -> dict[Row, NotAgreed]:
        """Return the collectives that are not agreed, by their lines in a golden text."""
        found: dict[Row, NotAgreed] = {}
        for each, count, why in self._beyond(collectives):
            row = collective_row(each)
            earlier = found.get(row)
            found[row] = NotAgreed(each, count, why) if earlier is None else earlier.plus(count)
        return found

    def _beyond(self, collectives: Sequence[Collective]) -> Iterator[tuple[Collective, int, str]]:
        """Yield each collective that is not agreed, how often it runs, and the reason."""
        if self.golden is not None:
            left = Counter(dict(self.golden))
            for each in collectives:
                row = collective_row(each)
                allowed = min(left[row], each.count)
                left[row] -= allowed
                if more := each.count - allowed:
                    yield each, more, f"{self.path} has it less often" if allowed else ""
            return
        spent, total = Counter[int](), 0.0
        for each in collectives:
            i = next((i for i, rule in enumerate(self.rules) if rule.allows(each)), None)
            if i is None:
                yield each, each.count, ""
                continue
            spent[i] += round(each.sent_bytes)
            total += each.sent_bytes
            for limit, sent, text in (
                (self.rules[i].budget, spent[i], self.rules[i].text),
                (self.budget, total, "the budget of all"),
            ):
                if limit is not None and sent > limit:
                    yield each, each.count, f"{text}: {size_text(sent)} of {size_text(limit)} sent"
                    break

    def check_axes(self, mesh: Mesh) -> None:
        """Raise ShardingError for an axis that the mesh lacks."""
        for rule in self.rules:
            for axis in rule.axes.split("+"):
                if axis not in ("*", *mesh.names):
                    raise ShardingError.here(
                        f"communication '{rule.text}': mesh {mesh} has no axis '{axis}'",
                        fix=did_you_mean(axis, mesh.names),
                    )

    def way_out(self, each: Collective, after: object, over: bool, of_weight: bool) -> str:
        """Return how to agree to a collective.

        after: its layout. over: it is over a budget. of_weight: it moves a weight, for which the
        source may have no line.
        """
        if self.golden is not None:
            return f"agree to it: plan without communication=, then check('{self.path}', True)"
        if over:
            return "raise that budget"
        agree = f'agree to it: communication=[..., "{row_for(each)}"]'
        if not any(rule.named for rule in self.rules):
            return agree
        if of_weight:
            return agree.replace("...", '"named", "backward *"')
        return f'name it in the source: x = gspmd.reshard(x, "{after}"), for that value'


def row_for(each: Collective) -> str:
    """Return the row that agrees to a collective, and to like ones."""
    # Numbers stand for layers, unless there is nothing else in a name.
    like = place_text(each.module) if each.module else ""
    place = like if like.strip(".*") else each.module
    axes = "+".join(dict.fromkeys(map(whole_axis, each.axes)))
    return f"{each.kind} {axes} {place}".rstrip()


class NotAgreed(NamedTuple):
    """Like collectives that are not agreed: the first one, how many, and the reason, if any."""

    each: Collective
    count: int
    why: str = ""

    def plus(self, count: int) -> NotAgreed:
        """Return these and so many more."""
        return self._replace(count=self.count + count)

    def __str__(self) -> str:
        *name, sent = collective_row(self.each)
        place = f"  at {short_source(self.each.source)}" if self.each.source else ""
        return "  ".join((*name, f"{self.count} x {sent}")) + place


def _matches(glob: str, module: str) -> bool:
    """Return whether a glob matches a module's or weight's path, or a module that contains it."""
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), glob) for i in range(len(parts)))


def _rule(text: str) -> AgreedRow:
    """Read a row. kind "": a budget for all."""
    words = text.replace("<=", " ").split()
    budget = None
    for count in (2, 1):  # "500 MB" and "500MB"
        size = "".join(words[-count:])
        if len(words) >= count and size[-1:] in "bB" and parse_size(size) is not None:
            budget, words = parse_size(size), words[:-count]
            break
    if words == [NAMED]:
        return AgreedRow(text, budget=budget, named=True)
    if not words and budget is not None:
        return AgreedRow(text, kind="", budget=budget)
    phase = words.pop(0) if words and words[0] in _PHASES else "*"
    kinds = sorted({kind.counts_as or kind.name for kind in collective_kinds().values()})
    if not words or words[0] not in ("*", *kinds):
        raise ShardingError.here(
            f"communication '{text}' begins with no kind of collective",
            why='a row is a kind, axes and modules, such as "all_reduce model *.down"',
            fix=did_you_mean(words[0] if words else "", kinds),
        )
    kind, axes, *globs = [*words, "*"] if len(words) == 1 else words
    return AgreedRow(text, phase, kind, axes, tuple(globs), budget)
