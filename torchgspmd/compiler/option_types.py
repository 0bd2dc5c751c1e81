"""Each function's options as type checkers know them; a test compares these with Options.

Only type checkers read this file: `extra_items` is younger than Python 3.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from typing_extensions import TypedDict

from ..comm.hardware import Hardware
from .options import (
    AdvancedSettings,
    Backend,
    CheckSettings,
    Communication,
    Dynamic,
    MemorySettings,
)


class Precision(TypedDict, total=False):
    """Options for suggest."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


class _Planned(Precision, total=False):
    strict: bool
    communication: Communication
    memory: MemorySettings | Mapping[str, Any] | int | str
    microbatches: int
    check: CheckSettings | Mapping[str, Any] | str
    advanced: AdvancedSettings | Mapping[str, Any]
    hardware: Hardware | str | None
    shard_updates: str | Literal[False] | None
    dynamic: Dynamic


class PlanOptions(_Planned, total=False, extra_items=Any):
    """Options for plan, and keyword arguments for the planned function."""

    grad: bool


class ParallelizeOptions(_Planned, total=False):
    """Options for parallelize."""

    backend: Backend
    timeout: float | timedelta | None
