"""The passes. Each is one function in one file; pipeline.py has their order."""

from .expand.decompose_ops import decompose_ops
from .ir import Rules
from .localize.localize import localize
from .partition.partition import partition
from .partition.regather_weights import regather_weights
from .propagate.layouts import Layouts
from .propagate.propagate import propagate

__all__ = [
    "Layouts",
    "Rules",
    "decompose_ops",
    "localize",
    "partition",
    "propagate",
    "regather_weights",
]
