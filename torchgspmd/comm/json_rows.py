"""JSON values as the types that a dataclass declares: messages from other processes are data."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

R = TypeVar("R")


def from_row(cls: type[R], row: Any) -> R:
    """Return the dataclass whose `asdict` went through `json`.

    Raises:
        ValueError: A field is missing, unknown, or has another type.
    """
    hints = field_types(cls)
    if not isinstance(row, dict) or row.keys() != hints.keys():
        raise ValueError(f"no fields of {cls.__name__}")
    values = {
        name: from_row(cast(type, hint), row[name])
        if is_dataclass(hint)
        else _with_tuples(row[name])
        for name, hint in hints.items()
    }
    for name, hint in hints.items():
        if not conforms(values[name], hint):
            raise ValueError(f"{name} of {cls.__name__} is {values[name]!r:.60}")
    return cls(**values)


def _with_tuples(value: Any) -> object:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


@cache
def field_types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls)}


def conforms(value: Any, hint: Any) -> bool:
    """Return whether a value, with its contents, has a declared type."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(conforms(value, part) for part in parts)
    if hint in (int, float, bool, str):
        # A float field may hold an int. isinstance would take True for an int.
        return type(value) is hint or hint is float and type(value) is int
    if not isinstance(value, origin or hint):
        return False
    if origin is tuple and parts[-1:] != (Ellipsis,):
        return len(value) == len(parts) and all(map(conforms, value, parts))
    if isinstance(value, Mapping) and len(parts) == 2:
        return all(conforms(k, parts[0]) and conforms(v, parts[1]) for k, v in value.items())
    if parts and isinstance(value, (Sequence, frozenset)):
        return all(conforms(item, parts[0]) for item in value)
    return True
