"""Rules and decompositions for all operations. The passes ask `rule_of`."""

# These register simplifications and rules.
from . import algebra_rows, algebra_sums, ops
from .algebra import simplified
from .decompositions import RENAMED, decomposition_of, trace, unpartitioned_of
from .flat_call import FlatCall, flat_rule
from .notation import IDENTITY, Call, FactorRule, LocalForm, Shapes, describe, factors, make_rule
from .ops.factory import has_own_seed, natively
from .ops.pointwise import is_elementwise, quotient
from .registry import replicated_rule, rule, rule_for, rule_function, rule_in_a_run
from .rewrites import DECLINED, Declined, SplitRequest, rewrite, rewrite_of


def rule_of(call: Call) -> FactorRule:
    """Return a call's rule. An operation without a rule runs replicated."""
    result = _lookup(call) if call.other is None else rule_in_a_run(call, call.other, _lookup)
    return replicated_rule(call) if result is DECLINED else result


def _lookup(call: Call) -> FactorRule | Declined:
    if isinstance(call.target, FlatCall):
        return flat_rule(call, rule_of)
    function = rule_function(call.target)
    return function(call) if function else DECLINED
