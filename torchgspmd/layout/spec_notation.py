"""Parse the layout notation into the fields of a ShardSpec, of which equal ones are one object."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from ..errors import ShardingError
from .halo_window import Window
from .sub_axes import sub_axis

Axes = tuple[str, ...]
# dims, open, pending, reduction, windows, priorities, parts
SpecFields = tuple[
    tuple[Axes, ...],
    tuple[bool, ...],
    Axes,
    str,
    tuple[Window | None, ...],
    tuple[int, ...],
    tuple[int, ...],
]
REDUCTIONS = ("sum", "max", "min", "prod")


class _Unconstrained:
    """Spec entry that lets propagation decide how a dimension is sharded."""

    def __repr__(self) -> str:
        return "UNCONSTRAINED"


UNCONSTRAINED: Final = _Unconstrained()
AUTO: Final = "auto"  # in_specs: the axes of the batch divide the leading dimensions.
SAME: Final = "same"  # out_specs: results stay where they are computed.


def _is_axis(name: object) -> bool:
    return isinstance(name, str) and (
        name.isidentifier() and name != "_" or sub_axis(name) is not None
    )


# A window in brackets contains spaces (`s[8i-1:+10 in 0:64]`) and is part of its word.
_WORD = re.compile(r"(?:[^\s\[]|\[[^\]]*\])+")
_PRIORITY = re.compile(r":p(\d+)$")
_PARTS = re.compile(r"([2-9]|[1-9]\d+)\*(?=[^\W\d_])")


def parse_string(text: str) -> SpecFields:
    """Parse a spec in string form, such as "data _ sum@model"."""
    words, pending, reduction = _WORD.findall(text), (), "sum"
    if words and "@" in words[-1]:
        reduction, _, names = words.pop().partition("@")
        pending = tuple(names.split("+"))
        if reduction not in REDUCTIONS:
            raise ShardingError.here(
                f"'{reduction}' in spec '{text}' is not a reduction; "
                f"use one of {', '.join(REDUCTIONS)}"
            )
        if not all(map(_is_axis, pending)):
            raise ShardingError.here(
                f"'{names}' in spec '{text}' is not an axis name",
                fix="write an axis behind '@', or axes joined by '+'",
            )
    dims, opens, windows, priorities, parts = [], [], [], [], []
    for word in words:
        count = _PARTS.match(word)
        parts.append(int(count[1]) if count else 1)
        word = word[count.end() :] if count else word
        # From the outside in: the window ends a word, before it the priority, before that the "?".
        word, window = _split_window(word)
        windows.append(window)
        word, priority = split_priority(word)
        priorities.append(priority)
        is_open = word.endswith("?")
        word = word[:-1] if is_open else word
        axes = () if word in ("", "_") else tuple(word.split("+"))
        if not all(map(_is_axis, axes)):
            raise ShardingError.here(
                f"'{word}' in spec '{text}' is not an axis name",
                fix="write one word per dimension: '_', '?', an axis, or axes joined by '+'",
            )
        dims.append(axes)
        opens.append(is_open)
    how = tuple(windows), tuple(priorities), tuple(parts)
    return tuple(dims), tuple(opens), pending, reduction, *how


def split_priority(word: str) -> tuple[str, int]:
    """Split `data:p1` into axes and priority, which is 0 where none is written."""
    match = _PRIORITY.search(word)
    return (word[: match.start()], int(match[1])) if match else (word, 0)


def _split_window(word: str) -> tuple[str, Window | None]:
    """Split `s[8i-1:+10 in 0:64]` into axes and window; a word without a window stays as it is."""
    axes, _, text = word.removesuffix("]").partition("[")
    try:
        return axes, Window.parse(text)
    except ValueError:
        return word, None


def text_of_entries(entries: Sequence[object]) -> str | None:
    """Return the string form of a spec in tuple form; None if these are no entries of one."""
    words = ["_" if e is None else "?" if e is UNCONSTRAINED else e for e in entries]
    words = ["+".join(e) if isinstance(e, tuple) and all(map(_is_axis, e)) else e for e in words]
    plain = [w for w in words if isinstance(w, str)]
    fits = len(plain) == len(words) and all(
        w in ("_", "?") or all(map(_is_axis, w.split("+"))) for w in plain
    )
    return " ".join(plain) if fits else None


def check_no_placement(entry: Any, entries: Any, names: Sequence[str] = ()) -> None:
    """Raise ShardingError for a DTensor placement in specs. names: the mesh's axes, if known."""
    # By its methods: importing DTensor takes seconds.
    if not callable(getattr(entry, "is_replicate", None)):
        return
    placements = entries if isinstance(entries, (tuple, list)) else [entries]
    dims: dict[int, list[str]] = {}
    for name, placement in zip(names, placements):
        if (dim := getattr(placement, "dim", -1)) >= 0:
            dims.setdefault(dim, []).append(name)
    words = ["+".join(dims.get(d, ())) or "_" for d in range(max(dims, default=-1) + 1)]
    spec = f"'{' '.join(words)}', and '_' for each further dimension," if words else "'data _'"
    raise ShardingError.here(
        f"{entries!r} are placements of DTensor, one for each axis of a mesh",
        why="a spec has one word for each dimension of the tensor: the axes that shard it",
        fix=f"write {spec} in place of {entries!r}",
    )


def parse_sequence(entries: object) -> SpecFields:
    """Parse a spec in tuple form, such as ("data", None)."""
    for entry in entries if isinstance(entries, (tuple, list)) else [entries]:
        check_no_placement(entry, entries)
    if not isinstance(entries, Sequence):
        raise ShardingError.here(
            "a spec is a string such as 'data _' or a tuple such as ('data', None), "
            f"not {entries!r}"
        )
    dims, opens = [], []
    for entry in entries:
        opens.append(entry is UNCONSTRAINED)
        if entry is None or entry is UNCONSTRAINED:
            dims.append(())
        elif _is_axis(entry):
            dims.append((entry,))
        elif isinstance(entry, (tuple, list)) and all(map(_is_axis, entry)):
            dims.append(tuple(entry))
        else:
            raise ShardingError.here(
                f"{entry!r} is not an entry of a spec; "
                "use None, an axis name, a tuple of axis names or UNCONSTRAINED"
            )
    return tuple(dims), tuple(opens), (), "sum", (), (), ()


class Interned(type):
    """Metaclass that returns one object for equal fields.

    Instances are then compared and hashed by identity, which planning does millions of times.
    """

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        instance: Any = None if kwargs else _INTERNED.get(args)
        if instance is None:
            instance = super().__call__(*args, **kwargs)
            # setdefault: another thread may have made the same instance; all get the first one.
            instance = _INTERNED.setdefault(instance._fields(), instance)
            if not kwargs:
                _INTERNED[args] = instance
        return instance


# By all fields, and by the arguments of former calls, which may leave out the last ones.
_INTERNED: dict[tuple[Any, ...], Any] = {}
