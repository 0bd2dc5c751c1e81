"""The lowered programs of all ranks, compared with the program that they were lowered from.

The ranks take turns in one process: one runs until it waits for a message that others have not
begun. So groups, order, splits, waits and memory in flight are those of a run, and so are the
numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...capture import ARGUMENT, PARAMETER, TANGENT
from ...comm.kinds import WIRE_OPS
from ...compat.operators import c10d, draws
from ...compat.private_apis import TorchDispatchMode
from ...compiler.plan import Plan
from ...dtensor.storage import stored_shape
from ...errors import ShardingError
from ...features.pipelines.call import StageCall, StageTransport
from ...features.pipelines.parts import Message
from ...fx_passes.loop_call import loop_calls
from ...fx_passes.pipeline import lower_plan
from ...fx_passes.program import Program, Rank
from . import messages
from .claimed_layouts import cut, other_rank
from .messages import InFlight, Network, OnRank, RankFault, RankGroups
from .one_device import drawn
from .trial import NoNumbers, RandomTrial

_WAIT = c10d.wait_tensor.default


def lowered(
    plan: Plan, rank: int, plain: Sequence[bool], stored: Sequence[Sequence[int]]
) -> Program:
    """Return the program of one rank. stored: shapes of its inputs."""
    plan = copy(plan)
    plan.seconds = {}
    vars(plan).pop("_local", None)  # a graph that the rank itself will lower
    inputs = plan.captured.inputs
    parameters = {i: torch.empty([*s]) for i, s in enumerate(stored) if inputs[i].kind == PARAMETER}
    device = next(
        (n.meta["val"].device.type for n in plan.sharded.find_nodes(op="placeholder")), ""
    )
    groups = RankGroups(plan.mesh, rank, "cuda" if device == "cuda" else "cpu")
    try:
        return lower_plan(plan, Rank(groups, "torch", parameters, _checked, _checked), plain)
    except ShardingError as error:
        raise NotLowered(error.what) from error


class NotLowered(Exception):
    """A rank refuses the plan, as parallelize would."""


def _checked(*_: Tensor) -> None:
    """Stand for the comparison of the ranks."""


class RankRun:
    """The run of one rank, in a thread that runs while it has the turn."""

    def __init__(self, trial: RandomTrial, rank: int, network: Network) -> None:
        self.trial, self.rank, self.network = trial, rank, network
        self.held: list[InFlight] = []
        self.calls: list[messages.RankCall] = []  # that have no wait so far
        self.is_ready: Callable[[], bool] = lambda: True
        self.go, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.done, self.ended = False, False
        self.error: BaseException | None = None
        self.results: list[Any] = []
        plan, plain = trial.plan, _plain(trial.plan)
        self.stored = [
            stored_shape(spec, tuple(t.shape), plan.mesh, plan.mesh.coordinates(rank))
            for t, spec in zip(trial.inputs, plan.input_layouts)
        ]
        self.program = lowered(plan, rank, plain, self.stored)
        self.node = next(iter(self.program.graph.nodes))  # that runs
        self.whole = _whole(plan, plain)
        self.inputs = self._inputs()

    # -------------------------------------------------------------------------------------- turns

    def start(self) -> threading.Thread:
        """Return the started thread; it waits for its first turn."""
        thread = threading.Thread(target=self._thread, daemon=True)
        thread.start()
        return thread

    def turn(self) -> None:
        """Run until the rank waits for others, or ends."""
        self.go.release()
        self.has_stopped.acquire()

    def _thread(self) -> None:
        self.go.acquire()
        try:
            if not self.ended:
                with torch.no_grad(), _Watched(self):
                    self.results = self._run()
                self._check_ends()
        except BaseException as error:
            self.error = error
        self.done = True
        self.has_stopped.release()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        self.is_ready = is_ready
        if not is_ready():
            self.has_stopped.release()
            self.go.acquire()
            if self.ended:
                raise _Ended

    # ------------------------------------------------------------------------------- the programs

    def _run(self) -> list[Any]:
        trial, program = self.trial, self.program
        assert program.backward is not None, "a lowered program has two halves"
        inputs, kinds = self.inputs, [each.kind for each in trial.plan.captured.inputs]
        sizes = trial.plan.size_inputs(
            trial.plan.sizes_of_run([tuple(t.shape) for t in trial.inputs])
        )
        first = [x for x, kind in zip(inputs, kinds) if kind != TANGENT]
        values = self.call(program.graph, trial.constants, [*sizes, *first])
        gradients = len(program.backward.graph.output_node().args[0])
        count = len(trial.plan.captured.outputs) - gradients
        last = [x for x, kind in zip(inputs, kinds) if kind == TANGENT]
        backward = self.call(program.backward.graph, trial.constants, [*values[count:], *last])
        return [*values[:count], *backward]

    def _inputs(self) -> list[Tensor]:
        """Return the rank's inputs: whole tensors, or its stored shards."""
        plan, result = self.trial.plan, []
        for x, spec, shape, is_whole in zip(
            self.trial.inputs, plan.input_layouts, self.stored, self.whole
        ):
            (shard,) = cut(x, spec, plan.mesh, [self.rank])
            mine = shard[tuple(slice(0, n) for n in shape)]
            result.append((x if is_whole else mine).clone(memory_format=torch.contiguous_format))
        return result

    def call(self, graph: fx.Graph, owner: nn.Module, inputs: Sequence[Any]) -> Sequence[Any]:
        copied = self.trial.copied.graph(graph)
        self._connect(copied)
        return _Interpreter(fx.GraphModule(owner, copied), self).run(*inputs)

    def _connect(self, graph: fx.Graph) -> None:
        for _, call in loop_calls(graph):
            if isinstance(call, StageCall):
                call.transport = _StageMessages(self, call)
            for body in call.bodies:
                body.compile = self._compile
                self._connect(body.graph)

    def _compile(self, graph: fx.Graph) -> Callable[..., object]:
        interpreter = _Interpreter(fx.GraphModule(nn.Module(), graph), self)
        return lambda *inputs: interpreter.run(*inputs)

    # -------------------------------------------------------------------------------- collectives

    def begin(self, op: Any, args: tuple) -> Tensor:
        name, rank, held = args[-1], self.rank, self.held
        messages.check_access(held, self, lambda: iter([(args[0], op._schema.is_mutable)]))
        groups = self.program.rank.groups
        groups.group(tuple(name.split("+")))
        call = self.network.begin(rank, self.node, op, args, groups.ranks(name))
        self.calls.append(call)
        if call.result is not call.operand:
            held.append(InFlight(call.operand, False, self.node))
        held.append(InFlight(call.result, True, self.node))
        return call.result

    def wait(self, x: Tensor) -> Tensor:
        """Wait for the collective whose result a tensor is."""
        ptr = x.untyped_storage().data_ptr()
        mine = [c for c in self.calls if c.result.untyped_storage().data_ptr() == ptr]
        for call in mine:
            self.wait_until(lambda call=call: call.arrived is not None)
            self.calls.remove(call)
            buffers = {id(call.operand), id(call.result)}
            self.held[:] = [h for h in self.held if id(h.buffer) not in buffers]
            assert call.arrived is not None, "the turn comes when it has arrived"
            call.result.copy_(call.arrived.view(call.result.shape))
        return x

    def _check_ends(self) -> None:
        for call in self.calls:
            raise RankFault(call, "has no wait", "every collective has one, before its result")


