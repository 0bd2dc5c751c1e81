"""Attention with a user's functions of positions, as torch's flex_attention has them.

    out, lse = flex_attention(q, k, v, buffers, "aten.ge.Tensor(q, k)", "", "", scale, region)

    mask        from b, h, q, k: whether a score is seen; tiles without seen scores are skipped
    score       from score, b, h, q, k: the new score
    gradient    from grad, score, b, h, q, k: the gradient for the old score

flex_capture.py writes the functions, as expressions with elementwise operations. An empty one
changes nothing. b, h, q and k are positions over all shards; u0, u1, ... are the buffers.
Expressions assign to t0, t1, ...
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ...compat.operators import aten, custom_op, find
from ...compat.private_apis import OpOverload
from ...errors import ShardingError
from ...rules.ops.pointwise import named
from .bounds import Visible, blocks_seen
from .call import AttentionCall, Gradients, Results, Upstream, backward_schema, forward_schema
from .tiles import Place, ScoreChange, Tiles, empty_gradients, empty_results

_NAMES = {"aten": aten, "torch": torch, "inf": math.inf, "nan": math.nan}


# Operations besides elementwise ones whose operands and results are 0-d.
OF_NO_DIMENSION = {
    *named("scalar_tensor full new_ones new_zeros new_full ones zeros ones_like zeros_like"),
    *named("full_like detach alias clone _to_copy lift_fresh_copy"),
    *named("floor_divide"),  # elementwise, though torch does not tag it so
}
READS_MASKS = (torch.Tag.cudagraph_unsafe,)  # The host asks whether a tile has scores to compute.
_VARIABLE = re.compile(r"b|h|q|k|score|grad|inf|nan|[ut]\d+")
_PLAIN = (bool, int, float, str, type(None))


@cache
def _compiled(text: str) -> CodeType:
    """Return an expression's code. Its text may come from a saved plan, so it is checked.

    Raises:
        ShardingError: It uses more than elementwise operations.
    """
    try:
        tree = ast.parse(text, mode="eval")
        if _is_expression(tree.body):
            return compile(tree, "<flex_attention>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise ShardingError.here(
        "a function of flex_attention is no expression of elementwise operations",
        why=f"it is {text[:80]!r}",
        fix="plan the model again",
    )


def _is_expression(node: ast.AST) -> bool:
    """Return whether code consists of elementwise operators, numbers and variables."""
    if isinstance(node, ast.Constant):
        return type(node.value) in _PLAIN
    if isinstance(node, ast.Name):
        return _VARIABLE.fullmatch(node.id) is not None
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_expression(node.operand)
    if isinstance(node, ast.List):
        return all(map(_is_expression, node.elts))
    if isinstance(node, ast.NamedExpr):
        return _is_expression(node.target) and _is_expression(node.value)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return isinstance(vars(torch).get(node.attr), torch.dtype)
    if not isinstance(node, ast.Call) or any(each.arg is None for each in node.keywords):
        return False
    values = [*node.args, *(each.value for each in node.keywords)]
    return is_elementwise(_operator(node.func)) and all(map(_is_expression, values))


def _operator(node: ast.AST) -> object:
    """Return the operator that a name such as aten.ge.Tensor means, or None."""
    names = ast.unparse(node).split(".")
    if len(names) != 3 or names[0] != "aten" or not all(map(str.isidentifier, names)):
        return None
    return find(*names)


def is_elementwise(op: object) -> bool:
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return False
    return torch.Tag.pointwise in op.tags or op is aten.index.Tensor or op in OF_NO_DIMENSION


@dataclass(frozen=True)
class Flex(ScoreChange):
    """A change by expressions. buffers: the tensors that they read, not sharded.

    For `blocks` some may be None: not known.
    """

    buffers: Sequence[Any]
    mask: str
    score: str
    gradient: str

    @property
    def functions(self) -> tuple[Any, ...]:
        return self.buffers, self.mask, self.score, self.gradient

    def _value(
        self, text: str, place: Place, shape: Sequence[int], device: torch.device, **values: Tensor
    ) -> Tensor:
        """Evaluate an expression at a tile's positions."""
        queries, keys = (
            torch.arange(first, first + size, device=device)
            for first, size in zip(place.first[3:], shape[3:])
        )
        batch, heads = self._lead(place, shape, device)
        names = {f"u{i}": x if x.dim() else x.view(1) for i, x in enumerate(self.buffers)}
        names |= {
            "b": batch.view(-1, 1, 1, 1, 1),
            "h": heads.view(*heads.shape, 1, 1),
            "q": queries.view(-1, 1),
            "k": keys,
            **values,
        }
        # eval is safe here: _compiled accepts elementwise operators and variables alone.
        return eval(_compiled(text), {**_NAMES, **names})

    def _lead(
        self, place: Place, shape: Sequence[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the positions [b] and [heads of keys, groups] of a shard."""
        batch, heads, groups = (
            torch.arange(first, first + size, device=device)
            for first, size in zip(place.first, shape[:3])
        )
        # Tiles have heads as [heads of keys, groups]; a user's h counts the heads of queries.
        heads = heads.view(-1, 1) * place.whole[2] + groups
        last = place.whole[0] - 1, place.whole[1] * place.whole[2] - 1
        return batch.clamp_max(last[0]), heads.clamp_max(last[1])  # Behind the last is padding.

    def blocks(
        self,
        shape: Sequence[int],
        place: Place,
        queries: Sequence[tuple[int, int]],
        keys: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> Visible | None:
        if not self.mask:
            return None
        _compiled(self.mask)  # which checks it
        batch, heads = self._lead(place, shape, device)
        return blocks_seen(self.mask, self.buffers, (batch, heads.flatten()), queries, keys)

    def seen(self, shape: Sequence[int], place: Place, device: torch.device) -> Tensor | bool:
        if not self.mask:
            return True
        seen = self._value(self.mask, place, shape, device)
        # True saves the caller a torch.where over the tile.
        return True if seen.all() else seen

    def scores(self, scores: Tensor, place: Place) -> Tensor:
        if not self.score:
            return scores
        changed = self._value(self.score, place, scores.shape, scores.device, score=scores)
        return changed.to(scores.dtype).expand_as(scores)

    def score_gradient(self, grad: Tensor, scores: Tensor, place: Place) -> Tensor:
        if not self.gradient:
            return grad
        values = {"score": scores, "grad": grad}
        result = self._value(self.gradient, place, scores.shape, scores.device, **values)
        return result.to(grad.dtype).expand_as(grad)


def flex_tiles(call: AttentionCall, functions: Sequence[Any]) -> Tiles:
    """Return a call's tiles. functions: the buffers and the three expressions."""
    return Tiles(call, Flex(*functions))


_REST = (
    "Tensor[] buffers, str mask, str score, str gradient, float scale, float price=1.0, "
    "SymInt[]? region=None"
)


def _tiles(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tiles:
    *functions, scale = rest[:5]
    call = AttentionCall(q, k, v, False, scale, region=rest[6] if len(rest) > 6 else None)
    return flex_tiles(call, functions)


@custom_op("flex_attention", schema=forward_schema(_REST), tags=READS_MASKS)
def flex_attention(*args: Any) -> Results:
    """Return softmax(changed scores) v, and the logsumexp of these scores.

    q [b, h g, s, d]   k [b, h, t, d]   v [b, h, t, e]. price: see mask_shares.py. region: as
    `attention` has it with dropout.
    """
    out, lse = _tiles(*args).forward()
    return out.contiguous(), lse


flex_attention.register_fake(empty_results)


@custom_op("flex_attention_backward", schema=backward_schema(_REST), tags=READS_MASKS)
def flex_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: object
) -> Gradients:
    return _tiles(q, k, v, *rest).backward(Upstream(grad, out, lse))


flex_attention_backward.register_fake(empty_gradients)


def _context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, buffers, *ctx.options = inputs[:8]  # A program before it is sharded has no regions.
    ctx.save_for_backward(q, k, v, *output, *buffers)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple:
    q, k, v, out, lse, *buffers = ctx.saved_tensors
    grads = flex_attention_backward(grad, q, k, v, out, lse, buffers, *ctx.options)
    return (*grads, [None] * len(buffers), *(None,) * len(ctx.options))


flex_attention.register_autograd(_backward, setup_context=_context)
