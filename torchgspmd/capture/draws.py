"""The identity of random draws in a trace: the generator's state before each draw.

    y = checkpoint(block, x)    forward    seed 7: %a = native_dropout(%x, 0.5)       draw 0
                                backward   torch restores seed 7: %b = native_dropout(..)   draw 0

A trace draws no numbers, but every draw moves the generator to another seed. So code that restores
the generator (torch.utils.checkpoint, or the user's own) repeats earlier draws, as it does in
eager PyTorch. meta["draw"] numbers the draws. Equal numbers get one seed when the graph is
expanded (fx_passes/expand/decompose_ops.py), whatever their operands.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as checkpointing

from ..compat.fx_nodes import copy_node
from ..compat.operators import draws
from ..compat.patches import setting
from ..compat.private_apis import OpOverload, TorchDispatchMode, get_proxy_mode
from ..errors import ShardingError
from ..rules import has_own_seed
from ..rules.custom_ops.loops import ENTRIES, EXITS
from .rewrites.loop_trace import RecomputedRegion, is_unrolling

# Distinguishes the calls of one program, since a call may make several nodes.
_calls = count()


@contextmanager
def traced_generator() -> Iterator[None]:
    """Put the generator into one state for a trace, and back into its own afterwards."""
    before = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def one_draw() -> Iterator[None]:
    """Give a draw's nodes the generator's seed, and move the generator to the next seed.

    An operation may consist of several draws: their seeds follow from its seed.
    """
    generator, meta = torch.default_generator, fx_traceback.get_current_meta()
    seed, custom = generator.initial_seed(), meta.get("custom")
    meta["custom"] = {**(custom or {}), "draw": (seed, next(_calls))}
    # Path 1 leads to the seeds inside this draw, path 0 to the draw behind it.
    generator.manual_seed(_follow(seed, 1))
    try:
        yield
    finally:
        meta["custom"] = custom
        generator.manual_seed(_follow(seed, 0))


def recomputing_dispatch(dispatch: Callable[..., object]) -> Callable[..., object]:
    """Return a recomputation's dispatch, for values that a selective checkpoint has saved.

    It moves the generator past saved draws. Eager PyTorch does not, so a draw that is recomputed
    after a saved one has other numbers there. Operations in place run again: their caller ignores
    the result, and looks at the tensor.
    """

    def recomputing(
        self: Any, func: Any, types: object, args: tuple = (), kwargs: Any = None
    ) -> object:
        if func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        generator = torch.default_generator
        seed = generator.initial_seed()
        result = dispatch(self, func, types, args, kwargs)
        # A saved draw has not moved the generator itself.
        if draws(func) and generator.initial_seed() == seed:
            generator.manual_seed(_follow(seed, 0))
        return result

    return recomputing


def _follow(seed: int, path: int) -> int:
    """Return another 63-bit seed (Steele et al., SplitMix, 2014)."""
    x = (seed + (2 * path + 1) * 0x9E3779B97F4A7C15) & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return (x ^ x >> 31) >> 1


def number_draws(graph: fx.Graph) -> None:
    """Number a graph's draws: those that repeat an earlier one have its number."""
    numbers: dict[tuple, int] = {}
    within: dict[tuple, int] = {}  # nodes in one call so far, less one
    for node in graph.nodes:
        if "draw" in node.meta:
            seed, call = node.meta["draw"]
            # A call may make several equal nodes; repeated ones have the same positions.
            position = within[call, node.target] = within.get((call, node.target), -1) + 1
            number = numbers.setdefault((seed, node.target, position), len(numbers))
            node.meta["draw"] = number
    # Fewer numbers than draws: some draw is repeated.
    if len(numbers) < sum(within.values()) + len(within):
        _keep_values(graph)


def _keep_values(graph: fx.Graph) -> None:
    """Replace draws that repeat an earlier one, and have no seed of ours, by its value.

    For a backend that draws by itself these are all draws.
    """
    same: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    drawn: dict[int, tuple[fx.Node, Any]] = {}

    def key(node: fx.Node) -> Any:
        # Operands are equal if they are computed alike, wherever they stand.
        operands = fx.map_arg((node.args, node.kwargs), lambda n: id(same.get(n, n)))
        return node.target, repr(operands)

    for node in list(graph.nodes):
        if "draw" not in node.meta:
            if node.op == "call_function":
                same[node] = first.setdefault(key(node), node)
        elif is_unrolling() or not has_own_seed(node.target):
            earlier, operands = drawn.setdefault(node.meta["draw"], (node, key(node)))
            if operands != key(node):
                is_operator = isinstance(node.target, OpOverload)
                name = node.target.name() if is_operator else str(node.target)
                raise ShardingError(
                    f"{name} is recomputed with other operands than it had before",
                    where=node.meta.get("source"),
                    why="its numbers are drawn once, and it has no seed to draw them again",
                    fix="draw before the checkpoint, and pass the numbers to the function",
                )
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


