"""The table of moves: everything by which the search for layouts changes an assignment.

source   ours
"""

from __future__ import annotations

from .body_moves import BodyMove, ThreadMove
from .course_move import CourseMove
from .local_search import Row
from .message_move import MessageMove
from .small_moves import ChainMove, EarlySumMove, InputMove, OperationMove, SumMove

MOVES = (
    Row(
        OperationMove,
        "sweep",
        "another strategy for one operation",
        "Most operations gain alone, beside neighbors that keep theirs.",
    ),
    Row(
        SumMove,
        "sweep",
        "all summands pending over an axis, or none",
        "An addition passes on only sums that are pending in both operands, so none gains alone.",
    ),
    Row(
        ChainMove,
        "sweep",
        "views in a row laid out like the first operand, or as the last result is needed",
        "A view between two others that stay costs two messages.",
    ),
    Row(
        InputMove,
        "sweep",
        "another layout for an open input",
        "Its users see the input's layout, and none of them chooses it.",
    ),
    Row(
        BodyMove,
        "round",
        "another factor for an axis in all operations between contractions",
        "One norm of a residual stream would exchange the stream twice.",
    ),
    Row(
        ThreadMove,
        "round",
        "an axis for one dimension, through the contractions too",
        "Weights are moved once for both products of a layer, or for all rounds of a loop.",
    ),
    Row(
        EarlySumMove,
        "round",
        "the reduction of a pending sum where it is computed",
        "Each of its users would reduce its own result, whatever another one does.",
    ),
    Row(
        CourseMove,
        "program",
        "an axis for an open input's dimension, and for everything that this runs through",
        "Tokens divided over the experts' axis are gathered again at the first layer that is not.",
    ),
    Row(
        MessageMove,
        "last",
        "fewer messages, for a few bytes more",
        "By bytes alone two exchanges may cost less than one halo.",
    ),
)
