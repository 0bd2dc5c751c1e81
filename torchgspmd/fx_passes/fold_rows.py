"""Fold like rows in a printed graph: repeated layers are printed once, with `x 96`.

Rows are like if they differ only in the numbers in their names. A run is folded if its rows repeat
at least MIN_REPEATS times in sequence.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

MIN_REPEATS = 4
MIN_SAVED = 8  # rows that folding has to save
MAX_PERIODS = 256  # that are tried from one row on
_NUMBER_OF_NAME = re.compile(r"(%\w*?)_\d+(?=_|\b)")


@dataclass(frozen=True)
class Run:
    """Rows `start` to `start + period`, which repeat; one row that does not has period 1."""

    start: int
    period: int = 1
    repeats: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.period * self.repeats


def like(text: str) -> str:
    """Return a row's text without the numbers in names, equal for like rows.

    Example:
        >>> like("%relu_5_g = all_gather(%layers_3_weight, 0)")
        '%relu_g = all_gather(%layers_weight, 0)'
    """
    # Again and again: a name may have several numbers, and a match ends at the first.
    while (shorter := _NUMBER_OF_NAME.sub(r"\1", text)) != text:
        text = shorter
    return text


def repetitions(rows: Sequence[Hashable], min_saved: int = MIN_SAVED) -> Iterator[Run]:
    """Yield a sequence's runs, in order: repeated rows as one run, each other row alone."""
    places: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row, []).append(i)
    seen = dict.fromkeys(places, 0)  # how many places of each row lie behind
    start = 0
    while start < len(rows):
        here = places[rows[start]]
        # A period can only end where the first row stands again: no other is tried.
        later = here[seen[rows[start]] + 1 :][:MAX_PERIODS]
        best = Run(start)
        for place in later:
            run = Run(start, place - start, _repeats(rows, start, place - start))
            if run.repeats >= MIN_REPEATS and run.stop > best.stop:
                best = run
        if best.stop - start - best.period < min_saved:
            best = Run(start)
        yield best
        for row in rows[start : best.stop]:
            seen[row] += 1
        start = best.stop


def _repeats(rows: Sequence[Hashable], start: int, period: int) -> int:
    """Count how often `period` rows stand in sequence from `start` on."""
    i = start
    while i + period < len(rows) and rows[i] == rows[i + period]:
        i += 1
    return (i - start) // period + 1
