"""Numbers with units, and tables, as text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from math import isfinite

_UNITS = {"B": 1, "": 1} | {
    f"{letter}{i}B": base**power
    for i, base in (("I", 1024), ("", 1000))
    for power, letter in enumerate("KMGT", 1)
}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", re.IGNORECASE)


def size_text(count: float) -> str:
    """Return a byte count with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def parse_size(size: object) -> int | None:
    """Return the bytes of a number, or of a text such as 8GiB or 500 MB; None if it is neither."""
    if isinstance(size, str):
        found = _SIZE.fullmatch(size.strip())
        return round(float(found[1]) * _UNITS[found[2].upper()]) if found else None
    return int(size) if type(size) in (int, float) and isfinite(size) else None  # pyright: ignore


def short_source(source: str | None) -> str:
    """Return file:line relative to the working directory, if the file is below it."""
    # An absolute path would differ between machines, and fill the line.
    return (source or "").removeprefix(os.getcwd() + os.sep)


def time_text(seconds: float) -> str:
    """Return a time with its unit."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def count_text(count: float) -> str:
    """Return an operation count with its unit."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.4g} {unit}".rstrip()
        count /= 1000
    return f"{count:.4g} P"


def table_text(header: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> str:
    """Return a table as text, indented. right: the columns that are aligned to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  "
        + "  ".join(
            text.rjust(width) if name in right.split() else text.ljust(width)
            for text, width, name in zip(line, widths, header)
        ).rstrip()
        for line in lines
    )
