"""Compile a graph of one device: as Python code, or by Inductor.

Inductor compiles the parts between loops, and the body of a loop by itself. The loop stays a loop,
so the compiled code does not grow with its iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen
from torch.fx.passes.split_module import split_module

from ..comm.loop_call import BodyCall, loop_calls
from ..comm.profiled_code import ProfiledCode
from ..fx_passes.lower.boxed_codegen import BoxedCodeGen


def compile_graph(owner: nn.Module, graph: fx.Graph, backend: str, boxed: bool = False) -> Any:
    """Return a function that runs the graph. boxed: it takes a list of inputs and empties it."""
    if backend == "inductor":
        compiled = _by_inductor(owner, graph)
        return (lambda inputs: compiled(*inputs)) if boxed else compiled
    codegen = BoxedCodeGen() if boxed else CodeGen()
    graph.set_codegen(codegen)
    return ProfiledCode(fx.GraphModule(owner, graph).forward, codegen)


def _by_inductor(owner: nn.Module, graph: fx.Graph) -> Callable[..., object]:
    """Return a function that runs the graph: compiled pieces, and loops between them."""
    loops = [call for _, call in loop_calls(graph)]
    if not loops:
        return torch.compile(fx.GraphModule(owner, graph))
    for body in (body for call in loops for body in call.bodies):
        body.compile = lambda inner: _by_inductor(nn.Module(), inner)
    whole = fx.GraphModule(owner, graph)
    pieces = _pieces(graph)
    split = split_module(whole, whole, pieces.__getitem__)
    for name, piece in list(split.named_children()):
        if isinstance(piece, fx.GraphModule) and not any(loop_calls(piece.graph)):
            setattr(split, name, torch.compile(piece))
    return split.forward


def _pieces(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the piece that a node is in, as a number. A loop is one, with its results."""
    pieces: dict[fx.Node, int] = {}
    now = 0
    for node in graph.nodes:
        if isinstance(node.target, BodyCall):
            now += 2
            pieces[node] = now - 1
        elif node.target is getitem and isinstance(node.args[0].target, BodyCall):
            pieces[node] = pieces[node.args[0]]
        else:
            pieces[node] = now
    return pieces
