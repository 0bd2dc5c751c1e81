"""Faults in texts: a value cannot be written, is not for this process, or is no plan at all."""

from __future__ import annotations

import json
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
