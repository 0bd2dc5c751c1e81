"""einsum and attention nodes of the local program as the operations that compute them, chosen at compile time.

before   y = einsum("bsm,hm->bsh", x, w)
after    y = reshape(mm(reshape(x, [b*s, m]), t(w)), [b, s, h])
needs    meta["shape"] on the operands of einsum nodes
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..ops.nd import attention, attention_backward, einsum, split_equation

aten = torch.ops.aten
EINSUM = einsum._opoverload


ATTENTION, ATTENTION_BACKWARD = attention._opoverload, attention_backward._opoverload


def products(graph: fx.Graph, device: str) -> fx.Graph:
    """Rewrites the graph in place and returns it; on the CPU attention becomes PyTorch's kernel itself."""
    for node in list(graph.nodes):
        if node.target in (ATTENTION, ATTENTION_BACKWARD) and device == "cpu":
            _use_cpu_kernel(graph, node)
        if node.target is EINSUM:
            product = _Product(graph, node)
            with graph.inserting_before(product.added or node):
                made = product.make()
            for replaced in filter(None, (product.added, node)):
                made.meta = dict(replaced.meta)
                replaced.replace_all_uses_with(made)
                graph.erase_node(replaced)
    return graph


def _use_cpu_kernel(graph: fx.Graph, node: fx.Node) -> None:
    """The operation that ops.nd.attention calls, called by the program: spares the way through Python."""
    *tensors, causal, scale = node.args
    if tensors[-1].meta.get("shape", [None])[-1] != tensors[0].meta.get("shape", [0])[-1] and node.target is ATTENTION:
        return                                                              # a kernel for heads of one width
    backward = node.target is ATTENTION_BACKWARD
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward if backward else aten._scaled_dot_product_flash_attention_for_cpu
    with graph.inserting_before(node):
        made = graph.call_function(op.default, (*tensors, 0.0, causal), {"scale": scale})
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


class _Product:
    def __init__(self, graph: fx.Graph, node: fx.Node):
        equation, self.x, self.y = node.args
        self.a, self.b, self.out = split_equation(equation)
        self.graph, self.node = graph, node
        self.sizes = dict(zip(self.a, self.x.meta["shape"])) | dict(zip(self.b, self.y.meta["shape"]))
        self.added = self.bias()

    def bias(self) -> fx.Node | None:
        """The addition of a bias that is all that happens to the result, and can be had with the product."""
        user = next(iter(self.node.users)) if len(self.node.users) == 1 else None
        if user is None or user.target is not aten.add.Tensor or user.args[0] is not self.node or user.kwargs:
            return None
        bias = user.args[1]
        columns = [c for c in self.out if c not in self.a]
        plain = not [c for c in self.out if c in self.a and c in self.b] and list(self.out[-1:]) == columns
        fits = isinstance(bias, fx.Node) and bias.meta.get("shape") == (self.sizes[self.out[-1]],) if plain and self.out else False
        return user if fits and bias.meta.get("dtype") == self.node.meta.get("dtype") else None

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
        if self.added is not None and columns == [self.out[-1]]:
            product = self.call(aten.addmm.default, self.added.args[1], left, right)
        else:
            self.added = None
            product = self.call(aten.bmm.default if batch else aten.mm.default, left, right)
            product.meta |= {"shape": [math.prod(self.sizes[c] for c in g) for g in ([batch] if batch else []) + [rows, columns]],
                             "dtype": self.node.meta.get("dtype")}
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
