"""Rows of float8 are chosen as integers of one byte.

A device that lacks a row adds zeros in its place, and float8 has no addition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten
from ..rewrites import DECLINED, rewrite

_CHOOSING = (
    aten.index.Tensor,
    aten.embedding.default,
    aten.index_select.default,
    aten.select.int,
)


def _as_bytes(op: Callable[..., Tensor], table: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not (table.is_floating_point() and table.itemsize == 1):
        return DECLINED
    return op(table.view(torch.uint8), *args, **kwargs).view(table.dtype)


for _op in _CHOOSING:
    rewrite("decompose", _op)(partial(_as_bytes, _op))
