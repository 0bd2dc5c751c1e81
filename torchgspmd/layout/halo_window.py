"""Reach and Window: rows that a device needs beyond its own shard (halos).

A convolution, pool, slice or roll computes result position p from the operand rows r with

    low <= every * r - stride * p <= high

    convolution, stride s, padding c, kernel k, dilation d:     -c <= r - s p <= d (k - 1) - c
    the same transposed: as a gradient, or as upsampling         c - d (k - 1) <= s r - p <= c
    x[start::step]                                              start <= r - step p <= start
    flip of n rows                                              n - 1 <= r + p <= n - 1
    linear interpolation to three rows for every two            -3 <= 3 r - 2 p <= 2

A Reach is one such line; its inverse is the gradient's reach. A Reach bound to a shard count is a
Window: the row interval that device i needs. The interval moves with i and has the same length on
all devices. Source: GSPMD (arXiv 2105.04663, section 4.3 and appendix A.2), halo exchange with
shifting offsets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .open_sizes import OpenSize


@dataclass(frozen=True)
class Reach:
    """The rows in an operand dimension that position p of a factor reads.

    fill: the content of rows outside the dimension; None if it does not matter. wrap: rows are
    counted around the end, so that none is outside.
    """

    low: int
    high: int
    stride: int = 1
    every: int = 1
    fill: float | None = None
    wrap: bool = False

    @property
    def fits_any_size(self) -> bool:
        """Whether its window is a shard and some rows beside it, whatever the size."""
        # Otherwise a row is the farther from its shard the larger the size is.
        is_dense = self.stride == self.every == 1 and not self.wrap
        return is_dense and self.low <= 0 <= self.high

    def inverse(self, fill: float | None = None) -> Reach:
        """Return the reach from a row to the positions that read it, as a gradient needs."""
        sign = 1 if self.stride > 0 else -1
        # A flip has a negative stride: the bounds change sign, so that `every` stays positive.
        low, high = sorted((-self.low * sign, -self.high * sign))
        return Reach(low, high, self.every * sign, abs(self.stride), fill, self.wrap)

    def __str__(self) -> str:
        """Return a slice, `[2p-1:2p+2]`; `/3` at its end: every third position has a row."""

        def bound(shift: int) -> str:
            return f"{_times(self.stride, 'p')}{shift:+d}" if shift else _times(self.stride, "p")

        divisor = f"/{self.every}" if self.every > 1 else ""
        return f"[{bound(self.low)}:{bound(self.high + 1)}{divisor}]"

    def bind(self, positions: int, size: int, count: int) -> Window:
        """Return the window of `size` rows that `count` shards of the positions read."""
        is_open, positions, size = isinstance(positions, OpenSize), int(positions), int(size)
        # Shards are padded to equal blocks of ceil(positions / count), the last one too.
        block = -(-positions // count)
        low, high = self._rows(0, block)
        step = self.stride * block
        # Begin and end of the interval round differently unless a step is a multiple of `every`.
        if step % self.every == 0:
            length = high // self.every - -(-low // self.every) + 1
        else:  # devices need different numbers of rows: the most that such an interval can have
            length = (high - low) // self.every + 1
        first, last = self._rows(0, positions)
        begin, end = -(-first // self.every), last // self.every + 1
        if not self.wrap:
            begin, end = min(max(begin, 0), size), min(max(end, 0), size)
        return Window(
            step=step,
            start=low + self.every - 1,
            every=self.every,
            length=length,
            begin=begin,
            end=max(begin, end),
            fill=self.fill,
            wrap=size if self.wrap else 0,
            open=is_open,
        )

    def through(self, window: Window, size: int) -> Window | None:
        """Return the window of `size` rows that a window of positions reads, one row a position.

        None if the rows are not equally spaced, or if rows outside would need two different fills.
        """
        # Windows compose only by a shift or a flip: with a stride the rows have gaps between them.
        if (
            self.every != 1
            or self.low != self.high
            or abs(self.stride) != 1
            or window.wrap
            or window.open
            or self.stride < 0
            and window.every != 1
        ):
            return None
        if self.fill is not None and window.fill not in (None, self.fill):
            return None
        if self.stride < 0:
            step, start = -window.step, self.low - window.length + 1 - window.start
            begin, end = self.low - window.end + 1, self.low - window.begin + 1
        else:
            step, start, begin, end = (
                window.step,
                window.start + self.low * window.every,
                window.begin + self.low,
                window.end + self.low,
            )
        if not self.wrap:
            begin, end = min(max(begin, 0), size), min(max(end, 0), size)
        fill = window.fill if self.fill is None else self.fill
        return Window(
            step=step,
            start=start,
            every=window.every,
            length=window.length,
            begin=begin,
            end=max(begin, end),
            fill=fill,
            wrap=size if self.wrap else 0,
        )

    def _rows(self, start: int, count: int) -> tuple[int, int]:
        """Return the smallest and largest every * r for `count` positions from `start` on."""
        # Both ends: with a negative stride the last position reads the smallest row.
        ends = (self.stride * start, self.stride * (start + count - 1))
        return self.low + min(ends), self.high + max(ends)


@dataclass(frozen=True)
class Window:
    """The rows that device i holds: `length` rows from (step * i + start) // every on.

    Rows in begin:end have content. The others hold `fill`, or anything if that is None. wrap: row r
    means row r % wrap; 0 if rows do not wrap. open: only a run knows the size, and these numbers
    fit its stand-in; the window is a shard and some rows beside it.
    """

    step: int
    start: int
    every: int
    length: int
    begin: int
    end: int
    fill: float | None = None
    wrap: int = 0
    open: bool = False

    def held(self, rows: int) -> int:
        """Return how many rows a device holds whose shard has `rows`."""
        # length - step: the rows beside the shard, which are the same for every size.
        return rows + self.length - self.step if self.open else self.length

    def in_run(self, rows: int, size: int) -> Window:
        """Return the window in a run, where a shard has `rows` rows and the dimension `size`."""
        if not self.open:
            return self
        numbers = {"step": rows, "length": self.held(rows), "end": size}
        return replace(self, **numbers, open=False)

    def first(self, index: Any) -> Any:
        """Return the first row of device `index`, a number or a value of the program."""
        return (self.step * index + self.start) // self.every

    def is_block(self, size: int, count: int) -> bool:
        """True if the window is the very shard that a device holds without a window."""
        rows = -(-size // count)
        return (
            self.length == rows
            and not self.wrap
            and self.step == rows * self.every
            and 0 <= self.start < self.every
            and (
                # With a fill no row may be undefined, as the padding of a shard is.
                self.fill is None
                or rows * count == size
                and not self.open
                and self.begin <= 0
                and self.end >= size
            )
        )

    def pieces(
        self, index: int, size: int, count: int, rows: int = 0
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield a device's rows: (owner, first in its shard, first in the window, row count).

        rows: per shard, if shards are whole groups.
        """
        rows, first = rows or -(-size // count), self.first(index)
        row, end = max(first, self.begin), min(first + self.length, self.end)
        while row < end:
            source = row % self.wrap if self.wrap else row
            owner = source // rows
            # A piece ends where its owner's shard does; the last shard may end early, in padding.
            length = min(end - row, min((owner + 1) * rows, size) - source)
            yield owner, source - owner * rows, row - first, length
            row += length

    def __str__(self) -> str:
        """Return the notation: `8i-1:+10 in 0:64 else 0` has ten rows from 8i-1 on."""
        start = _times(self.step, "i") + (f"{self.start:+d}" if self.start else "")
        start = f"({start})/{self.every}" if self.every > 1 else start
        fill = "" if self.fill is None else f" else {_shortest(self.fill)}"
        wrap = f" wrap {self.wrap}" if self.wrap else ""
        of_run = " open" if self.open else ""
        return f"{start}:+{self.length} in {self.begin}:{self.end}{fill}{wrap}{of_run}"

    @classmethod
    def parse(cls, text: str) -> Window:
        """Parse the notation that str() prints."""
        match = _WINDOW.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is not a window")
        step, start, every, length, begin, end, fill, wrap, of_run = match.groups()
        step = {"": 1, "-": -1}[step] if step in ("", "-") else int(step)
        return cls(
            step=step,
            start=int(start or 0),
            every=int(every or 1),
            length=int(length),
            begin=int(begin),
            end=int(end),
            fill=None if fill is None else float(fill),
            wrap=int(wrap or 0),
            open=bool(of_run),
        )

    @property
    def short(self) -> str:
        """The notation without the rows that have content: `8i-1:+10`."""
        return str(self).partition(" in ")[0]


_WINDOW = re.compile(
    r"\(?(-?\d*)i([+-]\d+)?\)?(?:/(\d+))?:\+(\d+) in (-?\d+):(-?\d+)"
    r"(?: else (\S+))?(?: wrap (\d+))?( open)?"
)


def _shortest(number: float) -> str:
    """Return the shortest text that parses to exactly this number."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(float(number))


def _times(factor: int, name: str) -> str:
    """Return a product such as `2p`, `p` or `-p`."""
    return {1: "", -1: "-"}.get(factor, str(factor)) + name


@lru_cache(maxsize=4096)
def sent_rows(window: Window, size: int, count: int, rows: int = 0) -> int:
    """Return the most rows a device sends when `count` shards of `size` rows become windows.

    rows: see Window.pieces.
    """
    # The largest sender decides: all devices wait for it, at the edges or in the middle.
    sent = [0] * count
    for index in range(count):
        for owner, _, _, length in window.pieces(index, size, count, rows):
            sent[owner] += length * (owner != index)
    return max(sent)
