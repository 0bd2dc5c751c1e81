"""The identity of random draws in a trace: the generator's state before each draw.

    y = checkpoint(block, x)    forward    seed 7: %a = native_dropout(%x, 0.5)       draw 0
                                backward   torch restores seed 7: %b = native_dropout(..)   draw 0

A trace draws no numbers, but every draw moves the generator to another seed. So code that restores
the generator (torch.utils.checkpoint, or the user's own) repeats earlier draws, as it does in
eager PyTorch. meta["draw"] numbers the draws. Equal numbers get one seed when the graph is
expanded (fx_passes/expand/decompose_ops.py), whatever their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback

from ..compat.private_apis import OpOverload
from ..errors import ShardingError
from ..rules import has_own_seed
from .rewrites.loop_trace import is_unrolling

# Distinguishes the calls of one program, since a call may make several nodes.
_calls = count()


def draws(target: object) -> bool:
    """Return whether an operator takes numbers from PyTorch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


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
                raise _other_operands(node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


def _other_operands(node: fx.Node) -> ShardingError:
    name = node.target.name() if isinstance(node.target, OpOverload) else str(node.target)
    return ShardingError(
        f"{name} is recomputed with other operands than it had before",
        where=node.meta.get("source"),
        why="its numbers are drawn once, and it has no seed to draw them again",
        fix="draw before the checkpoint, and pass the numbers to the function",
    )
