"""Each function's options as type checkers know them; a test compares these with Options.

Only type checkers read this file: `extra_items` is younger than Python 3.10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import TypedDict

from ..comm.hardware import Hardware
from .options import Backend, Check, Dynamic, Offload, Pin, Recompute, Regather, Rng, Unmarked


class Precision(TypedDict, total=False):
    """Options for suggest."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


class _Planned(Precision, total=False):
    strict: bool
    rng: Rng
    regather: Regather
    recompute: Recompute
    offload: Offload
    memory_budget: int | str | None
    microbatches: int
    verify: bool
    skip_passes: Iterable[str]
    costs: Mapping[str, float] | None
    hardware: Hardware | str | None
    dynamic: Dynamic


class PlanOptions(_Planned, total=False, extra_items=Any):
    """Options for plan, and keyword arguments for the planned function."""

    grad: bool
    unmarked: Unmarked


class ParallelizeOptions(_Planned, total=False):
    """Options for parallelize."""

    backend: Backend
    shard_updates: str | None
    carriers: Iterable[str]
    check: Check
    timeout: float | timedelta | None
    audit: int | None
    pin: Pin
