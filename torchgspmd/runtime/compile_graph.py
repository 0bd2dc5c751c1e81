"""Compile one device's graph: as Python code, or by Inductor.

Inductor compiles the parts between loops, and a loop's body by itself. The loop stays a loop,
so the compiled code does not grow with its iterations. Layers that are alike are compiled once, too
(`like_regions`). Where a part communicates, Inductor keeps the plan's order: what stands between a
start and its wait hides the message.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from operator import getitem
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module

from ..comm.kinds import WIRE_OPS
from ..comm.profiled_code import ProfiledCode, common_ranges, within
from ..compat import private_apis
from ..compat.private_apis import OpOverload, has
from ..fx_passes.loop_call import BodyCall, loop_calls
from ..fx_passes.lower.torch_bindings import BoxedCodeGen

SHORTEST = 12  # operations of a region: fewer take no time to compile
FEWEST = 3  # regions that are alike
TRIED = 8  # periods

# Inductor's options for programs that communicate: its passes for locality and memory move a wait
# to right behind its start.
IN_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}

_BOXED = "torch._dynamo.utils.GmWrapper"


def compile_graph(owner: nn.Module, graph: fx.Graph, backend: str, boxed: bool = False) -> Any:
    """Return a function that runs the graph. boxed: it takes a list of inputs and empties it."""
    if backend == "inductor":
        compiled = _by_inductor(owner, graph)
        return compiled if boxed else lambda *inputs: compiled([*inputs])
    codegen = BoxedCodeGen() if boxed else CodeGen()
    graph.set_codegen(codegen)
    return ProfiledCode(fx.GraphModule(owner, graph).forward, codegen)


def _by_inductor(owner: nn.Module, graph: fx.Graph) -> Callable[[list], Any]:
    loops = [call for _, call in loop_calls(graph)]
    for body in (body for call in loops for body in call.bodies):
        body.compile = lambda inner: compile_graph(nn.Module(), inner, "inductor")
    whole, regions = fx.GraphModule(owner, graph), like_regions(graph)
    split = _split(whole, regions) if regions else None
    if split is None and loops:
        split = _split(whole, [])
    if split is None:
        return CompiledPiece(whole).run
    # Inputs are freed after their last use between the pieces too.
    split.graph.set_codegen(BoxedCodeGen())
    split.recompile()
    return split.forward


def _split(whole: fx.GraphModule, regions: Sequence[Sequence[fx.Node]]) -> fx.GraphModule | None:
    """Divide a program at its loops and like regions; None if few regions are alike."""
    number = _pieces(whole.graph, regions).__getitem__
    split = split_module(whole, whole, number, keep_original_order=True)
    alike, count = dict[Hashable, CompiledPiece](), 0
    for name, piece in list(split.named_children()):
        if isinstance(piece, fx.GraphModule) and not any(loop_calls(piece.graph)):
            compiled, count = CompiledPiece(piece), count + 1
            compiled.compiled = alike.setdefault(program_key(piece.graph), compiled).compiled
            setattr(split, name, compiled)
    # A division that saves few compilations would only keep Inductor from fusing over its ends.
    return split if not regions or 2 * len(alike) <= count else None


class CompiledPiece(nn.Module):
    """A program that Inductor compiles when it is first called with inputs of some strides."""

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__()
        self.program, self.compiled = program, dict[tuple, Callable[[list], Any]]()
        sends = any(node.target in WIRE_OPS for node in program.graph.nodes)
        self.options: dict[str, Any] = IN_ORDER if sends else {}
        self.is_traceable = _is_traceable(program.graph)
        self.ranges = common_ranges(program.graph)  # of a profile

    def __call__(self, *inputs: Any) -> Any:
        # Not nn.Module's: hooks of all modules are in the program already.
        return self.run([*inputs])

    def run(self, inputs: list) -> Any:
        """Run it. The list is emptied, so that each input is freed after its last use."""
        key = _layout(inputs)
        # Inductor assumes the strides that it was compiled with.
        if key not in self.compiled:
            self.compiled[key] = self._compile(inputs)
        with within(self.ranges):
            return self.compiled[key](inputs)

    def _compile(self, inputs: Sequence[Any]) -> Callable[[list], Any]:
        if self.is_traceable and all(isinstance(x, Tensor) for x in inputs) and has(_BOXED):
            # Imported here: Inductor takes seconds.
            wrapped = private_apis.GmWrapper(_with_tuple(self.program), lambda flat: flat)
            compiled = private_apis.compile_fx(wrapped, [*inputs], config_patches=self.options)
            if _returns_tuple(self.program):
                return compiled
            return lambda boxed: compiled(boxed)[0]
        # Dynamo turns numbers into symbols, and calls between compiled parts what it cannot trace.
        traced = torch.compile(self.program, options=self.options)
        return lambda boxed: traced(*boxed)


def _returns_tuple(program: fx.GraphModule) -> bool:
    return isinstance(program.graph.output_node().args[0], (tuple, list))


def _with_tuple(program: fx.GraphModule) -> fx.GraphModule:
    """Return the program with its result in a tuple, which split_module omits for one."""
    if _returns_tuple(program):
        return program
    graph = copy.deepcopy(program.graph)
    output = graph.output_node()
    output.args = ((output.args[0],),)
    return fx.GraphModule(program, graph)


def _layout(inputs: Sequence[Any]) -> tuple:
    """Return for which inputs compiled code is right: () for a piece that takes numbers."""
    if not all(isinstance(x, Tensor) for x in inputs):
        return ()
    return tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)


def _is_traceable(graph: fx.Graph) -> bool:
    """Return whether a trace on fake tensors sees all that a run does.

    Objects have a state, and sizes that only a run knows have none before it.
    """
    plain = OpOverload, FunctionType, BuiltinFunctionType, type(torch.ops.aten.add)
    return all(
        isinstance(node.target, plain) and not node.meta.get("unknown")
        for node in graph.nodes
        if node.op == "call_function"
    )


def _pieces(graph: fx.Graph, regions: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, int]:
    """Return the piece that a node is in, as a number: a loop with its results, or a region."""
    pieces: dict[fx.Node, int] = {}
    of_region = {node: i for i, region in enumerate(regions) for node in region}
    now, region = 0, -1
    for node in graph.nodes:
        if of_region.get(node, -1) != region:
            now, region = now + 2, of_region.get(node, -1)
        if isinstance(node.target, BodyCall):
            # Loops get odd numbers, the operations between them even ones.
            now += 2
            pieces[node] = now - 1
        elif node.target is getitem:  # a piece returns tensors, not tuples
            pieces[node] = pieces[node.args[0]]
        else:
            pieces[node] = now
    return pieces


#     norm mm gelu mm  norm mm gelu mm  norm mm gelu mm  head
#     |--- region ---| |--- region ---| |--- region ---|
# Layers that a Python loop calls are one long program. It is a row of operations, in which layers
# are a period: each operation is like the one a layer further on.
def like_regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return regions that may be alike, in order: each is a run of operations of the graph."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    keys = [_key(node) for node in nodes]
    return [nodes[start:stop] for start, stop in _periods(nodes, keys, 0, len(nodes))]


def program_key(graph: fx.Graph) -> Hashable:
    """Return a key that graphs share if they compute the same from their inputs."""
    names: dict[fx.Node, str] = {}
    rows: list[Hashable] = []
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), names.__getitem__)
        names[node] = f"%{len(names)}"
        target = "" if node.op == "placeholder" else node.target
        # Attributes are objects: equal names in two graphs may be different ones.
        owner = graph.owning_module if node.op in ("get_attr", "call_module") else None
        rows.append((node.op, target, id(owner), repr(args), repr(kwargs)))
    return tuple(rows)


def _key(node: fx.Node) -> Hashable:
    """Return an operation, and its arguments but for the values that it reads."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: "%")
    return node.target, repr(args), repr(kwargs)


