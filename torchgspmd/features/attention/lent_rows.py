"""Causal rings in which late devices lend their last queries to early ones for all steps.

    device      0             1             2             3
    own rows    q0            q1            most of q2    most of q3
    lent rows   end of q3     end of q2

The last rows of a sequence see most keys, so a few of them balance the work. Of 8 devices the last
one lends 45 % of its rows, the fifth one 10 %. All keys travel, also to those that borrow. Queries
are sent before the first step, and results return after the last one. This sends less than loans
for single steps (lending.py) if several heads of queries share a head of keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class LentRows(NamedTuple):
    """Which rows a device computes. rows: queries of a device before it lends any."""

    n: int
    me: int
    rows: int

    @property
    def partner(self) -> int:
        """The device that borrows this one's last rows, or lends it its own."""
        return self.n - 1 - self.me

    @property
    def kept(self) -> int:
        """The number of own rows that a device computes itself."""
        return self.rows - lent_by(self.me, self.n, self.rows)

    @property
    def borrowed(self) -> int:
        """The number of rows that a device computes for its partner."""
        return lent_by(self.partner, self.n, self.rows)

    def runs(self, total: int) -> list[tuple[slice, int]]:
        """Return the runs of adjacent rows, each with its first position.

        total: queries over all devices; rows behind the last one are padding.
        """
        own = (0, self.kept, self.me * self.rows)
        others = (self.kept, self.borrowed, (self.partner + 1) * self.rows - self.borrowed)
        return [
            (slice(row, row + valid), first)
            for row, count, first in (own, others)
            if (valid := min(count, total - first)) > 0
        ]


def lent_by(device: int, n: int, rows: int) -> int:
    """Return the number of rows that a device lends."""
    # In blocks: rows up to x see x**2 / 2, so the rows from `device` to x have a fair share, n / 2,
    # at this x.
    end = math.sqrt(device**2 + n)
    return max(0, round((device + 1 - end) * rows))


def sent_bytes(
    n: int, rows: int, keys: float, lent: float, result: float, is_backward: bool
) -> float:
    """Return the bytes that the device sends that sends most.

    rows: queries of a device. keys: the bytes of a block's keys and values. lent, result: those of
    all rows of a device.
    """
    shares = [lent_by(device, n, rows) / max(rows, 1) for device in range(n)]
    return max(
        keys * needs((me + 1) % n, n)
        + keys * (needs(me, n) if is_backward else 0)
        + lent * shares[me]
        + result * shares[n - 1 - me]
        for me in range(n)
    )


def needs(device: int, n: int) -> int:
    """Return the number of other devices' blocks that a device computes with."""
    return max(device, n - 1 - device)
