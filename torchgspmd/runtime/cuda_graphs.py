"""CUDA graphs of one device: the only code here that calls torch.cuda for them.

    results = graphs.warm_up(run)                  runs it on the stream that captures
    replay, results = graphs.capture(run, pool)    nothing runs; results lie where replays write
    replay()                                       runs it anew, on the current stream

Tests put a recorder in their place, which needs no card.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from ..compiler.plan import Plan
from ..errors import ShardingError

T = TypeVar("T")


class Capture(NamedTuple):
    """A captured function. replay: runs it. results: its results, written by each replay."""

    replay: Callable[[], None]
    results: Any


class CudaGraphs:
    """Captures functions that run on one device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_pool(self) -> Any:
        """Return memory for captures that run in turn: one may reuse what an earlier one frees."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run a function where captures run, so that libraries allocate and compile before."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = run()
        current.wait_stream(self.stream)
        return results

    def capture(self, run: Callable[[], Any], pool: Any) -> Capture:
        """Capture a function. It reads and writes memory at the same addresses in each replay."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, data loaders) may call CUDA meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool, self.stream, capture_error_mode=mode):
            results = run()
        return Capture(graph.replay, results)


def graphs_for(device_type: str, backend: str) -> CudaGraphs:
    """Return the graphs of this process's device, for a backend that needs them.

    Raises:
        ShardingError: The model is not on a CUDA device.
    """
    if device_type != "cuda":
        raise ShardingError.here(
            f"backend '{backend}' needs a CUDA device",
            why=f"the model is on {device_type}, and graphs are CUDA's",
            fix=f"call model.cuda() before parallelize, or set backend='{_without(backend)}'",
        )
    return _of_card(torch.cuda.current_device())


@cache
def _of_card(index: int) -> CudaGraphs:
    # One stream captures all programs: libraries are warm on it.
    return CudaGraphs(torch.device("cuda", index))


def check_capturable(plan: Plan, backend: str) -> None:
    """Raise ShardingError for a plan with values that no graph can compute."""
    rows = plan.uncapturable()
    if not rows:
        return
    first, rest = rows[0], len(rows) - 1
    raise ShardingError(
        f"a CUDA graph cannot compute %{first.name}"
        + (f", nor {rest} more values" if rest > 1 else ", nor one more value" if rest else ""),
        where=first.where,
        why=first.why,
        fix=f"set backend='{_without(backend)}'; plan.uncapturable() lists such values",
    )


def _without(backend: str) -> str:
    """Return the backend that runs the same program without graphs."""
    return "inductor" if backend.startswith("inductor") else "torch"
