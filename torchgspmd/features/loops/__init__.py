"""Loops: their bodies as programs, and the values that cross their iterations.

Values that enter or leave a loop body keep their layouts; rows are those of whole stacks.
"""

from __future__ import annotations

from torch import fx

from ...fx_passes.loop_call import BodyCall
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...fx_passes.program import Program
from ...rules.custom_ops.loops import CARRY, CONST, EXITS, NEXT, ROW, STACK, TOTAL, LoopMark
from ...rules.notation import Call, FactorRule, factors
from ...rules.registry import rule_for
from . import (
    capture,  # noqa: F401 (rows of REWRITES)
    list_rows,
    outline_loops,
    prefetch_rows,
)


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


def _prefetch_rows(program: Program) -> fx.Graph:
    prefetch_rows.prefetch_rows(program.graph, program.mesh)
    return program.graph


FEATURE_PASSES |= {
    "sink_exits": FeaturePass(lambda p: outline_loops.sink_exits(p.graph), EXITS),
    "outline_loops": FeaturePass(lambda p: outline_loops.outline_loops(p.graph, p.mesh), EXITS),
    "prefetch_rows": FeaturePass(_prefetch_rows, (BodyCall,)),
    "list_rows": FeaturePass(lambda p: list_rows.list_rows(p.graph), (BodyCall,)),
}
