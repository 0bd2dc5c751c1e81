"""A linear map on a carry whose dimensions are mixed, as matrices.

    h1 = h * decay - kT @ (w @ h)       h: [b, k, v], k mixed, v uniform
    A = map(identity)                   [b, k, k]: the columns of the identity have the places of v
    h1 = A @ h

If v has fewer columns than the identity, the map is applied several times. A is computed for all
iterations at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor, fx

from ...compat.private_apis import _pytree as pytree
from ...fx_passes.ir import Op
from .affine_states import ALGEBRAS, identity
from .carry_dims import CarryDims, linear_group
from .semirings import Semiring


class LinearMap:
    """The map along a path of operations. like: a value with the carry's shape."""

    def __init__(
        self,
        path: Sequence[Op],
        carry: fx.Node,
        again: fx.Node,
        dims: CarryDims,
        like: Tensor,
        ring: Semiring,
    ) -> None:
        self.path, self.carry, self.again, self.like = path, carry, again, like
        self.ring = ring
        alike = {*dims.mixed, *dims.uniform}
        self.each = [d for d in range(like.dim()) if d not in alike]
        self.order = [*self.each, *dims.mixed, *dims.uniform]
        self.mixed = [like.shape[d] for d in dims.mixed]
        self.uniform = [like.shape[d] for d in dims.uniform]
        self.rows, self.columns = prod(self.mixed), prod(self.uniform)

    @cached_property
    def others(self) -> list[fx.Node]:
        """The operands that the map reads besides the carry."""
        known, result = {self.carry}, dict[fx.Node, None]()
        for op in self.path:
            group = linear_group(
                self.ring.groups(op), [i for i, v in enumerate(op.operands) if v in known]
            )
            known.add(op.node)
            for i, v in enumerate(op.operands):
                if v not in known and i not in (group or ()):
                    result[v] = None
        return [*result]

    def apply(self, x: Tensor, *others: Tensor) -> Tensor:
        """Apply the map to a carry. others: values of the operands of this name."""
        values = dict(zip(self.others, others))
        known = {self.carry: x}
        for op in self.path:
            group = (
                linear_group(
                    self.ring.groups(op), [i for i, v in enumerate(op.operands) if v in known]
                )
                or ()
            )
            tensors = [
                known[v] if v in known else values[v] if i not in group else self._zeros_like(v)
                for i, v in enumerate(op.operands)
            ]
            known[op.node] = call(op, tensors)
        return known[self.again]

    def matrices(self, batched: Sequence[bool], *others: Tensor) -> Tensor:
        """Return A [steps, each..., rows, rows]; without steps if no operand has these.

        batched: whether an operand has a first dimension for the steps.
        """
        function: Callable[..., Tensor] = self.apply
        rest = tuple(0 if each else None for each in batched)
        if any(batched):
            function = torch.vmap(function, in_dims=(None, *rest))
        basis = self._identity()
        if len(basis) == 1:
            result = function(basis[0], *others).unsqueeze(0)
        else:
            nothing = (None,) * len(rest)
            result = torch.vmap(function, in_dims=(0, *nothing))(basis, *others)
        lead = 1 + any(batched)  # [times, steps?, *carry]
        kept = len(self.each) + len(self.mixed)
        result = result.permute(*range(lead), *(lead + d for d in self.order))
        result = result.movedim(0, lead - 1 + kept).flatten(lead - 1 + kept)
        d = lead - 1 + len(self.each)
        result = result.flatten(d, d + len(self.mixed) - 1)
        # A slice with all columns is an alias, which has no rule.
        return result if result.shape[-1] == self.rows else result[..., : self.rows]

    def _identity(self) -> Tensor:
        """Return [times, *carry]: the identity's columns in the places of uniform dimensions."""
        times = -(-self.rows // self.columns)
        eye = identity(self.rows, times * self.columns, self.ring.matrices, self.like)
        eye = eye.reshape(*self.mixed, times, *self.uniform).movedim(len(self.mixed), 0)
        sizes = [self.like.shape[d] for d in self.each]
        full = eye.reshape(times, *[1] * len(sizes), *eye.shape[1:])
        full = full.expand(times, *sizes, *eye.shape[1:])
        back = [self.order.index(d) for d in range(len(self.order))]
        return full.permute(0, *(1 + d for d in back))

    def _zeros_like(self, value: fx.Node) -> Tensor:
        val, zero = value.meta["val"], ALGEBRAS[self.ring.elements].zero
        return torch.full(val.shape, zero, dtype=val.dtype, device=val.device)

    def as_columns(self, x: Tensor) -> Tensor:
        """Return carries [..., *carry] as [..., each..., rows, columns]."""
        lead = x.dim() - len(self.order)
        x = x.permute(*range(lead), *(lead + d for d in self.order))
        kept = x.shape[: lead + len(self.each)]
        return x.reshape(*kept, self.rows, self.columns)

    def as_carry(self, x: Tensor) -> Tensor:
        """Return the carries from `as_columns`."""
        lead = x.dim() - 2 - len(self.each)
        x = x.reshape(*x.shape[:-2], *self.mixed, *self.uniform)
        back = [self.order.index(d) for d in range(len(self.order))]
        return x.permute(*range(lead), *(lead + d for d in back))


def call(op: Op, tensors: Sequence[Tensor]) -> Tensor:
    """Call an operation on other tensors."""
    leaves, tree = pytree.tree_flatten((op.node.args, dict(op.node.kwargs)))
    rest = iter(tensors)
    leaves = [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return op.node.target(*args, **kwargs)  # pyright: ignore
