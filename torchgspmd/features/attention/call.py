"""AttentionCall: attention's operands by name, for operators, kernels, rings and rules.

    op(*args)                call = AttentionCall(*args)
    op_backward(*args)       call, upstream = of_backward(*args)
    op_parts(*args)          call, count = of_parts(*args)

The fields have the schemas' order. In a graph their values are nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

Results = tuple[Tensor, Tensor]  # out, lse
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v

# Schemas of the operators. Tensors: q [..., h g, s, d]   k [..., h, t, d]   v [..., h, t, e]
FORWARD = "Tensor q, Tensor k, Tensor v"
BACKWARD = "Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
OPTIONS = "Tensor? mask=None, SymInt[]? region=None, Tensor? seed=None, float dropout=0.0"


def forward_schema(rest: str) -> str:
    return f"({FORWARD}, {rest}) -> (Tensor, Tensor)"


def backward_schema(rest: str) -> str:
    return f"({BACKWARD}, {rest}) -> (Tensor, Tensor, Tensor)"


def flops(q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    """Return the FLOPs of attention: two products, the scores and the weights times v."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    """Return those of the backward: the scores again, and the gradients for weights, v, q and k."""
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


class AttentionCall(NamedTuple):
    """A call to attention, whole or in part.

    mask: [..., h g, s, t], or 1 for each; True for visible scores, or added to the scores. region:
    the positions at which queries and keys begin, and how many there are in all; positions behind
    these are padding. With dropout a region goes on with `tiles.Place` for the dimensions before
    the queries: where they begin, then their full sizes. Heads are two dimensions there: heads for
    keys, and groups. seed: with positions, it decides which weights dropout leaves out.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float
    mask: Tensor | None = None
    region: Sequence[int] | None = None
    seed: Tensor | None = None
    dropout: float = 0.0

    @property
    def modifiers(self) -> tuple[Any, ...]:
        """The last arguments of an operator: the seed and the dropout, if there is any."""
        return () if self.seed is None else (self.seed, self.dropout)

    @property
    def options(self) -> tuple[Any, ...]:
        """The arguments behind v; without a seed, dropout's are left out."""
        return (self.causal, self.scale, self.mask, self.region, *self.modifiers)

    def in_block(self, rows: slice, columns: slice) -> AttentionCall:
        mask = self.mask
        if mask is not None:
            # A dimension of size 1 broadcasts, so it has nothing to cut.
            mask = mask[..., rows if mask.shape[-2] > 1 else slice(None), :]
            mask = mask[..., columns if mask.shape[-1] > 1 else slice(None)]
        return self._replace(
            q=self.q[..., rows, :], k=self.k[..., columns, :], v=self.v[..., columns, :], mask=mask
        )


class Upstream(NamedTuple):
    """A backward operator's operands besides the call's. out, lse: for all keys, not for a part.

    grad, out: [..., h g, s, e]   lse: [..., h g, s]
    """

    grad: Tensor
    out: Tensor
    lse: Tensor

    def in_rows(self, rows: slice) -> Upstream:
        return Upstream(self.grad[..., rows, :], self.out[..., rows, :], self.lse[..., rows])


def of_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any
) -> tuple[AttentionCall, Upstream]:
    """Split a backward operator's arguments into the call and the rest."""
    return AttentionCall(q, k, v, *options), Upstream(grad, out, lse)


def of_parts(*args: Any) -> tuple[AttentionCall, int]:
    """Split the arguments of attention_parts into the call and the number of parts."""
    # The number of parts stands behind the region.
    at = AttentionCall._fields.index("region") + 1
    return AttentionCall(*args[:at], *args[at + 1 :]), args[at]
