"""An error that many ranks raise is printed once, and by the other ranks as one line.

rank 2     the traceback, and the error's text
rank 0     torchgspmd: rank 0 has raised the same as rank 2: RankError: ...
"""

from __future__ import annotations

import functools
import os
import sys
import time
import zlib
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from ..compat.private_apis import _get_default_store, is_missing
from ..errors import ShardingError

_SAME = 60.0  # Seconds in which an equal error is the same one: a job may be started anew.


def install() -> None:
    """Print uncaught ShardingErrors so from now on; all others are printed as before."""
    sys.excepthook = _once(sys.excepthook)


def _once(before: Callable) -> Callable:
    @functools.wraps(before)
    def hook(kind: type, error: BaseException, trace: TracebackType | None) -> None:
        first = _first_rank(error) if isinstance(error, ShardingError) else None
        if first is None:
            before(kind, error, trace)
            return
        text = f"{kind.__name__}: {error}".partition("\n")[0]
        # One write: lines of several ranks must not run into one another.
        said = f"torchgspmd: rank {dist.get_rank()} has raised the same as rank {first}: {text}\n"
        os.write(2, said.encode())

    return hook


def _first_rank(error: ShardingError) -> int | None:
    """Return the rank that prints an error, if it is another one; None if it is this one."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_missing(_get_default_store):
        return None
    own, now = dist.get_rank(), time.time()
    key = f"torchgspmd.uncaught.{zlib.crc32(error.what.encode())}"
    try:
        # The store sets the value if it is not there, and returns the one that is there.
        said = _get_default_store().compare_set(key, "", f"{own} {now}").decode()
        first, since = said.split()
    except (RuntimeError, ValueError):  # The process that has the store has ended.
        return None
    return int(first) if int(first) != own and now < float(since) + _SAME else None
