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

import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..capture.prints import Breakpoint, LocalValue, wanted
from ..compiler.api import Plan
from ..errors import ShardingError, did_you_mean
from ..fx_passes.digest import module_path
from ..fx_passes.ir import other_shapes
from ..fx_passes.lower.verify_in_flight import STARTS
from ..fx_passes.printer import call_text, dtype_name, type_text
from ..fx_passes.simulator import Simulator
from ..runtime.joint_program import JointProgram
from ..runtime.mesh_module import ModuleCall
from ..runtime.sharded_module import ShardedModule
from ..shard_spec import ShardSpec
from .comparison import denoted

Around = Callable[[fx.Node, Callable[[fx.Node], Any]], Callable[[Any], object]]
"""Called before a node, with a function from nodes to values; returns what takes its result."""


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
        # All ranks run in this process: without a rank the first one is shown.
        values, device = ShownValues([model.program.graph], model, stops, rank or 0), rank or 0

        def around(n: fx.Node, value_of: Callable[[fx.Node], Any]) -> Callable[[Any], object]:
            operands = values.operands(n, lambda node: value_of(node)[device])
            return lambda result: n.op == "output" or values.see(n, result[device], operands)

        # Plan.simulate makes its simulator by this attribute.
        name, value = "_simulator", seen(Simulator, around)
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


def _shown_run(
    module: ShardedModule, stops: Sequence[str], rank: int | None
) -> Callable[..., object]:
    """Return a function that runs a module's programs, and prints."""
    programs: dict[object, JointProgram] = {}
    is_shown = rank in (None, module._groups.rank)

    def run(program: JointProgram, call: ModuleCall) -> object:
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
    interpret(
        shown,
        plan.captured.constants,
        lambda n, value_of: partial(values.see, n, operands=values.operands(n, value_of)),
    )
    shown.in_pieces = lambda: None
    return shown


def seen(kind: type[fx.Interpreter], around: Around) -> Any:
    """Return a kind of interpreter that calls a function around each node."""

    class Seen(kind):
        def run_node(self, n: fx.Node) -> Any:
            see = around(n, self.env.__getitem__)
            result = super().run_node(n)
            see(result)
            return result

    return Seen


def interpret(program: JointProgram, owner: nn.Module, around: Around) -> None:
    """Replace both halves of a program by an interpreter. owner: has the constants."""
    kind = seen(fx.Interpreter, around)

    def call(half: fx.GraphModule, inputs: Sequence[object]) -> Any:
        values = [*inputs]
        if isinstance(inputs, list):  # a backward empties its list
            inputs.clear()
        return kind(half).run(*values, enable_io_processing=False)

    # Modules around the owner, where an Interpreter looks constants up.
    forward = fx.GraphModule(owner, program.forward.__self__.graph)
    backward = fx.GraphModule(owner, program.backward_graph)
    program.forward = lambda *inputs: call(forward, inputs)
    program.backward = lambda boxed: call(backward, boxed)


# The lines: one value on a rank each, and the stops between them.


