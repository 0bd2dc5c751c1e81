"""Reachability in a trace's autograd graph: connected outputs, inputs that get a gradient."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor

from ..errors import ShardingError
from .functionalize import FunctionalTensor

_ACCUMULATE = "torch::autograd::AccumulateGrad"


def connected_components(outs: list[Tensor]) -> list[int]:
    """Return for each output the first output that its autograd graph is connected to.

    Two outputs are connected if one operation comes before both, or before both and a third one.
    """
    root: list[int] = [*range(len(outs))]
    owners: dict[Any, int] = {}

    def first(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for i, out in enumerate(outs):
        stack = [out.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node.name() == _ACCUMULATE:
                continue
            if node not in owners:
                owners[node] = i
                stack += [n for n, _ in node.next_functions]
            # The smaller number becomes the root, so that it is the component's first output.
            elif (other := first(owners[node])) != (own := first(i)):
                root[max(other, own)] = min(other, own)
    return [first(i) for i in range(len(outs))]


def reachable_inputs(outs: list[Tensor], inputs: list[Tensor]) -> list[int]:
    """Return a bit set for each output, with the inputs that gradients flow to: bit k is input k.

    Raises ShardingError if a gradient would flow to another leaf tensor, where it would be lost.
    """
    bits = {id(tensor): 1 << k for k, tensor in enumerate(inputs)}
    reachable: dict[Any, int] = {}
    stack: list[Any] = [out.grad_fn for out in outs if out.grad_fn is not None]
    while stack:
        # A stack, not recursion: autograd graphs are deeper than Python's recursion limit.
        node = stack[-1]
        before = [n for n, _ in node.next_functions if n is not None]
        rest = [n for n in before if n not in reachable] if node not in reachable else ()
        stack += rest
        if rest:
            continue
        stack.pop()
        leaf = node.variable if node.name() == _ACCUMULATE else None
        if leaf is not None and not isinstance(leaf, FunctionalTensor):
            raise ShardingError.here(
                f"forward uses a tensor {list(leaf.shape)} that requires a gradient, and is "
                "no parameter or argument",
                why="a gradient is computed for what the program is given: it would be lost "
                "silently",
                fix="make it a parameter of the module or an argument, or detach() it; if "
                "the module keeps what an "
                "earlier call computed, empty that, or call under torch.no_grad()",
            )
        reachable[node] = reduce(or_, (reachable[n] for n in before), bits.get(id(leaf), 0))
    return [bits.get(id(out), 0) if out.grad_fn is None else reachable[out.grad_fn] for out in outs]