class RankCrash(RankFault):
    """An operation of a rank fails."""

    def __init__(self, at: OnRank, error: Exception) -> None:
        found = f"fails: {str(error).partition(chr(10))[0]}"
        super().__init__(at, found, "one device computes the program")


class _Ended(BaseException):
    """Another rank has a fault: this one ends."""


class _Interpreter(fx.Interpreter):
    def __init__(self, program: fx.GraphModule, run: RankRun) -> None:
        super().__init__(program)
        self.rank_run, self.extra_traceback = run, False

    def run_node(self, n: fx.Node) -> Any:
        self.rank_run.node = n
        return super().run_node(n)


class _Watched(TorchDispatchMode):
    """Sees every operation of a rank: collectives become messages, others are checked."""

    def __init__(self, run: RankRun) -> None:
        super().__init__()
        self.rank_run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run, kwargs = self.rank_run, kwargs or {}
        if func in WIRE_OPS:
            return run.begin(func, args)
        if func is _WAIT:
            return run.wait(args[0])
        messages.check_access(run.held, run, lambda: messages.accesses(func, args, kwargs))
        if draws(func):
            return drawn(func, run.node.meta.get("value", run.node.name), args, kwargs)
        return func(*args, **kwargs)


class _StageMessages(StageTransport):
    """Sends by the network of the trial. A link's messages arrive in the order of their sends."""

    def __init__(self, run: RankRun, call: StageCall) -> None:
        mesh, axes = run.trial.plan.mesh, (call.axis,)
        self.run, self.device = run, int(mesh.index(axes, mesh.coordinates(run.rank)))
        self.ranks = next(group for group in mesh.groups(axes) if run.rank in group)

    def send(self, messages: Sequence[Message]) -> None:
        for link, to, x in messages:
            x = x.contiguous()
            key = self.run.rank, self.ranks[to], link.kind, link.round, link.leaf
            self.run.network.mail.setdefault(key, deque()).append(x.clone())
            self.run.held.append(InFlight(x, False, self.run.node))

    def receive(self, messages: Sequence[Message]) -> Callable[[], list[Tensor]]:
        return lambda: [self._received(message) for message in messages]

    def _received(self, message: Message) -> Tensor:
        run, (link, source, like) = self.run, message
        key = self.ranks[source], run.rank, link.kind, link.round, link.leaf
        mail = run.network.mail.setdefault(key, deque())
        run.wait_until(lambda: bool(mail))
        x = mail.popleft()
        if x.shape != like.shape or x.dtype != like.dtype:
            found = f"receives {[*x.shape]}, and expects {[*like.shape]}"
            raise RankFault(
                run, found, "a stage receives the values that the stage before it sends"
            )
        return x

    def finish(self) -> None:
        starts = {id(call.node) for call in self.run.calls}
        self.run.held[:] = [h for h in self.run.held if id(h.node) in starts]


