"""The rows that pipelines add to the core's tables; PIPELINE has their passes."""

from ...comm.loop_call import BODY_CALLS
from ...rules.custom_ops.loops import APART, DELIVERED, LOOP_MARKS, SIZED_MARKS
from . import rule  # noqa: F401 (rows of RULES)
from .call import TAG, StageCall
from .op import HEAD, SEND

BODY_CALLS[TAG] = StageCall
LOOP_MARKS |= {HEAD, SEND}
SIZED_MARKS.add(HEAD)  # stages without the loss have zeros in its values' shapes
APART[SEND] = 3
# A message reaches a stage in its own round, or in the next one.
DELIVERED[SEND] = lambda node: (node.args[1], node.args[2][1], node.args[4])  # pyright: ignore
