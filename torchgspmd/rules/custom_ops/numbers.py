"""Functions for numbers that are known only when a program runs."""

from __future__ import annotations

from ...errors import ShardingError


def at_least(number: int, low: int, where: str | None) -> int:
    """Return a number, or raise ShardingError if the program was not made for one so small."""
    if number < low:
        raise ShardingError(
            f"a size that depends on values is {number}, and the program was made for {low} and "
            "more",
            where=where,
            why="forward branches on whether it is, and one program is made for all values",
            fix="leave such a batch out, or pad it to more",
        )
    return number
