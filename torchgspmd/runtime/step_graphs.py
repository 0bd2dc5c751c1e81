"""StepGraphs: a program's forward and backward as CUDA graphs, which a call replays.

    first calls    the program runs as it is, so that a capture creates and compiles nothing
    a capture      arguments, seeds and the results' gradients get buffers; both halves are captured
    later calls    copy arguments and seeds in, replay, return copies of the results

Parameters and buffers are read and written where they lie; if they have moved, the program is
captured anew. Results and gradients are copies, so later calls do not change them. Values between
forward and backward stay in the graphs' memory, which the backward frees as it goes. While a call
waits for its backward, the next call gets a capture of its own.

No replay draws seeds. Each call does, from the generator that the other backends use: the numbers
are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from ..compiler.plan import Plan
from ..errors import ShardingError
from ..rules.custom_ops.random import DRAW_SEED, DRAW_SEEDS

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


WARM_UPS = 3  # as torch.cuda.make_graphed_callables; libraries tune themselves in the first
MOST = 8  # calls that may wait for their backward: each has activations of its own
_UNCAPTURED = 0  # in place of a capture's number


class Draw(NamedTuple):
    """An operation that draws seeds, which each call runs before its replay."""

    op: Callable[..., Tensor]
    args: tuple


def take_draws(graph: fx.Graph) -> list[Draw]:
    """Replace the operations that draw seeds by inputs behind the others, in the same order."""
    draws = [node for op in (DRAW_SEED, DRAW_SEEDS) for node in _calls(graph, op)]
    for node in draws:
        inputs = graph.find_nodes(op="placeholder")
        # Found in the graph's order, so the last is behind all others.
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
            seed = graph.placeholder(f"{node.name}_drawn")
        seed.meta = dict(node.meta)
        node.replace_all_uses_with(seed)
        graph.erase_node(node)
    return [Draw(node.target, node.args) for node in draws]


def _calls(graph: fx.Graph, op: Any) -> Sequence[Any]:
    return graph.find_nodes(op="call_function", target=op)


@dataclass(frozen=True)
class Halves:
    """A program to capture.

    forward: takes inputs and drawn seeds; returns results, new values of changed inputs, and values
    for the backward. backward: takes a list with these and the results' gradients, and empties it;
    None if there is none. fixed: the inputs that are read where they lie. changed: inputs with new
    values. results: how many. differentiated: the results that have gradients. in_parts: whether
    results may have their backwards one by one.
    """

    forward: Callable[..., Sequence[Any]]
    backward: Callable[[list], Sequence[Any]] | None
    fixed: Collection[int]
    changed: Sequence[int]
    results: int
    differentiated: Sequence[int]
    in_parts: bool
    draws: Sequence[Draw]

    @property
    def unsaved(self) -> int:
        """How many of the forward's values are not for the backward."""
        return self.results + len(self.changed)


@dataclass
class _Step:
    """One capture of both halves.

    places: where the fixed inputs were. calls: how many it has had. is_spent: whether the last
    call's backward has run. lease: a weak reference, dead if no backward can come any more.
    """

    places: list
    inputs: list[Tensor]
    seeds: list[Tensor]
    forward: Capture
    tangents: list[Tensor]
    backward: Capture | None
    calls: int = 0
    is_spent: bool = False
    lease: Callable[[], object] = lambda: None