# Checkpoints in blocks with stacked weights: the backward gets a copy of their operations.
#
# before   %h = tanh(%x);  %y = mm(%h, %w)     in a checkpoint;   %dw = mm(%h, %dy)   backward
# after    %h = tanh(%x);  %y = mm(%h, %w);    %h_1 = tanh(%x);   %dw = mm(%h_1, %dy)
#
# torch.utils.checkpoint runs its function a second time during the backward. By then a block has
# its stacked weights again, not a row, and torch.vmap has ended. So the trace notes which nodes
# belong to a checkpoint, and values are recomputed in the graph. A value stays if the forward uses
# it outside the checkpoint, if a selective checkpoint's policy saves it, if it follows from a loop
# in the checkpoint, or if it is drawn without a seed of ours.
REGION = "checkpoint"  # key in node.meta: a node's checkpoint by number, whether it saves the node
_SAVED = checkpointing.CheckpointPolicy.MUST_SAVE, checkpointing.CheckpointPolicy.PREFER_SAVE

_in_block: ContextVar[bool] = ContextVar("in_block", default=False)
_numbers = itertools.count()


def in_block() -> AbstractContextManager[bool]:
    """Trace a block that has one row of its stacked weights during the call."""
    return setting(_in_block, True)


def region_or(before: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Return a checkpoint's two halves: in a block they note the nodes traced between them.

    before: torch's, whose signature differs between releases.
    """
    signature = inspect.signature(before)

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if not _in_block.get() or (mode := get_proxy_mode()) is None:
            region = RecomputedRegion(function)
            with region.first_time():
                yield from before(region.again, *args, **kwargs)
            return
        graph = mode.tracer.graph
        options = signature.bind(function, *args, **kwargs).arguments
        first, _ = options.get("context_fn", checkpointing.noop_context_fn)()
        policy = getattr(first, "policy_fn", None)
        last, number = next(iter(reversed(graph.nodes)), None), next(_numbers)
        with _Saving(graph, policy) if policy else first:
            yield
        # An outer checkpoint ends later, so its number replaces an inner one's.
        for node in _nodes_since(graph, last):
            node.meta[REGION] = number, node.meta.get(REGION, (0, False))[1]

    return generator


def _nodes_since(graph: fx.Graph, last: fx.Node | None) -> Iterator[fx.Node]:
    return itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))


class _Saving(TorchDispatchMode):
    """Takes from a checkpoint the results that its policy saves."""

    def __init__(self, graph: fx.Graph, policy: Callable[..., object]) -> None:
        super().__init__()
        self.graph, self.policy = graph, policy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        last = next(iter(reversed(self.graph.nodes)), None)
        result = func(*args, **kwargs)
        context: Any = checkpointing.SelectiveCheckpointContext(is_recompute=False)
        context.op_output = result
        choice = self.policy(context, func, *args, **kwargs)
        if choice is True or choice in _SAVED:
            for node in _nodes_since(self.graph, last):
                node.meta[REGION] = 0, True
        return result


def recompute_regions(graph: fx.Graph) -> None:
    """Give the backward copies of the values that checkpoints do not keep, in place."""
    lost = _lost(graph)
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node not in lost:
            return node
        if node not in copies:
            for operand in node.all_input_nodes:
                copy(operand)
            copies[node] = result = copy_node(graph, node, lambda n: copies.get(n, n))
            result.meta |= {"backward": True, "captured": result.name}
        return copies[node]

    for node in list(graph.nodes) if lost else ():
        if node.meta.get("backward"):
            with graph.inserting_before(node):
                for operand in node.all_input_nodes:
                    if operand in lost:
                        node.replace_input_with(operand, copy(operand))


def _lost(graph: fx.Graph) -> set[fx.Node]:
    """Return checkpointed values that the backward computes again."""
    of_loops: set[fx.Node] = set()
    lost: set[fx.Node] = set()
    for node in graph.nodes:
        if REGION not in node.meta or node.op != "call_function" or node.meta["backward"]:
            node.meta.pop(REGION, None)
            continue
        node.meta[REGION], is_saved = node.meta[REGION]
        is_drawn = "draw" in node.meta and not has_own_seed(node.target)
        if node.target in ENTRIES | EXITS or not of_loops.isdisjoint(node.all_input_nodes):
            of_loops.add(node)
        elif not is_drawn and not is_saved:
            lost.add(node)
    for node in graph.nodes:
        # The forward uses these outside their checkpoint, so they exist anyway.
        if not node.meta.get("backward"):
            here = node.meta.get(REGION)
            lost -= {x for x in node.all_input_nodes if x.meta.get(REGION) != here}
    for node in graph.nodes:
        node.meta.pop(REGION, None)
    return lost