def _periods(
    nodes: Sequence[fx.Node], keys: Sequence[Hashable], start: int, stop: int
) -> list[tuple[int, int]]:
    """Return the ends of the regions between two places."""
    best = (0, 0, 0, 0)  # operations that need no compilation, period, first and last place
    for period in _candidates(keys[start:stop]):
        first = start
        for i in range(start, stop - period + 1):
            if i < stop - period and keys[i] == keys[i + period]:
                continue
            count = (i - first) // period + 1  # alike from `first` to i + period
            best = max(best, ((count - 1) * period, period, first, i + period))
            first = i + 1
    saved, period, first, last = best
    if not period or saved < (FEWEST - 1) * period:
        return []
    at = _cheapest_cut(nodes, first, last, period)
    count = (last - at) // period
    regions = [(at + i * period, at + (i + 1) * period) for i in range(count)]
    before = _periods(nodes, keys, start, at)
    return [*before, *regions, *_periods(nodes, keys, at + count * period, stop)]


def _candidates(keys: Sequence[Hashable]) -> list[int]:
    """Return the most frequent distances between an operation and the next one like it."""
    last: dict[Hashable, int] = {}
    distances = Counter[int]()
    for place, key in enumerate(keys):
        distances[place - last.get(key, place)] += 1
        last[key] = place
    return [d for d, _ in distances.most_common(4 * TRIED) if d >= SHORTEST][:TRIED]


def _cheapest_cut(nodes: Sequence[fx.Node], first: int, last: int, period: int) -> int:
    """Return the place for the first region at which fewest values pass from region to region."""
    slack = (last - first) % period
    room = period if (last - first) // period > FEWEST else slack + 1
    places = {node: i for i, node in enumerate(nodes)}

    def passing(at: int) -> tuple[int, int]:
        """Return how many values pass between the first two regions; the place, for equal ones."""
        middle = at + period
        passed = (
            any(middle <= places.get(user, -1) < middle + period for user in node.users)
            for node in nodes[at:middle]
        )
        return sum(passed), at

    return min(range(first, first + room), key=passing)
