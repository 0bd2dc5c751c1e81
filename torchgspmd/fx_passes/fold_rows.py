"""Fold like rows of a printed graph: layers that repeat are printed once, with `x 96`.

Rows are like if they differ in the numbers of their names alone. A run of rows that repeats at
least MIN_REPEATS times in sequence is folded.
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
    """Return a row's text without the numbers of names, equal for like rows.

    Example:
        >>> like("%relu_5_g = all_gather(%layers_3_weight, 0)")
        '%relu_g = all_gather(%layers_weight, 0)'
    """
    while (shorter := _NUMBER_OF_NAME.sub(r"\1", text)) != text:
        text = shorter
    return text


def repetitions(rows: Sequence[Hashable], min_saved: int = MIN_SAVED) -> Iterator[Run]:
    """Yield the runs of a sequence, in order: repeated rows as one run, each other row alone."""
    places: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row, []).append(i)
    seen = dict.fromkeys(places, 0)  # how many places of each row lie behind
    start = 0
    while start < len(rows):
        here = places[rows[start]]
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
    """Return how often `period` rows stand in sequence from a start on."""
    i = start
    while i + period < len(rows) and rows[i] == rows[i + period]:
        i += 1
    return (i - start) // period + 1