def check_ranks(trial: RandomTrial) -> None:
    """Compare the programs of all ranks with the one that they are lowered from.

    trial: it has run that program.

    Raises:
        ShardingError: A rank breaks a rule, or has another result. It names the node and the rank.
        NoNumbers: An operation fails on wide numbers.
    """
    network = Network(trial.plan.mesh.size)
    runs = [RankRun(trial, rank, network) for rank in range(trial.plan.mesh.size)]
    try:
        _take_turns(runs)
        network.check_order()
        for key, mail in network.mail.items():
            if mail:
                found = f"sends a message that rank {key[1]} does not take"
                raise RankFault(runs[key[0]], found, "each message between stages is received")
        _compare(trial, runs)
    except RankFault as fault:
        if trial.wide and isinstance(fault, RankCrash):
            raise NoNumbers(fault.found) from fault
        raise other_rank(fault.node, fault.rank, fault.found, fault.why) from fault


def _take_turns(runs: Sequence[RankRun]) -> None:
    """Run all ranks to their ends, or raise the first error of one."""
    threads = [run.start() for run in runs]
    try:
        while left := [run for run in runs if not run.done]:
            ready = [run for run in left if run.is_ready()]
            for run in ready:
                run.turn()
                if isinstance(run.error, Exception) and not isinstance(run.error, RankFault):
                    raise RankCrash(run, run.error) from run.error
                if run.error is not None:
                    raise run.error
            if not ready:
                waiting = ", ".join(f"rank {run.rank} at '%{run.node}'" for run in left)
                why = "all ranks begin the messages that one waits for"
                raise RankFault(left[0], f"waits for ever: {waiting}", why)
    finally:
        for run in runs:
            run.ended = True
            run.go.release()
        for thread in threads:
            thread.join()


def _compare(trial: RandomTrial, runs: Sequence[RankRun]) -> None:
    """Raise RankFault for a result that differs from that of the scheduled program."""
    plan = trial.plan
    sizes = plan.sizes_of_run([tuple(t.shape) for t in trial.inputs])
    returned = plan.sharded.output_node().args[0]
    for i, (shards, spec) in enumerate(zip(trial.shards, plan.out_specs)):
        if spec is None or returned[i].name in trial.native:
            continue
        shape = plan.result_shape(i, shards[0].shape, sizes)
        for run, shard in zip(runs, shards):
            stored = stored_shape(spec, shape, plan.mesh, plan.mesh.coordinates(run.rank))
            one, mine = shard[tuple(slice(0, n) for n in stored)], run.results[i]
            if mine.shape == one.shape and trial.close(mine, one).all():
                continue
            found = f"has the shape {[*mine.shape]}, not {[*one.shape]}"
            if mine.shape == one.shape:
                at = tuple((~trial.close(mine, one)).nonzero()[0].tolist())
                found = f"has {mine[at].item()} at {[*at]}, not {one[at].item()}"
            halves: tuple[Any, ...] = run.program, run.program.backward
            forward, backward = (half.graph.output_node().args[0] for half in halves)
            # Behind its results the forward returns values for the backward.
            run.node = [*forward[: len(run.results) - len(backward)], *backward][i]
            raise RankFault(run, found, f"it is result {i} of the plan")


def _plain(plan: Plan) -> list[bool]:
    arguments = sum(inp.kind == ARGUMENT for inp in plan.captured.inputs)
    plain = [] if plan.request is None else [*plan.request.plain]
    return plain if len(plain) == arguments else [False] * arguments


def _whole(plan: Plan, plain: Sequence[bool]) -> list[bool]:
    """Return which inputs a rank has whole: plain arguments, and gradients of whole results."""
    rest = iter(plain)

    def is_whole(kind: str, output: int) -> bool:
        if kind == TANGENT:
            spec = plan.out_specs[output]
            return spec is None or not spec.sharding_axes
        return kind == ARGUMENT and next(rest)

    return [is_whole(inp.kind, inp.output) for inp in plan.captured.inputs]
