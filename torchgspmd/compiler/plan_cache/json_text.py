"""Bytes as JSON: bounded in size, each key once, and no numbers that JSON does not have."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from .faults import Stale, shown

LARGEST = 1 << 30  # bytes of a text


def dump(value: object) -> str:
    """Return a value as JSON, which has no NaN."""
    return json.dumps(value, allow_nan=False)


def load(text: str | bytes) -> Any:
    """Parse a text.

    Raises:
        Stale: It is no JSON, or is nested too deeply.
    """
    if len(text) > LARGEST:
        raise Stale(f"it has {len(text)} bytes, and a plan at most {LARGEST}")
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(decoded, object_pairs_hook=_dict, parse_constant=_constant)
    except RecursionError:
        raise Stale("it is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, or of a number of too many digits
        raise Stale(f"it is no JSON: {error}") from None


def read_regular_file(path: str | Path) -> tuple[bytes, os.stat_result]:
    """Return a regular file's content, and its status.

    A device or a pipe might have no end, and opening a pipe waits.

    Raises:
        OSError: It is not there, is no regular file, or is too large.
    """
    with open(path, "rb", opener=_open_at_once) as stream:
        # fstat on the open file: a check before opening could see another file.
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        if status.st_size > LARGEST:
            raise OSError(f"it has {status.st_size} bytes, and a plan at most {LARGEST}")
        return stream.read(LARGEST + 1), status


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for who writes a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    # Python keeps the last of two equal keys; a checker of texts may have seen the first.
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return result


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
