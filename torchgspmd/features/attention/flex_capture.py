"""torch's flex_attention as one operation of ours, with its functions as expressions.

    flex_attention(q, k, v, score_mod, block_mask)
    ->  flex_attention(q, k, v, buffers, "aten.ge.Tensor(q, k)", "aten.add.Tensor(score, ...)", ...)

mask_mod and score_mod are traced for one element, with 0-d tensors as its positions. Other values
that they read are buffers. An entry of a buffer that needs a gradient is a leaf of the trace, so
the expression of its gradient follows. PyTorch's own computation, a softmax over all scores,
remains for operations that depend on more than the element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from ...capture.rewrites.loop_trace import is_unrolling
from ...compat.operators import aten
from ...compat.private_apis import _disable_current_modes, get_interpreter_stack, math_attention
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from ...rules.rewrites import DECLINED, rewrite
from .expressions import is_elementwise, learned_buffers
from .flex_op import BACKWARDS, flex_attention

_POSITIONS = ("b", "h", "q", "k")


class _NotElementwise(Exception):
    """The function is no expression of one element."""


class _Entry(NamedTuple):
    """An entry of a buffer that needs a gradient, as a leaf. index: none for a 0-d buffer."""

    buffer: int
    index: list[Tensor]
    value: Tensor


class _Buffers(TorchFunctionMode):
    """Notes the tensors that a function reads and has not computed; or replaces them.

    It never reads the values of 0-d indices. entries: gets those of buffers in `learned`, by id.
    """

    def __init__(
        self,
        own: Sequence[Tensor],
        replaced: dict[int, Tensor] | None = None,
        learned: dict[int, int] | None = None,
        entries: list[_Entry] | None = None,
    ) -> None:
        super().__init__()
        self.own = {id(x): x for x in own}
        self.outer: dict[int, Tensor] = {}
        self.replaced, self.learned = replaced, learned or {}
        self.entries: list[_Entry] = [] if entries is None else entries
        # Values that are buffers with some indices: the buffer, and an index or None for each dim.
        self.partial: dict[int, tuple[Tensor, list[Tensor | None]]] = {}

    def _operand(self, x: object) -> object:
        if not isinstance(x, Tensor) or id(x) in self.own:
            return x
        if self.replaced is None:
            self.outer.setdefault(id(x), x)
            return x
        x = self.replaced.get(id(x), x)
        return self._entry(x, []) if not x.dim() and id(x) in self.learned else x

    def _entry(self, buffer: Tensor, index: list[Tensor]) -> Tensor:
        """Return a buffer's entry, as a leaf if it needs a gradient."""
        value = aten.index.Tensor(buffer, index) if index else buffer
        if id(buffer) in self.learned:
            value = value.detach().requires_grad_()
            self.entries.append(_Entry(self.learned[id(buffer)], index, value))
        return value

    def _read(self, x: Tensor, index: Any) -> Tensor | None:
        """Return x[index] for positions, numbers and `:`, also in several steps; else None."""
        index = index if isinstance(index, tuple) else (index,)
        buffer, places = self.partial.get(id(x), (x, [None] * x.dim()))
        free = [d for d, place in enumerate(places) if place is None]
        if ... in index:
            at = index.index(...)
            index = (*index[:at], *[slice(None)] * (len(free) - len(index) + 1), *index[at + 1 :])
        if len(index) > len(free):
            return None
        places = [*places]
        for d, i in zip(free, index):
            if type(i) is int:
                i = torch.full((), i, dtype=torch.int64)
            if isinstance(i, Tensor) and not i.dim() and not i.is_floating_point():
                places[d] = i
            elif i != slice(None):
                return None
        known = [place for place in places if place is not None]
        if any(place.dtype == torch.bool for place in known):
            return None
        if len(known) == len(places):
            return self._entry(buffer, known)
        result = aten.index.Tensor(buffer, places) if known else aten.alias.default(x)
        self.partial[id(result)] = buffer, places
        return result

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map(self._operand, (args, kwargs or {}))
        if func is Tensor.__bool__:
            raise _NotElementwise("a branch on values")
        # x[i] would read the index's value; aten.index keeps it symbolic.
        result = self._read(*args) if func is Tensor.__getitem__ else None
        result = func(*args, **kwargs) if result is None else result
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                # The table also keeps results alive: the id of a freed tensor may come again.
                self.own[id(x)] = x
        return result


def _operands(dtype: torch.dtype, names: Sequence[str]) -> list[Tensor]:
    positions = (torch.zeros((), dtype=torch.int64) for _ in iter(int, 1))
    return [next(positions) if n in _POSITIONS else torch.ones((), dtype=dtype) for n in names]


def _buffers_of(function: Callable, dtype: torch.dtype, names: Sequence[str]) -> dict[int, Tensor]:
    own = _operands(dtype, names)
    mode = _Buffers(own)
    with mode:
        function(*own)
    return mode.outer


