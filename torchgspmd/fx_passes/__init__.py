"""The passes on the global graph, in order. Each is one function in one file."""

from .expand.decompose_ops import decompose_ops
from .ir import Rules
from .localize.localize import localize
from .partition.partition import partition
from .partition.regather_weights import regather_weights
from .propagate.propagate import Layouts, propagate

PASSES = (decompose_ops, propagate, partition, regather_weights, localize)

__all__ = [
    "PASSES",
    "Layouts",
    "Rules",
    "decompose_ops",
    "localize",
    "partition",
    "propagate",
    "regather_weights",
]
