"""ShardingError, the exception for users' mistakes, and the search for the mistake's line."""

from __future__ import annotations

import difflib
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = (
    os.sep + "torch" + os.sep,
    os.sep + "torch_xla" + os.sep,
    "<frozen",
    "<string>",
    "<eval_with_key>",
    "<torchgspmd ",
    os.sep + "lib" + os.sep + "python3",
)
_INSTALLED = "-packages" + os.sep  # site-packages, dist-packages
_MAX_SHOWN = 20  # how many known words a message lists, if none is close


class ShardingError(ValueError):
    """A user's mistake: the fault, its place, the reason, a fix, and a trial of that fix.

    Each is one line in the message. All but the first are optional.

    Args:
        what: The fault.
        where: The user's file:line.
        why: The reason: a chain of operations, or the rule that is broken.
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
        rows = {"where": where, "why": why, "fix": fix, "tried": tried}
        lines = [f"  {name:5} {text}" for name, text in rows.items() if text]
        super().__init__("\n".join([what, *lines]))
        # of the code whose int() or max() needs a number; capture/builtin_numbers.py replaces them
        self.namespace: dict[str, Any] | None = None

    @classmethod
    def here(
        cls, what: str, *, why: str | None = None, fix: str | None = None, tried: str | None = None
    ) -> Self:
        """Return the error whose place is the user's innermost line now.

        Args:
            what: The fault.
            why: The reason.
            fix: The way out.
            tried: The plan with that fix.

        Returns:
            The error, with `where` filled in.

        Example:
            >>> ShardingError.here("mesh data=2 has no axis 'dat'").what
            "mesh data=2 has no axis 'dat'"
        """
        return cls(what, where=user_line(), why=why, fix=fix, tried=tried)


class RankError(ShardingError):
    """A ShardingError for ranks that differ, or for one that is not there."""


def user_line() -> str | None:
    """Return the innermost user frame as `file:line`.

    Frames in torch, torchgspmd and the standard library are skipped.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _owner(name)[0]:
            return f"{_shorten(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)  # a trace asks at each operation for all frames
def _owner(file: str) -> tuple[bool, str]:
    """Return whether a file is the user's, or its path below the folder of packages."""
    if file.startswith(_PACKAGE):
        return False, ""
    if not any(part in file for part in _LIBRARIES):
        return True, ""
    # Libraries of models lie below lib/python3 too, so the last of _LIBRARIES is left out.
    is_of_torch = any(part in file for part in _LIBRARIES[:-1])
    return False, "" if is_of_torch else file.partition(_INSTALLED)[2]


def traced_line(entry: str) -> str | None:
    """Return the innermost frame in user code, or in a model library, as `file:line`.

    The library's line counts if no user code is between it and the entry. It tells more about a
    model than the one line that calls all of it.

    Args:
        entry: The file that calls the traced function.

    Returns:
        The line; a library's file begins with the library's name.
    """
    # One walk outwards: the first library frame is kept in case no user frame comes.
    frame, library = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        # Frames outside of the entry belong to the caller, not to the model.
        if library and name == entry:
            return library
        is_user, inside = _owner(name)
        if is_user:
            return f"{_shorten(name)}:{frame.f_lineno}"
        if inside and library is None:
            library = f"{inside}:{frame.f_lineno}"
        frame = frame.f_back
    return library


def line_in_file(name: str, line: int) -> str | None:
    """Return a user line as `file:line: code`; None for a library's line."""
    if name.startswith(_PACKAGE) or any(part in name for part in _LIBRARIES):
        return None
    return f"{_shorten(name)}:{line}: {linecache.getline(name, line).strip()}".rstrip(": ")


def user_line_of(error: BaseException) -> str | None:
    """Return the innermost user frame in an error's traceback as `file:line`.

    If a model library raised the error, the line there is named, too.
    """
    user, library = _user_frames(error)
    lines = [
        f"{_shorten(t.tb_frame.f_code.co_filename)}:{t.tb_lineno}" for t in (user, library) if t
    ]
    return ", in ".join(lines) or None


