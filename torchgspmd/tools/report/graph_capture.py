"""Values that a CUDA graph cannot capture: the host reads a value, or sends by itself.

plan.uncapturable()
(Uncapturable(name='picked', why='its size is known only in a run', where='model.py:12'),)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from ...comm.local_ops import to_host
from ...comm.loop_call import BodyCall, LoopCall
from ...compat.private_apis import OpOverload
from ...rules.registry import HOST_READS

_TAGS = {
    torch.Tag.data_dependent_output: "the host reads its value",
    torch.Tag.dynamic_output_shape: "its size is known only in a run",
    torch.Tag.cudagraph_unsafe: "the host reads values for it",
}


class Uncapturable(NamedTuple):
    """A value that a CUDA graph cannot compute: its name in the plan, a reason, the user's line."""

    name: str
    why: str
    where: str | None


def uncapturable(graph: fx.Graph) -> tuple[Uncapturable, ...]:
    """Return a program's values, loops included, that a CUDA graph cannot compute."""
    return tuple(dict.fromkeys(_found(graph)))


def _found(graph: fx.Graph) -> Iterator[Uncapturable]:
    for node in graph.nodes:
        if why := _reason(node):
            yield Uncapturable(node.name, why, node.meta.get("source"))
        if isinstance(node.target, BodyCall):
            for body in node.target.bodies:
                yield from _found(body.graph)


def _reason(node: fx.Node) -> str | None:
    """Return why a CUDA graph cannot compute a node; None if it can."""
    call = node.target
    if isinstance(call, BodyCall):
        # The other bodies are a pipeline's stages.
        if not isinstance(call, LoopCall):
            return "the host sends and receives between stages"
        return "the host reads the value that ends the loop" if call.loop.ends else None
    if call is to_host:
        return "the host allocates the memory where the value waits for the backward"
    if (reason := HOST_READS.get(call)) is not None:
        why = reason(node)
    else:
        tags = call.tags if isinstance(call, OpOverload) else ()
        why = next((_TAGS[tag] for tag in _TAGS if tag in tags), None)
    if why is None and node.meta.get("unknown"):
        return _TAGS[torch.Tag.dynamic_output_shape]
    return why