class ShownValues:
    """Prints one rank's values as a program computes them.

    graphs: a device's program; or its forward and its backward.
    """

    def __init__(
        self, graphs: Sequence[fx.Graph], plan: Plan, stops: Sequence[str], rank: int
    ) -> None:
        self.plan, self.rank, self.first = plan, rank, next(iter(graphs[0].nodes))
        self.wholes = {node.name: node for node in plan.captured.graph.nodes}
        nodes = [node for graph in graphs for node in graph.nodes]
        self.rows = {node: None for node in nodes if _is_row(node, graphs[0])}  # in their order
        self.names = _names(nodes, self.rows)
        self.width = max((len(self.names[node]) for node in self.rows), default=0)
        self.stops = {node for each in stops for node in self._nodes_of(each)}
        self.known = {name for node in self.rows if (name := denoted(node))}
        self.wanted = {name for each in plan.captured.breakpoints for name in each.values()}

    def operands(self, node: fx.Node, value_of: Callable[[fx.Node], object]) -> dict[str, object]:
        """Copy the operands of a node that a stop shows; the node may overwrite them."""
        if node not in self.stops:
            return {}
        return {self.names[each]: _kept(value_of(each)) for each in node.all_input_nodes}

    def see(self, node: fx.Node, value: object, operands: Mapping[str, object]) -> None:
        """Print a value, and stop where a stop is."""
        # Calls are not announced: a run begins when its first node is seen.
        if node is self.first:
            self._begin()
        if node not in self.names or not isinstance(value, (Tensor, tuple, list)):
            return
        if node in self.rows:
            self._print(node, value)
        name = denoted(node)
        if name is not None and name in self.wanted and name not in self.values:
            self.values[name], self.specs[name] = _kept(value), node.meta["spec"]
        if node in self.stops:
            self._stop(node, value, operands)
        # A breakpoint() stops once all its variables have values.
        while self.waiting and self.waiting[0].values() & self.known <= self.values.keys():
            self._stop_in_forward(self.waiting.pop(0))

    def _begin(self) -> None:
        mesh = self.plan.mesh
        place = " ".join(f"{k}={v}" for k, v in mesh.coordinates(self.rank).items())
        print(f"rank {self.rank} of {mesh.size}: {place}")
        self.values, self.specs = dict[str, object](), dict[str, ShardSpec]()
        self.phase, self.place = "", ("", "")
        self.waiting = [*self.plan.captured.breakpoints]

    def _print(self, node: fx.Node, value: Any) -> None:
        self._print_place(node)
        text = node.meta.get("collective") or call_text(node, self.names)
        name = f"%{self.names[node]}"
        if isinstance(value, Tensor):
            line = f"{self._type(node, value)} = {text}  {_range(self._own(node, value))}"
        else:
            kinds = [dtype_name(t.dtype) + str([*t.shape]) for t in value if isinstance(t, Tensor)]
            line = f"({'; '.join(kinds)}) = {text}"
        print(f"    {name:{self.width + 1}} : {line}")

    def _print_place(self, node: fx.Node) -> None:
        """Print a node's phase, module and line, if they are others than before."""
        if node.op != "placeholder" and "source" not in node.meta:  # a pass has put it here
            return
        phase = "backward" if node.meta["backward"] else "forward"
        phase = "inputs" if node.graph is self.first.graph and node.op == "placeholder" else phase
        place = module_path(node), node.meta["source"] or ""
        if phase != self.phase:
            self.phase, self.place = phase, ("", "")
            print(phase)
        if place != self.place and any(place):
            self.place = place
            print("  " + "  ".join(filter(None, place)))

    def _type(self, node: fx.Node, value: Tensor) -> str:
        """Return a shard's type, and the whole value's if it is another."""
        spec, own = node.meta.get("spec"), type_text(value.dtype, value.shape, None)
        if spec is None or not (spec.sharding_axes or spec.pending):
            return own
        if len(spec.dims) != value.dim():
            return own
        whole, other = self._whole(node) or (["?"] * value.dim(),) * 2
        text = type_text(value.dtype, whole, spec, other)
        return f"{own} of {text[len(dtype_name(value.dtype)) :]}"

    def _whole(self, node: fx.Node) -> tuple[Any, Any] | None:
        """Return the whole value's shape, and one that differs in sizes that only a run knows."""
        captured, spec = self.wholes.get(node.meta.get("captured", "")), node.meta.get("spec")
        val = None if captured is None else captured.meta.get("val")
        if captured is None or not isinstance(val, Tensor) or spec is None or spec.windows:
            return None
        return (val.shape, other_shapes(captured)[0]) if val.dim() == len(spec.dims) else None

    def _own(self, node: fx.Node, value: Tensor) -> Tensor:
        """Return a shard without its padding, if the whole value's size is known."""
        known = self._whole(node)
        if known is None or known[0] != known[1] or len(known[0]) != value.dim():
            return value
        coordinates, mesh = self.plan.mesh.coordinates(self.rank), self.plan.mesh
        for dim, axes in enumerate(node.meta["spec"].dims):
            rows = value.shape[dim]
            # Padding is behind the last rows, so a late shard may have none of the whole.
            left = max(0, known[0][dim] - mesh.index(axes, coordinates) * rows)
            value = value.narrow(dim, 0, min(rows, left))
        return value

    # --------------------------------------------------------------------------------------- stops

    def _nodes_of(self, stop: str) -> list[fx.Node]:
        named = [node for node in self.rows if stop.lstrip("%") == self.names[node]]
        if named:
            return named[:1]
        if re.search(r":\d+$", stop):
            inside = [n for n in self.rows if f"/{n.meta.get('source')}".endswith(f"/{stop}")]
            places = dict.fromkeys(inside, stop)
        else:
            places = {n: p for n in self.rows for p in _parents(n) if fnmatchcase(p, stop)}
        # The last node wins: a stop is behind all operations of its place.
        last = {(p, bool(n.meta.get("backward"))): n for n, p in places.items()}
        if not last:
            words = [p for n in self.rows for p in (self.names[n], *_parents(n))]
            raise ShardingError.here(
                f"nothing of the program is called '{stop}'",
                fix=did_you_mean(stop, dict.fromkeys(words)),
            )
        return [*last.values()]

    def _stop(self, node: fx.Node, value: object, operands: Mapping[str, object]) -> None:
        name, module, line = self.names[node], module_path(node), node.meta.get("source") or ""
        of = f" of module '{module}'" if module else ""
        print(f"    stop behind %{name}{of}{line and f', {line}'}")
        file, _, number = line.rpartition(":")
        spec = node.meta.get("spec")
        Breakpoint(file or "<no line>", int(number or 1), "forward", {"torch": torch}, {}).stop(
            {}, name=name, value=value, operands=operands, layout=str(spec or "")
        )

    def _stop_in_forward(self, stop: Breakpoint) -> None:
        print(f"    stop at breakpoint(), {stop.file}:{stop.line}")
        layouts = {
            name: str(self.specs[value.name])
            for name, value in stop.variables.items()
            if isinstance(value, LocalValue) and value.name in self.specs
        }
        stop.stop(self.values, layouts=layouts)


