"""Checkpoints in blocks with stacked weights: the backward gets a copy of their operations.

before   %h = tanh(%x);  %y = mm(%h, %w)     in a checkpoint;   %dw = mm(%h, %dy)   backward
after    %h = tanh(%x);  %y = mm(%h, %w);    %h_1 = tanh(%x);   %dw = mm(%h_1, %dy)

torch.utils.checkpoint runs its function a second time during the backward. By then a block has its
stacked weights again, not a row, and torch.vmap has ended. So the trace notes which nodes belong to
a checkpoint, and values are recomputed in the graph. A value stays if the forward uses it outside
the checkpoint, or if a selective checkpoint's policy saves it. It also stays if
it follows from a loop in the checkpoint, or is drawn without a seed of ours.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import fx
from torch.utils import checkpoint as checkpointing

from ...compat.fx_nodes import copy_node
from ...compat.patches import setting
from ...compat.private_apis import TorchDispatchMode, get_proxy_mode
from ...rules import has_own_seed
from ...rules.custom_ops.loops import ENTRIES, EXITS
from .loop_trace import RecomputedRegion

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
