"""The rows that pipelines add to the core's tables; PIPELINE places their passes."""

from __future__ import annotations

from ...fx_passes.loop_call import BODY_CALLS, BodyCall
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...rules.custom_ops.loops import APART, DELIVERED, LOOP_MARKS, SIZED_MARKS
from ...rules.notation import Call, FactorRule, factors
from ...rules.registry import rule_for
from .call import TAG, StageCall
from .op import HEAD, SEND
from .outline_stages import outline_stages
from .stage_sends import stage_sends


@rule_for(SEND, HEAD)
def _alike(call: Call) -> FactorRule:
    """Return the rule for a value that keeps its layout; the loss may begin with a pending sum."""
    names = factors("d", call.results[0].dim())
    linear = [] if call.target is SEND else [[0]]
    return call.rule([names] * len(call.tensors), [names], linear=linear)


FEATURE_PASSES |= {
    "stage_sends": FeaturePass(lambda p: stage_sends(p.graph, p.mesh), (SEND,)),
    "outline_stages": FeaturePass(lambda p: outline_stages(p.graph, p.mesh), (BodyCall,)),
}
BODY_CALLS[TAG] = StageCall
LOOP_MARKS |= {HEAD, SEND}
SIZED_MARKS.add(HEAD)  # stages without the loss have zeros in its values' shapes
APART[SEND] = 3
# A message reaches a stage in its own round, or in the next one.
DELIVERED[SEND] = lambda node: (node.args[1], node.args[2][1], node.args[4])  # pyright: ignore
