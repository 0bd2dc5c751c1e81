"""Values that enter or leave a loop body keep their layouts; rows are those of whole stacks."""

from __future__ import annotations

from ...rules.custom_ops.loops import CARRY, CONST, NEXT, ROW, STACK, TOTAL, LoopMark
from ...rules.notation import Call, FactorRule, factors
from ...rules.registry import rule_for


@rule_for(CARRY, CONST, NEXT, TOTAL)
def _alike(call: Call) -> FactorRule:
    """Return the rule for a value that enters or leaves a loop. Sums may leave it pending.

    A carry is reduced. So is the result of a loop that may not run: it may be the first carry.
    """
    names = factors("d", call.results[0].dim())
    may_not_run = call.target is NEXT and LoopMark.of(call.args).ends_by_value
    linear = [] if call.target is CARRY or may_not_run else [[0]]
    return call.rule([names] * len(call.tensors), [names], linear=linear)


@rule_for(ROW)
def _row(call: Call) -> FactorRule:
    names = factors("d", call.results[0].dim())
    return call.rule([["n", *names]], [names], replicated="n", linear=[[0]])


@rule_for(STACK)
def _stack(call: Call) -> FactorRule:
    names = factors("d", call.tensors[0].dim())
    return call.rule([names], [["n", *names]], replicated="n", linear=[[0]])
