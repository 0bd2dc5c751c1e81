"""The rules and decompositions of all operations. The passes ask `rule_of`."""

from . import (
    algebra_rows,  # noqa: F401 (registers simplifications)
    ops,  # noqa: F401 (registers the rules)
)
from .algebra import simplified
from .decompositions import RENAMED, decomposition_of, trace
from .notation import IDENTITY, Call, Rule, Shapes, describe, make_rule
from .ops.pointwise import quotient
from .ops.random_ops import natively
from .registry import replicated_rule, rule_function
from .xla_decompositions import unpartitioned_of


def rule_of(call: Call) -> Rule:
    """Return the rule of a call. An operation without a rule runs replicated."""
    function = None if call.dynamic else rule_function(call.target)
    rule = function(call) if function else None
    return replicated_rule(call) if rule is None else rule


__all__ = [
    "IDENTITY",
    "RENAMED",
    "Call",
    "Rule",
    "Shapes",
    "decomposition_of",
    "describe",
    "make_rule",
    "natively",
    "quotient",
    "rule_of",
    "simplified",
    "trace",
    "unpartitioned_of",
]
