"""The call that `plan` was given, which `Plan.verify` runs again in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class PlannedCall(NamedTuple):
    """A function and its arguments. changes: an option by which its plan computes otherwise."""

    fn: Callable
    args: tuple
    kwargs: dict
    changes: str
    modes: tuple[object, ...]

    @staticmethod
    def modes_now() -> tuple[object, ...]:
        """Return the modes of torch that decide what a function computes."""
        cast = (torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        return (torch.is_grad_enabled(), *cast, torch.get_default_dtype())
