"""The one exception a user can cause, and the search for the line of theirs that caused it."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = (
    os.sep + "torch" + os.sep,
    os.sep + "torch_xla" + os.sep,
    "<frozen",
    "<string>",
    "<eval_with_key>",
    os.sep + "lib" + os.sep + "python3",
)
_SHOWN = 20  # known words in a message, if none is close


class ShardingError(ValueError):
    """What is wrong, where (the user's file:line), why, how to fix it, and what came of it when
    that was tried.

    Every part but the first is optional; each is one line of the message.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        tried: str | None = None,
    ):
        self.what, self.where, self.why, self.fix, self.tried = what, where, why, fix, tried
        lines = [what]
        if where:
            lines.append(f"  where {where}")
        if why:
            lines.append(f"  why   {why}")
        if fix:
            lines.append(f"  fix   {fix}")
        if tried:
            lines.append(f"  tried {tried}")
        super().__init__("\n".join(lines))


def user_line() -> str | None:
    """`file:line` of the innermost frame that is neither torch nor torchgspmd nor the standard
    library.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES):
            return f"{_shorten(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def user_line_of(error: BaseException) -> str | None:
    """The same of the place where an error was raised; in a library of models the line there is
    told as well.
    """
    found, library, trace = None, None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        line = f"{_shorten(name)}:{trace.tb_lineno}"
        if not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES):
            found, library = line, None
        elif not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES[:-1]):
            library = line
        trace = trace.tb_next
    return f"{found}, in {library}" if found and library else found or library


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence naming the closest known word, or all of them, if they are few."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return (
        f"did you mean '{close[0]}'?"
        if close
        else f"known are {', '.join(map(repr, known[:_SHOWN])) or 'none'}{more}"
    )


def _shorten(path: str) -> str:
    short = os.path.relpath(path) if os.path.isabs(path) else path
    return path if short.startswith("..") else short
