"""The exception hook ends where the store of rank 0 never answers."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from torchgspmd.comm import termination
from torchgspmd.errors import ShardingError


def test_a_store_behind_a_link_that_is_down_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    over, printed = threading.Event(), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(termination, "is_missing", lambda _: False)
    monkeypatch.setattr(termination, "_ANSWER", 0.1)

    def never(*_: str) -> bytes:
        over.wait(20)
        return b""

    store = SimpleNamespace(compare_set=never)
    monkeypatch.setattr(termination, "_get_default_store", lambda: store)
    hook = termination._once(lambda *error: printed.append(error))
    hook(ShardingError, ShardingError("all ranks say this"), None)
    assert len(printed) == 1, "no answer: this rank prints its own error"
    store.compare_set = lambda *_: f"0 {time.time()}".encode()
    hook(ShardingError, ShardingError("all ranks say this"), None)
    assert len(printed) == 1, "rank 0 has printed it"
    over.set()
