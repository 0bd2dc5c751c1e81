"""What is known of every operation. `rule_of` is all that the passes ask."""
from . import (  # noqa: F401 (they register)
    advanced,
    contraction,
    convolution,
    factory,
    indexing,
    normalization,
    ordering,
    pointwise,
    pooling,
    reduction,
    scan,
    scatter,
    view,
)
from .decompose import RENAMED, decomposition_of, trace
from .notation import IDENTITY, Call, Rule, Shapes, describe, make_rule
from .registry import RULES, replicated
from .unpartitioned import unpartitioned_of


def rule_of(call: Call) -> Rule:
    """The rule of a call; of an operation without one, the rule that it runs replicated."""
    function = RULES.get(call.target)
    found = function(call) if function else None
    return replicated(call) if found is None else found


__all__ = ["IDENTITY", "RENAMED", "Call", "Rule", "Shapes", "decomposition_of", "describe", "make_rule", "rule_of", "trace",
           "unpartitioned_of"]
