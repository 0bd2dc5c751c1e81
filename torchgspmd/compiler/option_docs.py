"""The table of options as texts: in signatures, docstrings and docs/parallelize.md."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from .options import GROUPS, ROWS, Option, Options, Reader, rows_for, rows_of

F = TypeVar("F", bound=Callable[..., object])


def documented(reader: Reader) -> Callable[[F], F]:
    """Write a function's options into its signature and its docstring.

    The docstring has a line "{options}" where they belong.
    """

    def decorate(function: F) -> F:
        # **kwargs hides the options from help(): the signature names them, as if they stood there.
        signature = inspect.signature(function)
        *named, last = signature.parameters.values()
        rows = rows_for(reader)
        options = [
            inspect.Parameter(
                row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default, annotation=row.type
            )
            for row in rows
        ]
        rest = [last] if last.name == "kwargs" else []
        document = cast(Any, function)  # a function has more attributes than its type says
        document.__signature__ = signature.replace(parameters=[*named, *options, *rest])
        document.__doc__ = str(function.__doc__).replace(
            "        {options}", "\n".join(_paragraph(row, reader) for row in rows)
        )
        return function

    return decorate


def options_table() -> str:
    """Return the tables with all options, as docs/parallelize.md shows them."""
    parts = ["\n".join(_table(Options, "option"))]
    for group, owner in GROUPS.items():
        parts.append(f"Settings of `{group}`, a mapping:")
        parts.append("\n".join(_table(owner, "setting")))
    return "\n\n".join(parts)


def _table(owner: type, head: str) -> Iterator[str]:
    yield f"| {head} | values, default | read by | meaning |"
    yield "|---|---|---|---|"
    for row in ROWS[owner]:
        default = f'"{row.default}"' if isinstance(row.default, str) else repr(row.default)
        values = f"`{row.values}`".replace(" | ", "`, `")
        values += "" if row.name in GROUPS else f"; `{default}`"
        readers = ", ".join(row.readers).replace("xla", '"xla"')
        yield f"| `{row.name}` | {values} | {readers} | {row.doc} |"


def _paragraph(row: Option, reader: Reader, indent: int = 8) -> str:
    text = f"{row.name}: {row.doc}{row.backends() if reader == 'parallelize' else ''}"
    first = textwrap.fill(
        text, 100, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4)
    )
    inner = rows_of(GROUPS[row.name], reader) if row.name in GROUPS else ()
    return "\n".join([first, *(_paragraph(each, reader, indent + 4) for each in inner)])
