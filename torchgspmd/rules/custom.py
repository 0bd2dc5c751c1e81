"""gspmd.rule: a rule for a custom operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compat.private_apis import OpOverload, OpOverloadPacket
from ..errors import ShardingError, user_line
from .notation import IDENTITY, Call, FactorRule, Sentence
from .registry import RULES, ordered

_CUSTOM: set[Any] = set()  # operations whose rule came from gspmd.rule, which may replace it


def rule(
    op: object,
    sentence: str | Sequence[str],
    *,
    reduce: str | Mapping[str, str] = "",
    whole: str = "",
    linear: Sequence[Sequence[int]] = (),
) -> None:
    """Register a rule for a custom operation, so that it runs sharded.

    Args:
        op: An operation from torch.library.custom_op, torch.ops.library.name, or "library::name".
        sentence: The factors for each tensor operand and, behind the arrow, for each result. `...`
            stands for leading dimensions, 1 for a dimension without a factor. There may be several
            sentences, for calls with other ranks or without some operand; the first that fits
            counts.
        reduce: Factors whose shards compute terms: "k", or {"k": "max"}.
        whole: Factors that every device needs whole.
        linear: Groups of operands in which the operation is linear.

    Raises:
        ShardingError: The sentence is malformed, or the operation has a rule already.

    Example:
        >>> @torch.library.custom_op("shop::total", mutates_args=())
        ... def total(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sum(-1)
        >>> _ = total.register_fake(lambda x: x.new_empty(x.shape[:-1]))
        >>> rule(total, "... k -> ...", reduce="k", linear=[[0]])
        >>> plan(total, torch.ones(4, 8), mesh=Mesh(model=2), in_specs="_ model").sent_bytes
        16.0
    """
    target, where = _target(op), user_line()
    sentences = [sentence] if isinstance(sentence, str) else list(sentence)
    parsed, text = [_parse(each, where) for each in sentences], " | ".join(sentences)
    names = {
        f
        for each in parsed
        for dims in (*each.operands, *each.results)
        for token in dims
        for f in token.strip("()").split()
    }
    reductions = dict.fromkeys(reduce.split(), "sum") if isinstance(reduce, str) else dict(reduce)
    for factor in (*reductions, *whole.split()):
        if factor not in names:
            raise ShardingError(f"'{factor}' is no factor of the rule '{text}'", where=where)
    for kind in reductions.values():
        if kind not in IDENTITY:
            raise ShardingError(
                f"'{kind}' is not a reduction; use one of {', '.join(IDENTITY)}", where=where
            )
    if target in RULES and target not in _CUSTOM:
        raise ShardingError(f"{target} has a rule already", where=where)
    _CUSTOM.add(target)
    ordered(target)  # a kernel may read memory as if it were contiguous

    def bind(call: Call) -> FactorRule:
        # The first sentence that fits counts. If none does, the error shows all faults.
        faults = []
        for each in parsed:
            try:
                return each.bind(call, reduce=reductions, replicated=whole, linear=linear)
            except ValueError as error:
                faults.append(str(error))
        shapes = ", ".join(str(list(t.shape)) for t in (*call.tensors, *call.results))
        raise ShardingError(
            f"the rule '{text}' does not fit a call of {target}",
            where=where,
            why=f"{'; '.join(dict.fromkeys(faults))}; tensors of the call: {shapes}",
            fix="give a sentence for this call too: rule(op, [sentence, ...])",
        )

    RULES[target] = bind


def _target(op: object) -> OpOverload | str:
    if isinstance(op, OpOverloadPacket):
        return op.default
    # torch.library.custom_op returns an object around the overload.
    target = getattr(op, "_opoverload", op)
    if isinstance(target, OpOverload) or isinstance(target, str) and "::" in target:
        return target
    raise ShardingError.here(
        f"{op!r} is no operation",
        fix="give what torch.library.custom_op returned, or 'library::name'",
    )


def _parse(sentence: str, where: str | None) -> Sentence:
    try:
        return Sentence.parse(sentence)
    except ValueError as error:
        raise ShardingError(
            str(error),
            where=where,
            fix="separate tensors by commas, factors by blanks: 'b k, k n -> b n'",
        ) from error