class StepGraphs:
    """Runs a program by graphs: its `forward` and `backward` stand for the program's."""

    def __init__(self, graphs: CudaGraphs, halves: Halves, device: torch.device) -> None:
        self.graphs, self.halves, self.device = graphs, halves, device
        self.steps: dict[int, _Step] = {}
        self.runs = self.captures = 0  # runs before the first capture

    def forward(self, *inputs: Tensor) -> Sequence[Any]:
        """Run the forward. The values for the backward are a lease on the graphs' memory."""
        halves = self.halves
        if self.graphs.is_capturing():  # the caller captures a step that has this program in it
            return self._uncaptured(inputs)
        if halves.backward is None and self.runs < WARM_UPS:
            # It may write over parameters, so each of its runs is a call's.
            self.runs += 1
            return self.graphs.warm_up(lambda: self._uncaptured(self._placed(inputs)))
        number, step = self._step_for(inputs)
        for i, (buffer, x) in enumerate(zip(step.inputs, inputs)):
            if i not in halves.fixed:
                buffer.copy_(x, non_blocking=True)
        for buffer, draw in zip(step.seeds, halves.draws):
            buffer.copy_(draw.op(*draw.args), non_blocking=True)
        step.forward.replay()
        step.calls, step.is_spent = step.calls + 1, False
        found: Any = step.forward.results
        results = [*_copies(found[: halves.results]), *found[halves.results :]]
        if step.backward is None:
            return results
        lease = torch.tensor([number, step.calls])
        step.lease = weakref.ref(lease)
        return [*results, lease]

    def backward(self, boxed: list) -> Sequence[Any]:
        """Run the backward. boxed: what `forward` has left for it, then gradients; is emptied."""
        assert self.halves.backward is not None
        number, call = boxed.pop(0).tolist()
        if number == _UNCAPTURED:
            return self.halves.backward(boxed)
        step = self.steps.get(number)
        is_last = step is not None and step.calls == call
        if step is None or step.backward is None or not is_last or step.is_spent:
            raise _overwritten(is_last)
        for buffer, tangent in zip(step.tangents, boxed[len(boxed) - len(step.tangents) :]):
            buffer.copy_(tangent)
        boxed.clear()
        step.backward.replay()
        step.is_spent = not self.halves.in_parts
        return _copies(step.backward.results)

    def _uncaptured(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Run the forward as it is."""
        results = self._run(inputs)
        if self.halves.backward is not None:
            results.insert(self.halves.unsaved, torch.tensor([_UNCAPTURED, 0]))
        return results

    def _run(self, inputs: Sequence[Tensor]) -> list[Any]:
        return [*self.halves.forward(*inputs, *(d.op(*d.args) for d in self.halves.draws))]

    def _placed(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs with those that are not fixed in buffers, dense and on the device."""
        return [
            x if i in self.halves.fixed else torch.empty_like(x, device=self.device).copy_(x)
            for i, x in enumerate(inputs)
        ]

    # ------------------------------------------------------------------------------- captures

    def _step_for(self, inputs: Sequence[Tensor]) -> tuple[int, _Step]:
        """Return a capture that no backward waits for, and its number."""
        places = [(inputs[i].data_ptr(), inputs[i].stride()) for i in self.halves.fixed]
        free = [number for number, step in self.steps.items() if step.lease() is None]
        for number in free:
            if self.steps[number].places == places:
                return number, self.steps[number]
            del self.steps[number]  # its parameters have moved
        if len(self.steps) == MOST:
            raise ShardingError.here(
                f"{MOST} calls of a module wait for their backward",
                why="a CUDA graph has memory of its own for the activations of each",
                fix="run backward() before the next call, keep loss.detach() in place of loss, or "
                "call the module under torch.no_grad()",
            )
        # Buffers outlive the call: they are none of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            placed = self._placed(inputs)
            if self.halves.backward is not None and self.runs < WARM_UPS:
                self._rehearse(placed)
            try:
                step = self._capture(placed, places)
            except RuntimeError as error:
                raise ShardingError.here(
                    "a program cannot be captured in a CUDA graph",
                    why=str(error).partition("\n")[0],
                    fix="set backend='torch' (or 'inductor'); a custom operation may read values "
                    "on the host",
                ) from error
        self.captures += 1
        self.steps[self.captures] = step
        return self.captures, step

    def _rehearse(self, inputs: list[Tensor]) -> None:
        """Run both halves on gradients of zero, and undo the changes."""
        before = [(inputs[i], inputs[i].clone()) for i in self.halves.changed]
        cards = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cards):
            while self.runs < WARM_UPS:
                self.graphs.warm_up(lambda: self._run_both(inputs))
                self.runs += 1
        for x, value in before:
            x.copy_(value)

    def _run_both(self, inputs: list[Tensor]) -> None:
        results = self._run(inputs)
        tangents = self._tangents(results)
        boxed = [*results[self.halves.unsaved :], *tangents]
        del results, tangents
        assert self.halves.backward is not None
        self.halves.backward(boxed)

    def _tangents(self, results: Sequence[Any]) -> list[Tensor]:
        """Return zeros, as the results' gradients."""
        likes = (results[i] for i in self.halves.differentiated)
        return [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in likes]

    def _capture(self, inputs: list[Tensor], places: list) -> _Step:
        """Capture both halves on these inputs. Nothing runs."""
        halves, pool = self.halves, self.graphs.new_pool()
        with torch.random.fork_rng([]):
            seeds = [draw.op(*draw.args).to(self.device) for draw in halves.draws]

        def forward() -> list[Any]:
            results = [*halves.forward(*inputs, *seeds)]
            for at, i in enumerate(halves.changed, halves.results):
                if i in halves.fixed and results[at] is not inputs[i]:
                    results[at] = inputs[i].copy_(results[at])
            return results

        captured = self.graphs.capture(forward, pool)
        results, saved = captured.results[: halves.unsaved], captured.results[halves.unsaved :]
        step = _Step(places, inputs, seeds, Capture(captured.replay, results), [], None)
        if halves.backward is not None:
            step.tangents = self._tangents(results)
            boxed, run = [*saved, *step.tangents], halves.backward
            # The backward alone holds what it reads: its own values may take that memory.
            kept = saved if halves.in_parts else []
            del saved, captured
            step.backward = self.graphs.capture(lambda: (run(boxed), kept)[0], pool)
        return step


def _copies(values: Sequence[Any]) -> list[Any]:
    copies = {id(x): x.clone() for x in values if isinstance(x, Tensor)}
    return [copies.get(id(x), x) for x in values]


def _overwritten(is_last: bool) -> ShardingError:
    """Return the error for a backward whose values are gone. is_last: whether it runs again."""
    return ShardingError.here(
        "a backward runs twice" if is_last else "a backward comes after its module's next call",
        why="a CUDA graph's backward frees the values that it reads"
        if is_last
        else "saved_tensors_hooks keep no values of a CUDA graph: the next call writes over them",
        fix="set backend='torch' (or 'inductor')"
        + (", or leave retain_graph=True out" if is_last else ""),
    )