def user_expression_of(error: BaseException) -> str | None:
    """Return the expression that the innermost user frame was in, as text."""
    innermost = innermost_frame_of(error)
    if innermost is None or sys.version_info < (3, 11):
        return None
    # extract_tb computes the columns, which a traceback object lacks.
    frame = traceback.extract_tb(innermost, limit=1)[0]
    # Without columns, or over several lines, no part of one line is the expression.
    if frame.colno is None or frame.end_colno is None or frame.end_lineno != frame.lineno:
        return None
    line = linecache.getline(frame.filename, frame.lineno or 0)
    return line.encode()[frame.colno : frame.end_colno].decode()


def innermost_frame_of(error: BaseException) -> TracebackType | None:
    """Return an error's innermost frame in user code, or in a model library."""
    user, library = _user_frames(error)
    return library or user


def _user_frames(error: BaseException) -> tuple[TracebackType | None, TracebackType | None]:
    """Return the innermost frame in user code and, behind it, the one in a model library."""
    user, library, trace = None, None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES):
            # A library frame outside user code is not where the error was raised.
            user, library = trace, None
        elif not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES[:-1]):
            library = trace
        trace = trace.tb_next
    return user, library


def did_you_mean(word: str, vocabulary: Iterable[str]) -> str:
    """Return a sentence that names the closest known word, or else the first known words."""
    words = list(vocabulary)
    # The closest word alone: an error names one way out.
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    more = f" and {len(words) - _MAX_SHOWN} more" if len(words) > _MAX_SHOWN else ""
    return (
        f"did you mean '{close[0]}'?"
        if close
        else f"use one of {', '.join(map(repr, words[:_MAX_SHOWN]))}{more}"
        if words
        else "there is none"
    )


def is_misspelt(word: str, vocabulary: Iterable[str]) -> bool:
    """Return whether a word is nearly one of these."""
    return bool(difflib.get_close_matches(word, list(vocabulary), n=1, cutoff=0.8))


_OUTSIDE = re.compile(
    r"index (-?\d+) is out of bounds for dimension \d+ with size (\d+)|Target (-?\d+) is out of"
    r"|index out of range in self"
)


def outside_error(
    error: Exception,
    where: str | None,
    module: str,
    limit: int = 0,
    operands: Sequence[Any] = (),
) -> ShardingError | None:
    """Return the error for an index that a kernel found outside of its table; None for others.

    limit: the rows of the whole table, if the kernel had a shard of it. operands: the kernel's
    tensors. A lookup's own error does not name the index.
    """
    if (found := _OUTSIDE.search(str(error))) is None:
        return None
    index, size = found[1] or found[3], int(found[2] or 0)
    if index is None:
        index, size = _outside(operands, limit)
    elif limit and not 0 <= int(index) < limit:
        size = limit
    what = f"index {index} is outside" if index is not None else "an index is outside of its table"
    rows = f" of {size} rows" if size else ""
    return ShardingError(
        what + rows + (f", in module '{module}'" if module else ""),
        where=where,
        why=f"a class, a token or a position is 0 to {size - 1} there" if size else None,
        fix="correct the data, or make the table (classes, vocabulary, positions) larger",
    )


def _outside(operands: Sequence[Any], rows: int) -> tuple[int | None, int]:
    """Return a lookup's first index outside of its table, if there is one, and the table's rows."""
    tensors = [x for x in operands if hasattr(x, "is_floating_point")]
    tables = [x for x in tensors if x.is_floating_point() and x.dim()]
    rows = rows or (tables[0].shape[0] if tables else 0)
    for x in tensors if rows else ():
        if not (x.is_floating_point() or x.is_complex()):
            for index in x[(x < 0) | (x >= rows)].tolist()[:1]:
                return index, rows
    return None, rows


def _shorten(path: str) -> str:
    """Return a path relative to the working directory, if it is below that."""
    # A path with leading ../ would be no shorter, and hard to open.
    short = os.path.relpath(path) if os.path.isabs(path) else path
    return path if short.startswith("..") else short
