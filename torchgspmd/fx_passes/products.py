"""einsum nodes of the local program as matrix products, chosen at compile time.

before   y = einsum("bsm,hm->bsh", x, w)
after    y = reshape(mm(reshape(x, [b*s, m]), t(w)), [b, s, h])
needs    meta["shape"] on the operands of einsum nodes
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..nd_ops import einsum, split_equation

aten = torch.ops.aten
EINSUM = einsum._opoverload


def products(graph: fx.Graph) -> fx.Graph:
    """Rewrites the graph in place and returns it."""
    for node in list(graph.nodes):
        if node.target is EINSUM:
            with graph.inserting_before(node):
                made = _Product(graph, node).make()
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    return graph


class _Product:
    def __init__(self, graph: fx.Graph, node: fx.Node):
        equation, self.x, self.y = node.args
        self.a, self.b, self.out = split_equation(equation)
        self.graph, self.node = graph, node
        self.sizes = dict(zip(self.a, self.x.meta["shape"])) | dict(zip(self.b, self.y.meta["shape"]))

    def make(self) -> fx.Node:
        a, b = self.a, self.b
        batch = [c for c in self.out if c in a and c in b]
        rows, columns = ([c for c in self.out if c in term and c not in batch] for term in (a, b))
        x, y = self.x, self.y
        if [c for c in self.out if c not in batch] != rows + columns and self.out.startswith(tuple(columns) or " "):
            x, y, a, b, rows, columns = y, x, b, a, columns, rows            # the result comes out in order
        inner = [c for c in a if c in b and c not in batch]
        left = self.matrix(x, a, batch, rows, inner)
        right = self.matrix(y, b, batch, inner, columns)
        product = self.call(aten.bmm.default if batch else aten.mm.default, left, right)
        letters = batch + rows + columns
        shape = [self.sizes[c] for c in letters]
        product = self.call(aten.reshape.default, product, shape) if len(shape) != (3 if batch else 2) or not all(
            len(g) == 1 for g in (([batch] if batch else []) + [rows, columns])) else product
        if letters != list(self.out):
            product = self.call(aten.permute.default, product, [letters.index(c) for c in self.out])
            product = self.call(aten.contiguous.default, product)
        return product

    def matrix(self, x: Any, term: str, batch: list[str], first: list[str], second: list[str]) -> Any:
        """The operand as [batch, first, second]; transposed by strides alone where its letters allow it."""
        letters, sizes = list(term), self.sizes
        flat = [math.prod(sizes[c] for c in group) for group in (batch, first, second)]
        swapped = letters == batch + second + first and letters != batch + first + second
        if not swapped and letters != batch + first + second:
            x = self.call(aten.permute.default, x, [letters.index(c) for c in batch + first + second])
        shape = [flat[0]] * bool(batch) + ([flat[2], flat[1]] if swapped else flat[1:])
        if shape != [sizes[c] for c in (batch + second + first if swapped else batch + first + second)]:
            x = self.call(aten.reshape.default, x, shape)
        return self.call(aten.transpose.int, x, -2, -1) if swapped else x

    def call(self, op: Any, *args: Any) -> fx.Node:
        made = self.graph.call_function(op, args)
        made.meta = {"source": self.node.meta.get("source"), "backward": self.node.meta.get("backward", False)}
        return made
