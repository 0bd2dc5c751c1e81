"""ShardingError, the exception for users' mistakes, and the search for the line of the mistake."""

from __future__ import annotations

import difflib
import linecache
import os
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = (
    os.sep + "torch" + os.sep,
    os.sep + "torch_xla" + os.sep,
    "<frozen",
    "<string>",
    "<eval_with_key>",
    os.sep + "lib" + os.sep + "python3",
)
_INSTALLED = "-packages" + os.sep  # site-packages, dist-packages
_MAX_SHOWN = 20  # how many known words a message lists, if none is close


class ShardingError(ValueError):
    """A user's mistake: the fault, its place, the reason, a fix, and the result of trying that fix.

    Each is one line of the message. All but the first are optional.

    Args:
        what: The fault.
        where: The user's file:line.
        why: The reason: the chain of operations, or the rule that is broken.
        fix: The way out.
        tried: The plan with that fix: its collectives and the bytes that a device sends.

    Example:
        >>> from torchgspmd import ShardingError
        >>> print(ShardingError("mesh data=2 has no axis 'dat'", fix="did you mean 'data'?"))
        mesh data=2 has no axis 'dat'
          fix   did you mean 'data'?
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        tried: str | None = None,
    ) -> None:
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
        # of the code whose int() or max() needs a number; capture/builtin_numbers.py replaces them
        self.namespace: dict[str, Any] | None = None


class RankError(ShardingError):
    """A ShardingError of ranks that differ, or of one that is not there."""


def user_line() -> str | None:
    """Return `file:line` of the innermost frame of user code.

    Frames of torch, torchgspmd and the standard library are skipped.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES):
            return f"{_shorten(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def traced_line(entry: str) -> str | None:
    """Return `file:line` of the innermost frame of user code, or of a library of models.

    The library's line counts if no user code is between it and the entry: it tells more of a model
    than the one line that calls all of it.

    Args:
        entry: The file that calls the traced function.

    Returns:
        The line; a library's file begins with the name of the library.
    """
    frame, library = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if library and name == entry:
            return library
        if not name.startswith(_PACKAGE):
            if not any(part in name for part in _LIBRARIES):
                return f"{_shorten(name)}:{frame.f_lineno}"
            inside = name.partition(_INSTALLED)[2]
            if inside and library is None and not any(part in name for part in _LIBRARIES[:-1]):
                library = f"{inside}:{frame.f_lineno}"
        frame = frame.f_back
    return library


def line_in_file(name: str, line: int) -> str | None:
    """Return `file:line: code` of a line of user code; None for a line of a library."""
    if name.startswith(_PACKAGE) or any(part in name for part in _LIBRARIES):
        return None
    return f"{_shorten(name)}:{line}: {linecache.getline(name, line).strip()}".rstrip(": ")


def user_line_of(error: BaseException) -> str | None:
    """Return `file:line` of the innermost frame of user code in an error's traceback.

    If the error was raised in a library of models, the line there is named, too.
    """
    user, library = _user_frames(error)
    lines = [
        f"{_shorten(t.tb_frame.f_code.co_filename)}:{t.tb_lineno}" for t in (user, library) if t
    ]
    return ", in ".join(lines) or None


def user_expression_of(error: BaseException) -> str | None:
    """Return the text of the expression that the innermost frame of user code was in."""
    innermost = innermost_frame_of(error)
    if innermost is None or sys.version_info < (3, 11):
        return None
    frame = traceback.extract_tb(innermost, limit=1)[0]
    if frame.colno is None or frame.end_colno is None or frame.end_lineno != frame.lineno:
        return None
    line = linecache.getline(frame.filename, frame.lineno or 0)
    return line.encode()[frame.colno : frame.end_colno].decode()


def innermost_frame_of(error: BaseException) -> TracebackType | None:
    """Return the innermost frame of an error that is user code, or of a library of models."""
    user, library = _user_frames(error)
    return library or user


def _user_frames(error: BaseException) -> tuple[TracebackType | None, TracebackType | None]:
    """Return the innermost frames of user code and, behind it, of a library of models."""
    user, library, trace = None, None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES):
            user, library = trace, None
        elif not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES[:-1]):
            library = trace
        trace = trace.tb_next
    return user, library


def did_you_mean(word: str, vocabulary: Iterable[str]) -> str:
    """Return a sentence that names the closest known word, or else the first known words."""
    words = list(vocabulary)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    more = f" and {len(words) - _MAX_SHOWN} more" if len(words) > _MAX_SHOWN else ""
    return (
        f"did you mean '{close[0]}'?"
        if close
        else f"known are {', '.join(map(repr, words[:_MAX_SHOWN])) or 'none'}{more}"
    )


def _shorten(path: str) -> str:
    """Return a path relative to the working directory, if it is below that."""
    short = os.path.relpath(path) if os.path.isabs(path) else path
    return path if short.startswith("..") else short