class _Expression:
    def __init__(self, graph: fx.GraphModule, names: Sequence[str]) -> None:
        self.module, self.texts, self.count = graph, dict[fx.Node, str](), 0
        inputs = graph.graph.find_nodes(op="placeholder")
        self.texts.update(zip(inputs, names))
        (output,) = graph.graph.find_nodes(op="output")
        self.text = self._of(output.args[0])

    def _of(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self.texts[value] if value in self.texts else self._of_node(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._of, value))}]"
        return repr(value)

    def _of_node(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            constant = getattr(self.module, str(node.target))
            text = f"aten.scalar_tensor.default({constant.item()!r}, dtype={constant.dtype})"
        else:
            self._check(node)
            args = [self._of(a) for a in node.args]
            # Stand-ins are on the CPU, but the expression runs where the scores are.
            kept = {k: v for k, v in node.kwargs.items() if k not in _PLACEMENT}
            args += [f"{k}={self._of(v)}" for k, v in kept.items()]
            text = f"{node.target}({', '.join(args)})"
        # A name for a value with several users, so that it is computed once.
        if len(node.users) > 1:
            name, self.count = f"t{self.count}", self.count + 1
            self.texts[node] = name
            return f"({name} := {text})"
        return text

    def _check(self, node: fx.Node) -> None:
        op, value = node.target, node.meta.get("val")
        args: Any = node.args
        slices = op is aten.index.Tensor and len(args[1]) != args[0].meta["val"].dim()
        if slices or not is_elementwise(op):
            raise _NotElementwise(str(op))
        if not isinstance(value, Tensor) or value.dim():
            raise _NotElementwise(str(op))


_PLACEMENT = ("device", "pin_memory", "layout", "memory_format")


def _expression(
    function: Callable,
    dtype: torch.dtype,
    names: Sequence[str],
    buffers: dict[int, Tensor],
    entries: list[_Entry] | None = None,
) -> str:
    """Return a function's expression. entries: gets those of buffers that need a gradient."""

    def run(*args: Tensor) -> Tensor:
        own, rest = args[: len(names)], args[len(names) :]
        numbers = range(len(rest)) if entries is not None else ()
        learned = {id(rest[i]): i for i in numbers if needs_gradient[i]}
        with _Buffers(args, dict(zip(buffers, rest)), learned, entries):
            return function(*own)

    needs_gradient = [x.requires_grad for x in buffers.values()]
    # A trace of its own: the program's trace sees nothing of it.
    with _disable_current_modes():
        stand_ins = [torch.zeros(tuple(x.shape), dtype=x.dtype) for x in buffers.values()]
        graph = make_fx(run)(*_operands(dtype, names), *stand_ins)
    graph.graph.eliminate_dead_code()
    return _Expression(graph, [*names, *(f"u{i}" for i in range(len(buffers)))]).text


def _gradient_of(score_mod: Callable, entries: list[_Entry]) -> Callable:
    """Return the gradient of scores, with that of each entry of a buffer that needs one."""

    def gradient(grad: Tensor, score: Tensor, *positions: Tensor) -> Any:
        with torch.enable_grad():
            score = score.detach().requires_grad_()
            changed = score_mod(score, *positions)
        leaves = [score, *(entry.value for entry in entries)]
        # A score_mod may ignore the score, so that nothing flows back.
        found: Sequence[Any] = [None] * len(leaves)
        if changed.requires_grad:
            found = torch.autograd.grad(changed, leaves, grad, allow_unused=True)
        of_score, *others = found
        of_score = torch.zeros_like(grad) if of_score is None else of_score
        terms = [
            [entry.buffer, entry.index, term]
            for entry, term in zip(entries, others, strict=True)
            if term is not None
        ]
        return [of_score, *terms] if terms else of_score

    return gradient


def _functions(
    q: Tensor, score_mod: Callable, mask_mod: Callable
) -> tuple[list[Tensor], list[str]]:
    """Return the buffers, and the expressions for the mask, the score and its gradient."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    score, grad = ("score", *_POSITIONS), ("grad", "score", *_POSITIONS)
    entries: list[_Entry] = []
    # A checkpoint around the call is not to see what the functions save for their own gradient.
    with torch.no_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        buffers = _buffers_of(mask_mod, dtype, _POSITIONS)
        buffers |= _buffers_of(score_mod, dtype, score)
        texts = [
            _expression(mask_mod, dtype, _POSITIONS, buffers),
            _expression(score_mod, dtype, score, buffers),
            _expression(_gradient_of(score_mod, entries), dtype, grad, buffers, entries),
        ]
    if len(learned_buffers(texts[2])) >= len(BACKWARDS):
        raise _NotElementwise("more buffers need a gradient than an operator has results for")
    # torch's noop_mask, as traced: every score is seen.
    if texts[0] == "aten.new_ones.default(b, [], dtype=torch.bool)":
        texts[0] = ""
    if texts[1] == "score":
        texts[1:] = "", ""
    return list(buffers.values()), texts


def flexible_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable,
    block_mask: tuple,
    scale: float,
    kernel_options: dict[str, object],
    *buffers: object,
) -> Any:
    """Run torch's higher-order flex_attention as our operation."""
    arguments = (query, key, value, score_mod, block_mask, scale, kernel_options, *buffers)
    # Batches that broadcast, and buffers that torch has lifted, are left to PyTorch.
    fits = query.shape[:1] == key.shape[:1] and not any(buffers)
    if not fits or kernel_options.get(RETURNS) or is_unrolling() or get_interpreter_stack():
        return math_attention(*arguments)
    try:
        tensors, texts = _functions(query, score_mod, block_mask[-1])
    except (_NotElementwise, RuntimeError):  # PyTorch reports what is a mistake.
        return math_attention(*arguments)
    out, lse = flex_attention(query, key, value, tensors, *texts, scale)
    if kernel_options.get("BACKEND") != "FLASH":
        lse = lse / math.log(2)  # as torch's other kernels have it
    return out, lse, lse


# An option: whether the caller gets the greatest scores.
RETURNS = "returns_maximum"


def options_with_returns(options_of: Callable, *args: object) -> dict[str, Any]:
    """Add to the result of torch's `_apply_kernel_options` whether the maximum is returned."""
    returns = any(getattr(x, "max_scores", False) for x in args[5:])
    return {**options_of(*args), RETURNS: returns}


# torch's varlen_attn as flex_attention: each query sees one range of keys.
#
#     varlen_attn(q, k, v, cu_seq_q, cu_seq_k, ...)     q [s, h g, d]   k, v [t, h, d]
#     ->  flex_attention(q, k, v, [first, last], "first[q] <= k <= last[q]")
#
# The borders of documents and a window give the range. So varlen_attn has flex_attention's layouts:
# sharded heads need no gather, and keys travel round a ring of queries. It also runs on CPUs.

SEEN = (
    "aten.bitwise_and.Tensor(aten.ge.Tensor(k, aten.index.Tensor(u0, [q])), "
    "aten.le.Tensor(k, aten.index.Tensor(u1, [q])))"
)


@rewrite("product", "torch_attn::_varlen_attn")
def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Return the result, the logsumexp, and a random state that nothing reads.

    A query behind the last document sees no key: its result is 0.
    """
    if block_table is not None or cu_seq_k is None:
        raise ShardingError.here(
            "varlen_attn reads its keys from pages",
            why="a page may lie on any device, and only a run knows on which",
            fix="leave block_table out, with keys [tokens, heads, width] and cu_seq_k",
        )
    if query.dim() != 3 or query.shape[1] % key.shape[1] or query.shape[-1] != key.shape[-1]:
        return DECLINED  # a mistake that PyTorch will explain
    left, right = (-1, -1) if window_size is None else window_size
    right = 0 if is_causal else right
    first, last = _ranges(query.shape[0], cu_seq_q, cu_seq_k, left, right, seqused_k)
    mask = SEEN
    if cu_seq_q is cu_seq_k and seqused_k is None and type(max_q) is type(max_k) is int:
        longest = max(max_q, max_k)
        mask = _within(_within(mask, "q, k", left, longest), "k, q", right, longest)
    scale = 1 / math.sqrt(query.shape[-1] or 1) if scale is None else scale
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out, lse = flex_attention(q, k, v, [first, last], mask, "", "", scale)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0), torch.zeros(2, dtype=torch.uint64)


def _within(mask: str, places: str, limit: int, longest: int) -> str:
    """Add to a mask how far a query looks to one side, at most.

    The ranges say it, too. But planning knows the length of the longest document, and seldom the
    ranges, so it knows which devices need nothing from each other.
    """
    limit = longest - 1 if limit < 0 else min(limit, longest - 1)
    near = f"aten.le.Scalar(aten.sub.Tensor({places}), {limit})"
    return f"aten.bitwise_and.Tensor({mask}, {near})"


def _ranges(
    queries: int, cu_q: Tensor, cu_k: Tensor, left: int, right: int, used: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each query sees; first > last if it sees none.

    cu_q, cu_k: where documents begin, and the end. left, right: keys of a window beside the query;
    -1: all. used: how many of each document's keys count.
    """
    place = torch.arange(queries, device=cu_q.device, dtype=cu_q.dtype)
    # A place on a border belongs to the document that begins there, behind all empty ones.
    document = torch.searchsorted(cu_q, place, right=True) - 1
    beyond = document >= cu_q.shape[0] - 1
    document = document.clamp(0, cu_q.shape[0] - 2)
    begin = cu_k[document]
    end = cu_k[document + 1] if used is None else begin + used[document].to(begin.dtype)
    first, last = begin, end - 1
    # The last query of a document stands beside its last key.
    beside = place if used is None and cu_q is cu_k else place + end - cu_q[document + 1]
    if left >= 0:
        first = torch.maximum(first, beside - left)
    if right >= 0:
        last = torch.minimum(last, beside + right)
    return first, torch.where(beyond, first - 1, last)
