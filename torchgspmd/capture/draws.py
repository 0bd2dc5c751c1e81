"""The identity of random draws in a trace: the state of PyTorch's generator before each of them.

    y = checkpoint(block, x)    forward    seed 7: %a = native_dropout(%x, 0.5)       draw 0
                                backward   torch restores seed 7: %b = native_dropout(..)   draw 0

A trace draws no numbers, but every draw moves the generator to another seed. So code that restores
the generator (torch.utils.checkpoint, or code of the user) repeats earlier draws, as it does in
eager PyTorch. The draws are numbered by meta["draw"]. Equal ones get one seed when the graph is
expanded (fx_passes/expand/draw_seeds.py), whatever their operands.
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
from ..rules.custom_ops.random import DRAW_SEED
from .rewrites.loop_trace import is_unrolling

_calls = count()  # tells the calls of one program apart, if one makes several nodes


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
    """Give the nodes of a draw the seed of the generator, and move that to the next seed.

    The draws that an operation consists of have seeds of their own, which follow from its seed.
    """
    generator, meta = torch.default_generator, fx_traceback.get_current_meta()
    seed, custom = generator.initial_seed(), meta.get("custom")
    meta["custom"] = {**(custom or {}), "draw": (seed, next(_calls))}
    generator.manual_seed(_follow(seed, 1))
    try:
        yield
    finally:
        meta["custom"] = custom
        generator.manual_seed(_follow(seed, 0))


def recomputing_dispatch(dispatch: Callable[..., object]) -> Callable[..., object]:
    """Return the dispatch of a recomputation that a selective checkpoint has saved values for.

    It moves the generator past draws that are saved. Eager PyTorch does not, so that a draw that is
    recomputed after a saved one has other numbers. Operations in place run again: who called them
    does not look at their result, but at the tensor.
    """

    def recomputing(
        self: Any, func: Any, types: object, args: tuple = (), kwargs: Any = None
    ) -> object:
        if func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        generator = torch.default_generator
        seed = generator.initial_seed()
        result = dispatch(self, func, types, args, kwargs)
        if draws(func) and generator.initial_seed() == seed:
            generator.manual_seed(_follow(seed, 0))
        return result

    return recomputing


def _follow(seed: int, path: int) -> int:
    """Return another seed of 63 bits (Steele et al., SplitMix, 2014)."""
    x = (seed + (2 * path + 1) * 0x9E3779B97F4A7C15) & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return (x ^ x >> 31) >> 1


def number_draws(graph: fx.Graph) -> None:
    """Number the draws of a graph: those that repeat an earlier one have its number."""
    numbers: dict[tuple, int] = {}
    within: dict[tuple, int] = {}  # nodes of one call so far
    for node in graph.nodes:
        if "draw" in node.meta:
            seed, call = node.meta["draw"]
            position = within[call, node.target] = within.get((call, node.target), -1) + 1
            number = numbers.setdefault((seed, node.target, position), len(numbers))
            node.meta["draw"] = number
    if len(numbers) < sum(within.values()) + len(within):
        _keep_values(graph)


def _keep_values(graph: fx.Graph) -> None:
    """Put the first value in the place of draws that repeat it, and that have no seed of ours.

    For a backend that draws by itself these are all draws.
    """
    same: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    drawn: dict[int, tuple[fx.Node, Any]] = {}

    def key(node: fx.Node) -> Any:
        operands = fx.map_arg((node.args, node.kwargs), lambda n: id(same.get(n, n)))
        return node.target, repr(operands)

    for node in list(graph.nodes):
        if "draw" not in node.meta:
            if node.op == "call_function":
                same[node] = first.setdefault(key(node), node)
        elif is_unrolling() or not (node.target is DRAW_SEED or has_own_seed(node.target)):
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
