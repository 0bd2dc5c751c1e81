"""Planning without the garbage collector, which would look at millions of small objects in vain: a
fifth of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """While inside, as a decorator or in a with statement, nothing is collected but by counting
    references.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
