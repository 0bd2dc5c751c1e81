"""The rows that pipelines add to the tables of the core; PIPELINE has their passes."""

from ...comm.loop_call import BODY_CALLS
from ...rules.custom_ops.loops import APART, LOOP_MARKS
from . import rule  # noqa: F401 (rows of RULES)
from .call import TAG, StageCall
from .op import HEAD, SEND

BODY_CALLS[TAG] = StageCall
LOOP_MARKS |= {HEAD, SEND}
APART[SEND] = 3
