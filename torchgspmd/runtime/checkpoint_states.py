"""Schedulers', scalers' and loaders' states as data: JSON, with their tensors beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ShardingError, user_line

_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


def is_plain_state(value: Any) -> bool:
    """Return whether `as_plain` may have made this."""
    if not isinstance(value, dict):
        return isinstance(value, _PLAIN)
    if len(value) != 1:
        return False
    ((kind, content),) = value.items()
    if not isinstance(content, list):
        return False
    if kind == "tensor":
        # The file may be damaged or foreign: its form is checked before anything is made of it.
        number, dtype, shape = content if len(content) == 3 else (None, None, ())
        sizes = shape if isinstance(shape, list) else [None]
        return isinstance(number, str) and dtype in _DTYPES and all(type(n) is int for n in sizes)
    if kind == "dict":
        pairs = all(isinstance(each, list) and len(each) == 2 for each in content)
        return pairs and all(is_plain_state(part) for each in content for part in each)
    return kind in ("list", "tuple") and all(map(is_plain_state, content))


def as_plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON has it. Its tensors are put into `tensors`, by numbers."""
    if isinstance(value, Tensor):
        number = f"{len(tensors)}"
        tensors[number] = value
        return {"tensor": [number, str(value.dtype).removeprefix("torch."), [*value.shape]]}
    if isinstance(value, Mapping):
        pairs = [[as_plain(k, name, tensors), as_plain(v, name, tensors)] for k, v in value.items()]
        # Pairs, since JSON would turn keys that are numbers into texts.
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [as_plain(each, name, tensors) for each in value]}
    if not isinstance(value, _PLAIN):
        raise ShardingError(
            f"the state of '{name}' holds a {type(value).__name__}",
            where=user_line(),
            why="a checkpoint is data: tensors, numbers, texts, lists and dicts",
            fix="leave it out of states, or save it in a file of your own",
        )
    return value


def allocate_state(value: Any, tensors: dict[str, Tensor]) -> None:
    """Make a state's tensors, to be read into."""
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            number, dtype, shape = content
            tensors[number] = torch.empty(shape, dtype=_DTYPES[dtype])
        else:
            for each in content:
                allocate_state({"list": each} if kind == "dict" else each, tensors)


def as_state(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that `as_plain` turned into JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content[0]]
    if kind == "dict":
        return {as_state(k, tensors): as_state(v, tensors) for k, v in content}
    values = [as_state(each, tensors) for each in content]
    return tuple(values) if kind == "tuple" else values
