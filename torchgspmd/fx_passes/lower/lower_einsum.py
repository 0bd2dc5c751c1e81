"""Lower einsum nodes in the local program to ATen operations.

before   y = einsum("bsm,hm->bsh", x, w)
after    y = linear(x, w)
before   dw = einsum("bsh,bsm->hm", dy, x)
after    dw = mm(t(reshape(dy, [b*s, h])), reshape(x, [b*s, m]))
before   dx = einsum("bsq,qm->bsm", dq, wq) + einsum("bsk,km->bsm", dk, wk)
after    dk_wk = reshape(matmul(dk, wk), [b*s, m])
         dx = reshape(addmm(dk_wk, reshape(dq, [b*s, q]), wq), [b, s, m])
needs    meta["shape"] on the operands of einsum nodes
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ...compat.fx_nodes import add_node, origin_of
from ...compat.operators import aten
from ...rules.custom_ops.nd import Matrix, einsum, matrix_form, split_equation

EINSUM = einsum._opoverload


def lower_einsum(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in list(graph.nodes):
        # Views of rows and columns need sizes.
        if node.target is EINSUM and not any(n.meta.get("unknown") for n in node.args[1:]):
            product = _Product(graph, node)
            # At the addition, not at the product: the addend may be computed between the two.
            with graph.inserting_before(product.added or node):
                result = product.lower()
            denoted = (product.added or node).meta.get("captured")
            for replaced in filter(None, (product.added, node)):
                result.meta = dict(replaced.meta) | {"product": True}
                result.meta.pop("captured", None)
                replaced.replace_all_uses_with(result)
                graph.erase_node(replaced)
            if denoted is not None:
                result.meta["captured"] = denoted  # the sum, if it adds a bias
    return graph


def _is_product(node: fx.Node) -> bool:
    """Return True if a value is a product, or a sum of products, that is used once."""
    return (node.target is EINSUM or node.meta.get("product", False)) and len(node.users) == 1


class _Product:
    """An einsum node and the addition that is fused with it, if any."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        equation, self.x, self.y = node.args
        self.a, self.b, self.out = split_equation(equation)
        self.graph, self.node = graph, node
        self.sizes = dict(zip(self.a, self.x.meta["shape"])) | dict(
            zip(self.b, self.y.meta["shape"])
        )
        self.added, self.addend = self.fusible_addition()

    def fusible_addition(self) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
        """Return (addition, addend) if the product can be fused with an addition of its result.

        The addition is the product's only user. The addend is a bias, or another product that is
        used once.
        """
        user = next(iter(self.node.users)) if len(self.node.users) == 1 else None
        if (
            user is None
            or user.target is not aten.add.Tensor
            or user.kwargs
            or len(user.all_input_nodes) != 2
        ):
            return None, None
        other = next(x for x in user.all_input_nodes if x is not self.node)
        # addmm does not promote dtypes, as add does.
        if other.meta.get("dtype") != self.node.meta.get("dtype"):
            return None, None
        # addmm broadcasts a vector over rows: a bias has to lie along the columns.
        columns = [c for c in self.out if c not in self.a]
        plain = (
            self.out
            and not [c for c in self.out if c in self.a and c in self.b]
            and list(self.out[-1:]) == columns
        )
        is_bias = (
            plain
            and other.meta.get("shape") == (self.sizes[self.out[-1]],)
            and user.args[0] is self.node
        )
        is_product = (
            self.has_rows()
            and _is_product(other)
            and other.meta.get("shape") == self.node.meta.get("shape")
        )
        return (user, other) if is_bias or is_product else (None, None)

    def has_rows(self) -> bool:
        """Return True if a matrix multiplies the rows of a tensor of any rank."""
        column, inner = self.out[-1:], self.a[-1:]
        return (
            self.a == self.out[:-1] + inner
            and column not in self.a
            and self.b in (column + inner, inner + column)
        )

    def lower(self) -> fx.Node:
        """Return the product by linear, matmul, addmm, bmm or mm."""
        # A bias has one dimension: more are another product.
        if self.addend is not None and len(self.addend.meta["shape"]) > 1:
            return self.added_to_product()
        if self.has_rows() and self.b[0] == self.out[-1]:
            return self.call(
                aten.linear.default, self.x, self.y, *([] if self.added is None else [self.addend])
            )
        if self.has_rows() and self.added is None and len(self.out) > 2:
            return self.call(aten.matmul.default, self.x, self.y)
        return self.matrix_product()

    def added_to_product(self) -> fx.Node:
        """Return the sum with another product, by addmm."""
        rows = math.prod(self.sizes[c] for c in self.a[:-1])
        inner, columns = self.sizes[self.a[-1]], self.sizes[self.out[-1]]
        addend = self.call(aten.reshape.default, self.addend, [rows, columns])
        left = self.call(aten.reshape.default, self.x, [rows, inner])
        right = (
            self.call(aten.transpose.int, self.y, -2, -1) if self.b[0] == self.out[-1] else self.y
        )
        product = self.call(aten.addmm.default, addend, left, right)
        for matrix in (addend, product):
            matrix.meta |= {"shape": (rows, columns), "dtype": self.node.meta["dtype"]}
        return self.call(aten.reshape.default, product, [self.sizes[c] for c in self.out])

    def matrix_product(self) -> fx.Node:
        """Return the product by mm, bmm or addmm on operands reshaped to matrices."""
        form = matrix_form(self.node.args[0], self.x.meta["shape"], self.y.meta["shape"])
        x, y = (self.y, self.x) if form.exchanged else (self.x, self.y)
        left, right = self.matrix(x, form.left), self.matrix(y, form.right)
        if self.added is not None and form.columns == self.out[-1]:
            product = self.call(aten.addmm.default, self.addend, left, right)
        else:
            # The addition stays a node of its own, as its addend does not fit the matrix.
            self.added = None
            op = aten.bmm.default if form.has_batch else aten.mm.default
            # Of vectors: 0.05 ms instead of 0.37 for 512 products of 2 and 64 numbers.
            is_outer = all(c in self.out for c in self.a + self.b)
            product = self.call(aten.mul.Tensor if is_outer else op, left, right)
            product.meta |= {"shape": list(form.product), "dtype": self.node.meta.get("dtype")}
        if form.shape != form.product:
            product = self.call(aten.reshape.default, product, list(form.shape))
        if form.order is not None:
            product = self.call(aten.permute.default, product, list(form.order))
            product = self.call(aten.contiguous.default, product)
        return product

    def matrix(self, x: object, matrix: Matrix) -> Any:
        if matrix.order is not None:
            x = self.call(aten.permute.default, x, list(matrix.order))
        if matrix.shape is not None:
            x = self.call(aten.reshape.default, x, list(matrix.shape))
        return self.call(aten.transpose.int, x, -2, -1) if matrix.swapped else x

    def call(self, op: object, *args: object) -> fx.Node:
        """Add a call with the einsum's source line and phase."""
        result = add_node(self.graph, "call_function", op, args, {})
        result.meta.update({"source": None, "backward": False, **origin_of(self.node)})
        return result