def _kept(value: object) -> object:
    """Return a copy, since later operations may write over it."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_row(node: fx.Node, forward: fx.Graph) -> bool:
    """Return whether a node's value is printed: not if it is inside a collective."""
    if node.op == "placeholder":
        return "spec" in node.meta and (node.graph is forward or bool(node.meta.get("backward")))
    # A collective that has only been started has no value yet.
    if node.op != "call_function" or node.target in STARTS:
        return False
    return "spec" in node.meta or "collective" not in node.meta


def _names(nodes: Sequence[fx.Node], rows: Collection[fx.Node]) -> dict[fx.Node, str]:
    """Name each node: the plan's names for its values, `.2` for a second layout."""
    names, counts = dict[fx.Node, str](), dict[str, int]()
    for node in nodes:
        name = (denoted(node) if node in rows else None) or node.name
        if node.op == "placeholder" and node not in rows:
            names[node] = name
            continue
        counts[name] = counts.get(name, 0) + 1
        names[node] = name if counts[name] == 1 else f"{name}.{counts[name]}"
    return names


def _parents(node: fx.Node) -> list[str]:
    parts = module_path(node).split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts)) if parts[0]]


def _range(value: Tensor) -> str:
    """Return the smallest and the largest element as text, and how many are not finite."""
    value = value.detach()
    if not value.numel():
        return "empty"
    if value.dtype == torch.bool:
        return f"{int(value.sum())} of {value.numel()} true"
    if value.is_complex():
        value = value.abs()
    if not value.is_floating_point():
        return f"{value.min()} to {value.max()}"
    value = value.float()
    finite = value[value.isfinite()]
    text = f"{finite.min():.4g} to {finite.max():.4g}" if finite.numel() else ""
    rest = value.numel() - finite.numel()
    return f"{text}{', ' if text and rest else ''}{f'{rest} not finite' if rest else ''}"
