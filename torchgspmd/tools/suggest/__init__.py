"""suggest: search mesh shapes and marks, with the planner and the estimate as judge."""

from .proposal import Proposal as Proposal
from .search import suggest as suggest
