"""What is known of every operation. `rule_of` is all that the passes ask."""

from . import (
    algebra_rows,  # noqa: F401 (they register)
    ops,  # noqa: F401 (registers them)
)
from .algebra import simplified
from .decompositions import RENAMED, decomposition_of, trace
from .notation import IDENTITY, Call, Rule, Shapes, describe, make_rule
from .ops.pointwise import quotient
from .ops.random_ops import natively
from .registry import replicated, rule_function
from .xla_decompositions import unpartitioned_of


def rule_of(call: Call) -> Rule:
    """The rule of a call; of an operation without one, the rule that it runs replicated."""
    function = None if call.dynamic else rule_function(call.target)
    found = function(call) if function else None
    return replicated(call) if found is None else found


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
