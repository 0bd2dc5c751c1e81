"""debug: steps that run uncompiled, operation by operation, printed, with stops for a debugger.

    with gspmd.debug(model, stop="blocks.0.up"):
        model(x, y).backward()

    rank 0 of 4: data=0 model=0
    forward
      blocks.0.up  model.py:14
        %add    : f32[4, 128] of [8@data, 256@model] = linear(%x, %weight, %bias)  -2.1 to 3.4
        stop behind %add of module 'blocks.0.up', model.py:14

A line has one value on this rank: its name in `print(plan)`, its shard's shape, and the whole
value's shape and layout. The operation and the range of the shard's elements without padding
follow. Loops, stages and collectives are one line each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn

from ..capture.prints import wanted
from ..compiler.api import Plan
from ..errors import ShardingError
from ..fx_passes.simulator import Simulator
from ..layout.mesh import Mesh
from ..runtime.joint_program import JointProgram
from ..runtime.mesh_module import ModuleCall
from ..runtime.sharded_module import ShardedModule
from .shown_values import ShownValues


@contextmanager
def debug(
    model: nn.Module | Plan, *, stop: str | Sequence[str] = (), rank: int | None = 0
) -> Generator[None]:
    """Print each value on a rank while a model runs, and stop where a debugger is wanted.

    Calls in this context run uncompiled. Numbers, collectives and layouts are as in any other run.
    `breakpoint()` in forward stops in a frame in the user's file, whose variables are this rank's
    shards; `layouts` has their layouts. A `stop` calls `breakpoint()` in a frame with `value`,
    `operands`, `layout` and `name`.

    Args:
        model: The module from parallelize, on torch.distributed; or a Plan, for `Plan.simulate`.
        stop: Names of values ("%add"), modules ("blocks.0.up", "blocks.*"), or lines
            ("model.py:14"). A module stops behind its last operation, forward and backward.
        rank: The rank that prints and stops. The others wait for it. None: each process its own.

    Returns:
        A context manager, whose block runs the model.

    Raises:
        ShardingError: The model is no such module, or nothing in the program has a name in `stop`.

    Example:
        >>> x, w = torch.ones(4, 8), torch.ones(8, 2)
        >>> planned = plan(torch.matmul, x, w, mesh=Mesh(data=2), in_specs=("data _", "_ _"))
        >>> with gspmd.debug(planned, rank=1):
        ...     result = planned.simulate(x, w)
        rank 1 of 2: data=1
        inputs
            %arg0   : f32[2, 8] of [4@data, 8] = input  1 to 1
            %arg1   : f32[8, 2] = input  1 to 1
        forward
          <doctest debug[1]>:1
            %einsum : f32[2, 2] of [4@data, 2] = einsum(mk,kn->mn, %arg0, %arg1)  8 to 8
    """
    if not isinstance(model, (Plan, ShardedModule)):
        raise ShardingError.here(
            f"debug gets a {type(model).__name__}",
            fix="pass the module that parallelize returned for backend='torch' or 'inductor', "
            "or a Plan",
        )
    if isinstance(model, ShardedModule) and model._options.captures:
        raise ShardingError.here(
            "debug cannot show operations of a CUDA graph",
            why=f"backend '{model._options.backend}' replays them without Python",
            fix="pass a module with backend='torch', or a Plan",
        )
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if isinstance(model, Plan):
        # Plan.simulate makes its simulator by this attribute.
        name, value = "_simulator", _shown_simulator(model, stops, rank)
    else:
        name, value = "_run", _shown_run(model, stops, rank)
    token = wanted.set(True)
    # On the instance, so that `del` brings back the class's method.
    vars(model)[name] = value
    try:
        yield
    finally:
        del vars(model)[name]
        wanted.reset(token)


def _shown_simulator(
    plan: Plan, stops: Sequence[str], rank: int | None
) -> Callable[..., Simulator]:
    """Return a function that makes a plan's simulator, which prints."""
    # All ranks run in this process: without a rank the first one is shown.
    return partial(_ShownSimulator, ShownValues([plan.program.graph], plan, stops, rank or 0))


def _shown_run(module: ShardedModule, stops: Sequence[str], rank: int | None) -> Callable[..., Any]:
    """Return a function that runs a module's programs, and prints."""
    programs: dict[Any, JointProgram] = {}
    is_shown = rank in (None, module._groups.rank)

    def run(program: JointProgram, call: ModuleCall) -> Any:
        if call.key not in programs:  # on all ranks, so that a wrong stop is an error on all
            programs[call.key] = _shown_program(module, program, call, stops, is_shown)
        used = programs[call.key] if is_shown else program
        return type(module)._run(module, used, call)

    return run


def _shown_program(
    module: ShardedModule,
    program: JointProgram,
    call: ModuleCall,
    stops: Sequence[str],
    is_shown: bool,
) -> JointProgram:
    """Return a call's program, whose operations print."""
    plan, groups = program.plan, module._groups
    if is_shown and plan._layouts is None:  # another process made it and has the breakpoints
        plan = module._plan_here(call, lambda: None)
    tensors = module._tensors(call, plan.captured)
    options = replace(module._options, backend="torch")
    shown = JointProgram(plan, groups, module._model, tensors, options, program.signature)
    graphs = [shown.forward.__self__.graph, shown.backward_graph]
    values = ShownValues(graphs, plan, stops, groups.rank)
    interpret(shown, plan.captured.constants, lambda half: _ShownProgram(values, half))
    shown.in_pieces = lambda: None
    return shown


class RankInterpreter(fx.Interpreter):
    """Interpreter for a rank's forward or backward."""

    def call(self, inputs: Sequence[object]) -> Any:
        """Run on inputs; a list is emptied, as a backward does."""
        values = [*inputs]
        if isinstance(inputs, list):
            inputs.clear()
        return self.run(*values, enable_io_processing=False)


def interpret(
    program: JointProgram, owner: nn.Module, make: Callable[[fx.GraphModule], RankInterpreter]
) -> None:
    """Replace both halves of a program by an interpreter. owner: has the constants."""
    # Modules around the owner, where an Interpreter looks constants up.
    forward = fx.GraphModule(owner, program.forward.__self__.graph)
    backward = fx.GraphModule(owner, program.backward_graph)
    program.forward = lambda *inputs: make(forward).call(inputs)
    program.backward = lambda boxed: make(backward).call(boxed)


class _ShownProgram(RankInterpreter):
    """Interpreter for this rank's program."""

    def __init__(self, shown: ShownValues, program: fx.GraphModule) -> None:
        super().__init__(program)
        self.shown = shown

    def run_node(self, n: fx.Node) -> Any:
        operands = self.shown.operands(n, self.env.__getitem__)
        result = super().run_node(n)
        self.shown.see(n, result, operands)
        return result


class _ShownSimulator(Simulator):
    """Simulator that shows one device's values."""

    def __init__(self, shown: ShownValues, program: fx.GraphModule, mesh: Mesh) -> None:
        super().__init__(program, mesh)
        self.shown = shown

    def run_node(self, n: fx.Node) -> Any:
        device = self.shown.rank
        operands = self.shown.operands(n, lambda node: self.env[node][device])
        result = super().run_node(n)
        if n.op != "output":
            self.shown.see(n, result[device], operands)
        return result
