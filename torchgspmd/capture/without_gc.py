"""Switch off the garbage collector while a plan is made: it would take a fifth of the time.

Planning makes millions of small objects, which the collector would scan in vain. At the end the new
objects join the old ones unscanned: one scan would take half a second for a large model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MOST_UNSEEN = 3_000_000  # Objects that the collector has not seen; it runs when there are more.


class _Unseen:
    """The number of objects that became old unscanned since the collector ran."""

    count = 0


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector: a context manager or a decorator."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _age()
            gc.enable()


def _age() -> None:
    """Make all objects old without a scan, unless too many have escaped it."""
    if gc.get_freeze_count():  # The user's, which only unfreezing everything would make old.
        return
    # Objects made since the last collection, none of them scanned.
    _Unseen.count += gc.get_count()[0]
    if _Unseen.count > MOST_UNSEEN:
        _Unseen.count = 0
        gc.collect()
    else:
        # freeze() takes all objects from the generations; unfreeze() puts them into the oldest one.
        gc.freeze()
        gc.unfreeze()
