"""Fake tensors, in a process that may fork afterwards."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .private_apis import FakeTensorMode, _disable_current_modes


def fake_mode(**options: Any) -> FakeTensorMode:
    """Return a mode of fake tensors.

    Without a GPU, entering it gives a CUDA build of torch a GPU that does nothing. An autograd
    engine that begins later starts a thread for that GPU, and forbids a backward in forks: those of
    `launch`, or of a DataLoader.
    """
    _start_engine()
    return FakeTensorMode(**options)


@cache
def _start_engine() -> None:
    """Start autograd's engine, which is one for the process."""
    if torch.cuda.is_available():
        return
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        one = torch.ones((), requires_grad=True, device="cpu")
        try:
            one.backward()
        except RuntimeError:
            return  # This is a fork of such a process: the caller's own backward says so.
