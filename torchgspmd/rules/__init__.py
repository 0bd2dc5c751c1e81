"""What is known of every operation. `rule_of` is all that the passes ask."""
from . import (  # noqa: F401 (they register)
    adaptive_max,
    advanced,
    contraction,
    convolution,
    drawing,
    factory,
    indexing,
    linalg,
    moving,
    normalization,
    ordering,
    pointwise,
    pooling,
    reduction,
    resampling,
    rows,
    sampling,
    scan,
    scatter,
    simplify_rows,
    strided,
    view,
)
from .decompose import RENAMED, decomposition_of, trace
from .drawing import natively
from .notation import IDENTITY, Call, Rule, Shapes, describe, make_rule
from .pointwise import quotient
from .registry import replicated, rule_function
from .simplify import simplified
from .unpartitioned import unpartitioned_of


def rule_of(call: Call) -> Rule:
    """The rule of a call; of an operation without one, the rule that it runs replicated."""
    function = None if call.dynamic else rule_function(call.target)
    found = function(call) if function else None
    return replicated(call) if found is None else found


__all__ = ["IDENTITY", "RENAMED", "Call", "Rule", "Shapes", "decomposition_of", "describe", "make_rule", "natively", "quotient", "rule_of",
           "simplified", "trace", "unpartitioned_of"]
