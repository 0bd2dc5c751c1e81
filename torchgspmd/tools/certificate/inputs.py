"""Random inputs for a certificate's trials, and programs that compute in 64 bits.

Indices are below the rows that their readers look up. One trial has only positive numbers, for
roots and logarithms; the others have both signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ...capture import PARAMETER, Captured
from ...compat.fx_nodes import reached
from ...features.pipelines.call import StageCall
from ...fx_passes.loop_call import BodyCall, LoopCall, copy_of
from ...rules import FlatCall
from ...rules.ops.lookup import rows_read
from ...rules.rewrites import rewrite_of

WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu), torch.float64),
}


def index_bounds(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the rows that each integer input indexes, where an operation says so."""
    bounds: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for index, rows in rows_read(node):
            for source in _sources(index) if isinstance(index, fx.Node) else ():
                bounds[source] = min(rows, bounds.get(source, rows))
    return bounds


def _sources(index: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs from which indices are computed."""
    integers = reached(
        [index], lambda n: n.all_input_nodes if _is_integer(n.meta.get("val")) else ()
    )
    for node in integers:
        if node.op == "placeholder" and _is_integer(node.meta.get("val")):
            yield node


def _is_integer(val: object) -> bool:
    return isinstance(val, Tensor) and not (val.is_floating_point() or val.is_complex())


class RandomInputs:
    """Random inputs for one trial. positive: no number except in parameters is negative."""

    def __init__(self, captured: Captured, seed: int, positive: bool, most: int) -> None:
        self.captured, self.positive, self.most = captured, positive, most
        # A generator of its own: the user's draws are not moved.
        self.generator = torch.Generator().manual_seed(seed)

    def tensors(self) -> list[Tensor]:
        bounds = index_bounds(self.captured.graph)
        nodes = self.captured.graph.find_nodes(op="placeholder")
        return [
            self._tensor(node.meta["val"], each.kind, bounds.get(node))
            for node, each in zip(nodes, self.captured.inputs)
        ]

    def _tensor(self, like: Tensor, kind: str, bound: int | None) -> Tensor:
        shape, dtype = tuple(int(n) for n in like.shape), like.dtype
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.7
        if _is_integer(like):
            # Small integers without a known reader: they may be indices all the same.
            most = max(1, min(self.most, 4 if bound is None else bound))
            if dtype in (torch.uint16, torch.uint32, torch.uint64):
                return torch.zeros(shape, dtype=dtype)
            return torch.randint(0, most, shape, generator=self.generator).to(dtype)
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if kind == PARAMETER:
            # As layers are initialized, so that deep models stay finite.
            x = x / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + x / 4
        elif self.positive:
            # Away from 0, where logarithms and quotients grow without bound.
            x = x.abs() / 2 + 0.1
        return x.to(dtype)


# ---------------------------------------------------------------------------- as a trial computes


def widened(x: Tensor) -> Tensor:
    return x.to(WIDE.get(x.dtype, x.dtype))


def device_of(captured: Captured) -> torch.device:
    """Return the device on which trials compute: the program's, if this machine has one.

    A program for a card has operations that no other device knows.
    """
    kinds = {node.meta["val"].device.type for node in captured.graph.find_nodes(op="placeholder")}
    return torch.device("cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu")


def _default_dtype(node: fx.Node) -> dict[str, torch.dtype]:
    """Return the wide dtype of a tensor that a node makes in torch's default dtype."""
    made = node.meta.get("dtype", getattr(node.meta.get("val"), "dtype", None))
    target = node.target.target if isinstance(node.target, FlatCall) else node.target
    arguments = getattr(getattr(target, "_schema", None), "arguments", ())
    takes_tensors = any("Tensor" in str(each.type) for each in arguments)
    takes_dtype = any(each.name == "dtype" for each in arguments)
    return {"dtype": WIDE[made]} if takes_dtype and not takes_tensors and made in WIDE else {}


def _wide(target: Any) -> Any:
    """Return the function that computes an operation in 64 bits."""
    if isinstance(target, FlatCall):
        return replace(target, target=_wide(target.target))
    return rewrite_of("wide", target) or target


class Rewritten:
    """Copies graphs for one device. wide: whether they name wide dtypes only."""

    def __init__(self, wide: bool, device: torch.device) -> None:
        self.wide, self.device = wide, device

    def graph(self, graph: fx.Graph) -> fx.Graph:
        """Copy a graph, down to its loops' bodies."""
        copy = copy_of(graph)
        for node in copy.nodes:
            node.args, node.kwargs = self.value(node.args), self.value(dict(node.kwargs))
            if self.wide:
                node.target = _wide(node.target)
                node.kwargs = _default_dtype(node) | node.kwargs
            if isinstance(node.target, BodyCall):
                node.target = self._call(node.target)
            if "dtype" in node.meta:
                node.meta["dtype"] = self.value(node.meta["dtype"])
        return copy

    def value(self, args: Any) -> Any:
        """Return arguments with the dtypes and the device."""
        if isinstance(args, torch.dtype) and self.wide:
            return WIDE.get(args, args)
        if isinstance(args, torch.device):
            return self.device
        if isinstance(args, (tuple, list)):
            return type(args)(self.value(a) for a in args)
        if isinstance(args, dict):
            return {key: self.value(a) for key, a in args.items()}
        return args

    def _call(self, call: BodyCall) -> BodyCall:
        if isinstance(call, LoopCall):
            empty = [(shape, self.value(dtype)) for shape, dtype in call.empty]
            return replace(call, graph=self.graph(call.graph), empty=empty)
        if isinstance(call, StageCall):
            pieces = [replace(piece, graph=self.graph(piece.graph)) for piece in call.pieces]
            return replace(call, pieces=tuple(pieces))
        return call
