"""The rules and decompositions of all operations. The passes ask `rule_of`."""

from . import (
    algebra_rows,  # noqa: F401 (registers simplifications)
    ops,  # noqa: F401 (registers the rules)
)
from .algebra import simplified
from .decompositions import RENAMED, decomposition_of, trace
from .notation import IDENTITY, Call, FactorRule, LocalForm, Shapes, describe, factors, make_rule
from .ops.pointwise import quotient
from .ops.random_ops import natively
from .registry import replicated_rule, rule, rule_for, rule_function
from .rewrites import DECLINED, rewrite
from .xla_decompositions import unpartitioned_of


def rule_of(call: Call) -> FactorRule:
    """Return the rule of a call. An operation without a rule runs replicated."""
    function = None if call.dynamic else rule_function(call.target)
    result = function(call) if function else DECLINED
    return replicated_rule(call) if result is DECLINED else result


__all__ = [
    "DECLINED",
    "IDENTITY",
    "RENAMED",
    "Call",
    "FactorRule",
    "LocalForm",
    "Shapes",
    "decomposition_of",
    "describe",
    "factors",
    "make_rule",
    "natively",
    "quotient",
    "rewrite",
    "rule",
    "rule_for",
    "rule_of",
    "simplified",
    "trace",
    "unpartitioned_of",
]
