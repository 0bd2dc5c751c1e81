"""Pipelines: each device runs its stages, one piece of a microbatch at a time."""

from __future__ import annotations

import math

from torch import fx

from ...comm.kinds import permute
from ...errors import ShardingError
from ...fx_passes.loop_call import BODY_CALLS, BodyCall
from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from ...fx_passes.program import Program
from ...layout.mesh import Mesh
from ...rules.custom_ops.loops import APART, DELIVERED, LOOP_MARKS, SIZED_MARKS
from ...rules.notation import Call, FactorRule, factors
from ...rules.registry import rule_for
from . import join_stages, outline_stages, regather_in_stages
from .call import TAG, StageCall
from .parts import HEAD, SEND


@rule_for(SEND, HEAD)
def _alike(call: Call) -> FactorRule:
    """Return the rule for a value that keeps its layout; the loss may begin with a pending sum."""
    names = factors("d", call.results[0].dim())
    linear = [] if call.target is SEND else [[0]]
    return call.rule([names] * len(call.tensors), [names], linear=linear)


def stage_sends(graph: fx.Graph, mesh: Mesh) -> fx.Graph | None:
    """Annotate sends between stages with the permute that a plan counts; None if there are none.

    A sent value's first dimension is the stages, sharded along their axis.
    """
    nodes = graph.find_nodes(op="call_function", target=SEND)
    for node in nodes:
        axis, spec, val = node.args[3], node.meta["spec"], node.meta["val"]
        if spec.dims[0] != (axis,) or spec.pending:
            raise ShardingError(
                f"what a stage of a pipeline along '{axis}' sends is laid out as '{spec}'",
                where=node.meta.get("source"),
                fix=f"mark no weight or value of the blocks along '{axis}'",
            )
        payload = float(math.prod(spec.local_shape(val.shape, mesh)) * val.dtype.itemsize)
        node.meta["step"] = permute.step(mesh, node.args[1:], spec, (axis,), payload)
    return graph if nodes else None


def _regather_in_stages(program: Program) -> fx.Graph | None:
    """Gather weights in each microbatch, in the way in which they are gathered again."""
    is_way = "regather_weights" in program.changed
    return regather_in_stages.regather_in_stages(program.graph) if is_way else None


FEATURE_PASSES |= {
    "stage_sends": FeaturePass(lambda p: stage_sends(p.graph, p.mesh), (SEND,)),
    "regather_in_stages": FeaturePass(_regather_in_stages, (SEND,)),
    "outline_stages": FeaturePass(
        lambda p: outline_stages.outline_stages(p.graph, p.mesh), (BodyCall,)
    ),
    "join_stages": FeaturePass(join_stages.join_stages, (BodyCall,)),
}
BODY_CALLS[TAG] = StageCall
LOOP_MARKS |= {HEAD, SEND}
SIZED_MARKS.add(HEAD)  # stages without the loss have zeros in its values' shapes
APART[SEND] = 3
# A message reaches a stage in its own round, or in the next one.
DELIVERED[SEND] = lambda node: (node.args[1], node.args[2][1], node.args[4])  # pyright: ignore
