"""The rule table. It is filled at import and only read afterwards.

rule(op, "m k, k n -> m n", reduce="k")     one sentence for all calls of an operation
@rule_for(op)                               a function from a Call to its FactorRule
@host_reads(op)                             a function from a node to the reason why the host reads
                                            a value for this call, or None if it does not
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import fx

from ..compat.operators import AbsentOperator, find
from ..compat.private_apis import OpOverload
from .notation import Call, FactorRule, LocalForm, Sentence, Shapes, factors
from .rewrites import Declined, check_ended, feature_of, is_present, restored

RuleFunction = Callable[[Call], FactorRule | Declined]
RULES: dict[Any, RuleFunction] = {}
Reason = Callable[[fx.Node], str | None]
HOST_READS: dict[Any, Reason] = {}  # filled at import, and only read afterwards


def rule(op: OpOverload | AbsentOperator | str, sentence: str, **keywords: Any) -> None:
    """Register an operation's sentence; a name `library::name` may be loaded later.

    keywords: see make_rule.
    """
    parsed = Sentence.parse(sentence)

    def bound(call: Call) -> FactorRule:
        return parsed.bind(call, **keywords)

    bound.__module__ = sys._getframe(1).f_globals["__name__"]  # as namedtuple does: feature_of
    rule_for(op)(bound)


def rule_function(op: object) -> RuleFunction | None:
    """Return the function that computes rules for an operation's calls, or None."""
    check_ended()
    function = RULES.get(op)
    # A rule may be registered by name before its library is loaded.
    return RULES.get(op.name()) if function is None and isinstance(op, OpOverload) else function


def rule_for(*ops: OpOverload | AbsentOperator | str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function that computes a call's rule. DECLINED: the call runs replicated."""

    def register(function: RuleFunction) -> RuleFunction:
        for op in filter(is_present, ops):
            if op in RULES:
                raise ValueError(f"{op} has a rule already")
            RULES[op] = function
        return function

    return register


@contextmanager
def without_rules(feature: str) -> Generator[None, None, None]:
    """Take a feature's rows out of the table while in this context."""
    with restored(RULES) as before:
        for op, function in before.items():
            if feature_of(function) == feature:
                del RULES[op]
        yield


def is_registered(name: str) -> bool:
    """Return whether an operator is loaded by now, such as `library::name`."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    return find(namespace, operator, overload or "default") is not None


def replicated_rule(call: Call) -> FactorRule:
    """Return a rule for an operation without one: every device computes all of it."""
    tensors, count = (*call.tensors, *call.results), len(call.tensors)
    dims = [factors(f"r{i}_", t.dim()) for i, t in enumerate(tensors)]
    return call.rule(
        dims[:count],
        dims[count:],
        replicated=[name for names in dims for name in names],
        # Tensors of one element cannot be sharded, so no rule is missing.
        described=all(size < 2 for t in tensors for size in t.shape),
    )


def shape_argument(index: int, emit: Callable | None = None, **keywords: Any) -> LocalForm:
    """Return the local form for an operation whose argument `index` is the result's shape."""

    def arguments(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
        return (*args[:index], list(shapes.results[0]), *args[index + 1 :]), kwargs

    return LocalForm(emit, arguments=arguments, **keywords)


def host_reads(*ops: object) -> Callable[[Reason], Reason]:
    """Register the reason, which operands decide. A CUDA graph cannot capture such a call."""

    def register(reason: Reason) -> Reason:
        HOST_READS.update(dict.fromkeys(ops, reason))
        return reason

    return register
