"""Tests of the code that runs on an accelerator; without one they run on the CPU, in small sizes.

`make gpu` runs them on a machine with a card.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the card, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="module")
def one_process(device: torch.device) -> Iterator[str]:
    """Start a process group of this process alone, and return its backend."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, True)
    bound = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **bound)
    yield backend
    dist.destroy_process_group()


@pytest.fixture
def no_syncs(device: torch.device) -> Iterator[contextlib.AbstractContextManager]:
    """Return a context in which waiting for the card is an error."""

    @contextlib.contextmanager
    def forbidden() -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield forbidden()
