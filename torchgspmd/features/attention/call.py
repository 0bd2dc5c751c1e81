"""AttentionCall: the operands of attention by name, for operators, kernels, rings and rules.

    op(*args)                call = AttentionCall(*args)
    op_backward(*args)       call, upstream = of_backward(*args)
    op_parts(*args)          call, count = of_parts(*args)

The fields stand in the order of the operators' schemas. In a graph their values are nodes.
"""

from __future__ import annotations

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


class AttentionCall(NamedTuple):
    """A call of attention, or of a part of one.

    mask: [..., h g, s, t], or 1 for each; True for visible scores, or added to the scores. region:
    the positions of the first query and the first key, and the numbers of queries and keys in all.
    Those behind the last are padding. With dropout also that of the first and the number in all of
    each dimension before the queries, where heads are two: heads of keys, and groups
    (`tiles.Place`). seed: the weights that dropout leaves out follow from it and from positions.
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
        """The last arguments of an operator: those of dropout, none without it."""
        return () if self.seed is None else (self.seed, self.dropout)

    @property
    def options(self) -> tuple[Any, ...]:
        """The arguments behind v, without dropout where there is none."""
        return (self.causal, self.scale, self.mask, self.region, *self.modifiers)

    def in_block(self, rows: slice, columns: slice) -> AttentionCall:
        """Return the call of some queries and some keys."""
        mask = self.mask
        if mask is not None:
            mask = mask[..., rows if mask.shape[-2] > 1 else slice(None), :]
            mask = mask[..., columns if mask.shape[-1] > 1 else slice(None)]
        return self._replace(
            q=self.q[..., rows, :],
            k=self.k[..., columns, :],
            v=self.v[..., columns, :],
            mask=mask,
        )


class Upstream(NamedTuple):
    """The operands of a backward besides the call's. out, lse: for all keys, not for a part.

    grad, out: [..., h g, s, e]   lse: [..., h g, s]
    """

    grad: Tensor
    out: Tensor
    lse: Tensor

    def in_rows(self, rows: slice) -> Upstream:
        """Return the operands of some queries."""
        return Upstream(self.grad[..., rows, :], self.out[..., rows, :], self.lse[..., rows])


def of_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any
) -> tuple[AttentionCall, Upstream]:
    """Return the call of a backward operator's arguments."""
    return AttentionCall(q, k, v, *options), Upstream(grad, out, lse)


def of_parts(*args: Any) -> tuple[AttentionCall, int]:
    """Return the call of the arguments of attention_parts, and the number of parts."""
    at = AttentionCall._fields.index("region") + 1
    return AttentionCall(*args[:at], *args[at + 1 :]), args[at]
