"""Bytes as bounded JSON: each key once, no numbers that JSON does not have, faults by place."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

_SHOWN = 80  # characters of a value in a message


class Unshareable(Exception):
    """A program that has no text, and why."""


class Stale(Exception):
    """A text that is not for this process, and why."""


class Malformed(Stale):
    """A text that no process has written: its faulty part, and the expected form.

    holder: the list or dict that has the part, which finds its place. key: the part's key in the
    holder; None for the holder itself.
    """

    def __init__(self, holder: Any, key: int | str | None, expected: str) -> None:
        self.holder, self.key, self.expected = holder, key, expected
        super().__init__(f"{self._part()}, not {expected}")

    def _part(self) -> str:
        value = self.holder
        if self.key is not None:
            try:
                value = value[self.key]
            except (LookupError, TypeError):
                return "there is nothing"
        return f"there is {shown(value)}"

    def located(self, root: Any) -> Stale:
        """Return the fault with its place in a text, such as `program[12][2]`."""
        place = _place_of(root, self.holder)
        if place is None:
            return self
        if self.key is not None:
            place += f"[{self.key}]" if isinstance(self.key, int) else f".{self.key}"
        return Stale(f"at {place.removeprefix('.') or 'the top'} {self}")


def shown(value: Any) -> str:
    """Return the first characters that a value has as JSON."""
    try:
        text = json.dumps(value)
    # A value may be anything by then: the message must not fail.
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _place_of(root: Any, part: Any) -> str | None:
    """Return the path to a part within a text; the part is found by identity."""
    # A stack, not recursion: the text may be nested as deep as json allows.
    open_parts: list[tuple[Any, str]] = [(root, "")]
    while open_parts:
        value, path = open_parts.pop()
        if value is part:
            return path
        if type(value) is list:
            open_parts += [(x, f"{path}[{i}]") for i, x in enumerate(value) if type(x) in _NESTED]
        elif type(value) is dict:
            open_parts += [(x, f"{path}.{k}") for k, x in value.items() if type(x) in _NESTED]
    return None


_NESTED = (list, dict)


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
    at_once = getattr(os, "O_NONBLOCK", 0)  # waits for nobody who writes a pipe
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | at_once)) as stream:
        # fstat on the open file: a check before opening could see another file.
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        if status.st_size > LARGEST:
            raise OSError(f"it has {status.st_size} bytes, and a plan at most {LARGEST}")
        return stream.read(LARGEST + 1), status


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
